"""Watches a server and reports when it stalls."""
