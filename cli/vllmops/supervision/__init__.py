"""Runs a server: starts it, watches it, hands it over and ends it."""
