"""Loads the agent into a server that runs without it."""
