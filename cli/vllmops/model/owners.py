"""Derives the owner of a request or of a stored response from its API key."""

from __future__ import annotations

import hashlib


def derive_owner(key: str) -> str:
    """The owner of all that comes with an API key: a hash, so that nobody learns the key."""
    return hashlib.sha256(key.encode()).hexdigest()
