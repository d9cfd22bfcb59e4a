"""Hooks into vLLM's classes, imports and requests: to see them, refuse them or hand them over."""
