"""Servers on this machine: registry, discovery, membership, supervisor."""
