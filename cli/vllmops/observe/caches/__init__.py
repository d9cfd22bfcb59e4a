"""A server's multimodal and encoder caches: inspect, compare, repair."""
