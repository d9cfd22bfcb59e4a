"""Servers on this machine: registry, discovery by process tree, supervisor."""
