"""A server's multimodal and encoder caches: look, compare, repair."""
