"""Snapshots of several parts of a server, put together from many sources."""
