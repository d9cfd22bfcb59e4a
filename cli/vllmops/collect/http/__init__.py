"""Clients of vLLM's HTTP routes and of the admin routes, also through Kubernetes."""
