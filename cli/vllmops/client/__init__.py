"""Talking to a server: its HTTP API, its agents' sockets, and py-spy on its processes."""
