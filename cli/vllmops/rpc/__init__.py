"""Agents' sockets, from the command line's side."""
