"""A request at the head of the queue that can't be admitted: all others wait behind it.

It needs more of the KV cache than there is, or than requests leave free that wait themselves
(vLLM #45387, #57841). It is ended by the front end, which knows its client.
"""

from __future__ import annotations

from typing import Any

from ...protocol.heal import Proof
from .. import engine, objects
from ..adapters import requests, scheduling, transfers


def look() -> list[Proof]:
    """The request at the head, if nothing that runs can make room for it."""
    scheduler = objects.latest("scheduler")
    if scheduler is None or engine.rests(scheduler):
        return []
    waiting, queue = scheduling.waiting(scheduler), scheduling.queued(scheduler)
    proofs = []
    for head in waiting[:1] + [one for one in queue[:1] if one is not waiting[0]]:
        if why := too_large(scheduler, head):
            told = f"this request can never run here: {why}"
        elif [head] == queue[:1] and (why := held_up(scheduler, head)):
            told = f"this request can't run now: {why}: send it again"
        else:
            continue
        proofs.append(
            Proof(
                subject=head.request_id,
                what=f"{why}; requests behind it: {len(waiting) - 1:,}",
                why=told,
                same=f"{id(head)} {head.num_tokens} {head.num_computed_tokens}",
                rises=engine.step(scheduler),
            )
        )
    return proofs


def too_large(scheduler: Any, request: Any) -> str:
    """Why a request can never be admitted; empty if it can."""
    needed = scheduling.blocks_needed(scheduler, request)
    usable = scheduling.blocks_usable(scheduler)
    if needed > usable and scheduling.one_pool(scheduler):
        return (
            f"its {request.num_tokens:,} tokens need {needed:,} blocks of the KV cache, which has "
            f"{usable:,}"
        )
    return ""


def held_up(scheduler: Any, request: Any) -> str:
    """Why a request can't be admitted although all of it would fit; empty if that may change.

    Blocks become free while a request runs, while a transfer from or to elsewhere is under way, and
    once a session that waits for input gets on.
    """
    sessions = getattr(scheduler, "num_waiting_for_streaming_input", 0)
    if scheduler.running or sessions or transfers.waiting(scheduler):
        return ""
    if not scheduling.one_pool(scheduler):
        return ""
    known = requests.scheduled(scheduler)
    if any(one.is_finished() for one in known):
        return ""
    held = sum(requests.blocks(scheduler).values())
    needed, free = scheduling.blocks_to_go_on(scheduler, request), scheduling.blocks_free(scheduler)
    if needed <= free or not held:
        return ""
    rest = f"{free:,} are free, and requests that wait hold {held:,}"
    return f"it needs {needed:,} more blocks of the KV cache; {rest}"
