"""What was seen in a server, as plain data: the seam between agent, CLI and saved files."""
