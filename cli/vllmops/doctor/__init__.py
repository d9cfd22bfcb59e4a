"""Looks at a server from all sides for ``vllmops doctor``."""
