"""Converts items to vLLM's types, and to chat messages."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from .carried import Item


def parsed(items: list[Item]) -> list[Any]:
    """Items as vLLM's types."""
    given = {"input": list(map(detailed, items))}
    typed: list[Any] = ResponsesRequest.input_item_parsing(given)["input"]
    return typed


def detailed(item: Item) -> Item:
    """An item with a ``detail`` in each image.

    Clients may leave it out, vLLM's renderer requires it, and vLLM's request model adds it.
    """
    if not isinstance(content := item.get("content"), list):
        return item
    return {
        **item,
        "content": [
            {"detail": "auto", **part}
            if isinstance(part, dict) and part.get("type") == "input_image"
            else part
            for part in content
        ],
    }


def messages(items: list[Item]) -> list[Any]:
    """Items as messages of the Chat Completions API, as carriers of format 1 have them."""
    # Imported here, because everything else also works in a vLLM without this function.
    from vllm.entrypoints.openai.responses.utils import (  # noqa: PLC0415
        construct_chat_messages_with_tool_call,
    )

    # vLLM takes items without a type for instructions of a turn, which it drops.
    typed = [{"type": "message", **item} if "role" in item else item for item in items]
    chat: list[Any] = construct_chat_messages_with_tool_call(parsed(typed))
    return chat
