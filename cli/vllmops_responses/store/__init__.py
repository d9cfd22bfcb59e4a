"""Stored responses and conversations: the store, backends, archives; for server and commands."""
