"""Hooks into vLLM's classes, imports and request path: they tell the agent what there is."""
