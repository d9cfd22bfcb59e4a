"""Owners of what a server keeps or runs: whoever has an API key."""

from __future__ import annotations

import hashlib


def derive_owner(key: str) -> str:
    """As whose responses are kept that come with an API key: a hash of it."""
    return hashlib.sha256(key.encode()).hexdigest()
