"""Records the memory of a server's processes over time, and plots it."""
