"""A request at the head of the queue that can never be admitted: all others wait behind it.

It is ended by the front end, which knows its client.
"""

from __future__ import annotations

from typing import Any

from ...protocol.heal import Proof
from .. import engine, objects
from ..adapters import scheduling


def look() -> list[Proof]:
    """The request at the head, if it needs more than there is."""
    scheduler = objects.latest("scheduler")
    if scheduler is None or engine.rests(scheduler):
        return []
    queue = scheduling.queued(scheduler)
    if not queue or not (why := too_large(scheduler, queue[0])):
        return []
    head = queue[0]
    return [
        Proof(
            subject=head.request_id,
            what=f"{why}; requests behind it: {len(queue) - 1:,}",
            why=f"this request can never run here: {why}",
            same=f"{id(head)} {head.num_tokens}",
            rises=engine.step(scheduler),
        )
    ]


def too_large(scheduler: Any, request: Any) -> str:
    """Why a request can never be admitted; empty if it can."""
    needed = scheduling.blocks_needed(scheduler, request)
    usable = scheduling.blocks_usable(scheduler)
    if needed > usable:
        return (
            f"its {request.num_tokens:,} tokens need {needed:,} blocks of the KV cache, which has "
            f"{usable:,}"
        )
    return ""
