"""What the agent hangs into vLLM's own classes, imports and request path."""
