"""The agent's ways to be asked: its socket, the admin routes, other nodes and vLLM's /metrics."""
