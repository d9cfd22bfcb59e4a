"""What can be an id in every backend."""

from __future__ import annotations

LONGEST_ID = 256


def is_valid_id(identifier: str) -> bool:
    """Whether it can be an id: not empty, not endless, and text that every backend takes."""
    return 0 < len(identifier) <= LONGEST_ID and is_storable(identifier)


def is_storable(text: str) -> bool:
    """Whether every backend takes a text."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False
