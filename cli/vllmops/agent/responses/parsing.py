"""Items as vLLM reads them, and as it makes messages of them."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from .carried import Item


def parsed(items: list[Item]) -> list[Any]:
    """Items as vLLM reads them."""
    given = {"input": list(map(detailed, items))}
    found: list[Any] = ResponsesRequest.input_item_parsing(given)["input"]
    return found


def detailed(item: Item) -> Item:
    """An item whose images have the ``detail`` that they need not be sent with.

    vLLM's renderer wants it, and its model of a request adds it to the items of one.
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
    # Not above: a vLLM without it can do all the rest.
    from vllm.entrypoints.openai.responses.utils import (  # noqa: PLC0415
        construct_chat_messages_with_tool_call,
    )

    # What has no type is taken for the instructions of a turn, which don't carry over.
    typed = [{"type": "message", **each} if "role" in each else each for each in items]
    made: list[Any] = construct_chat_messages_with_tool_call(parsed(typed))
    return made
