"""``truncation: auto``: drops the oldest items of an input that is too long for the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

KEPT = frozenset({"system", "developer"})


async def select_fitting_items(
    items: Sequence[Any], fits: Callable[[list[Any]], Awaitable[bool]]
) -> list[Any] | None:
    """The newest items that fit, and all messages of the system and the developer.

    An output of a tool is not left without its call.

    Args:
        items: of an input that does not fit, as vLLM reads them.
        fits: whether the model takes these.

    Returns:
        None if not even the last item fits.
    """
    low, high = 1, len(items)  # how many are dropped: too few, and as few as is known to do
    best: list[Any] | None = None
    while low < high:
        middle = (low + high) // 2
        left = drop_oldest_items(items, middle)
        if left[-1:] != items[-1:]:
            high = middle  # the last item is an output whose call is dropped
        elif await fits(left):
            best, high = left, middle
        else:
            low = middle + 1
    return best


def drop_oldest_items(items: Sequence[Any], count: int) -> list[Any]:
    """Items without the oldest ones."""
    calls = {get_field(item, "call_id") for item in items[:count] if is_tool_call(item)}
    return [
        item
        for at, item in enumerate(items)
        if (get_field(item, "role") in KEPT or at >= count)
        and not (is_tool_output(item) and get_field(item, "call_id") in calls)
    ]


def is_tool_call(item: Any) -> bool:
    """Whether an item is a call of a tool that a client runs."""
    return str(get_field(item, "type")).endswith("_call")


def is_tool_output(item: Any) -> bool:
    """Whether an item is what a tool gave."""
    return str(get_field(item, "type")).endswith("_call_output")


def get_field(item: Any, name: str) -> Any:
    """A field of an item; None if there is none."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)
