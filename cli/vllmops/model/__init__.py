"""What vllmops knows about servers, as plain data: between processes, and in saved files."""
