"""Servers on this machine: registry, discovery, supervisor."""
