"""Converts items to vLLM's types, and to chat messages."""

from __future__ import annotations

from typing import Any

from ..adapters import responses as adapter
from .carried import Item


def parsed(items: list[Item]) -> list[Any]:
    """Items as vLLM's types."""
    return adapter.parsed(list(map(adapter.detailed, items)))


def messages(items: list[Item]) -> list[Any]:
    """Items as messages of the Chat Completions API, as carriers of format 1 have them."""
    # vLLM takes items without a type for instructions of a turn, which it drops.
    typed = [{"type": "message", **item} if "role" in item else item for item in items]
    return adapter.messages(parsed(typed))
