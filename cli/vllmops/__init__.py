"""Operate vLLM servers: launch and hold them, look inside, diagnose, repair."""

__version__ = "0.1.0"
