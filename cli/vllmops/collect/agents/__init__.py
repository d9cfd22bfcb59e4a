"""Asks agents over their sockets, reads their files, finds which processes are one server."""
