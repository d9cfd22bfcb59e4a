"""Records and plots the memory of a server's processes."""
