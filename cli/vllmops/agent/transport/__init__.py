"""How the agent is asked: its socket, the admin routes, other nodes, vLLM's /metrics."""
