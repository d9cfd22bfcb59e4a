"""Snapshots and comparisons of a server's multimodal and encoder caches."""
