"""Operate vLLM servers: launch, supervise, inspect, diagnose, repair."""

__version__ = "0.1.0"
