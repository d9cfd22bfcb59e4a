"""Agents' sockets, and which processes are one server's as their agents tell it."""
