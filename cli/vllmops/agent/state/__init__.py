"""Reads the state of this process when the agent is asked: caches, engine, requests, memory."""
