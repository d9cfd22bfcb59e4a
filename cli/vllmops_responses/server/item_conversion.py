"""Converts items to vLLM's types, and to chat messages."""

from __future__ import annotations

from typing import Any

from . import vllm_interface
from .carriers.carrier_merge import Item


def parse_items(items: list[Item]) -> list[Any]:
    """Items as vLLM's types."""
    return vllm_interface.parse_items(list(map(vllm_interface.adapt_item, items)))


def convert_items_to_messages(items: list[Item]) -> list[Any]:
    """Items as messages of the Chat Completions API, as carriers of format 1 have them."""
    # vLLM takes items without a type for instructions of a turn, which it drops.
    typed = [{"type": "message", **item} if "role" in item else item for item in items]
    return vllm_interface.make_chat_messages(parse_items(typed))
