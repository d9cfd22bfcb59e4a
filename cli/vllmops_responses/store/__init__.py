"""Stored responses: backends, conformance checks, archive; for server and command line."""
