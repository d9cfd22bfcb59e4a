"""``truncation: auto``: drops the oldest items of an input that is too long for the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

KEPT = frozenset({"system", "developer"})


async def fitting(
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
        left = after(items, middle)
        if left[-1:] != items[-1:]:
            high = middle  # the last item is an output whose call is dropped
        elif await fits(left):
            best, high = left, middle
        else:
            low = middle + 1
    return best


def after(items: Sequence[Any], count: int) -> list[Any]:
    """Items without the oldest ones."""
    calls = {of(item, "call_id") for item in items[:count] if is_call(item)}
    return [
        item
        for at, item in enumerate(items)
        if (of(item, "role") in KEPT or at >= count)
        and not (is_output(item) and of(item, "call_id") in calls)
    ]


def is_call(item: Any) -> bool:
    """Whether an item is a call of a tool that a client runs."""
    return str(of(item, "type")).endswith("_call")


def is_output(item: Any) -> bool:
    """Whether an item is what a tool gave."""
    return str(of(item, "type")).endswith("_call_output")


def of(item: Any, name: str) -> Any:
    """A field of an item; None if there is none."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)
