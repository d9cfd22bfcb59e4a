"""Watches a server and tells when it stalls."""
