"""What processes exchange, as plain data: the seam between agent, command line and saved files."""
