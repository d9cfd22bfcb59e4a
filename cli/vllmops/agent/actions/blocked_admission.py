"""A request at the head of the queue that can't be admitted: all others wait behind it.

It needs more of the KV cache than there is, or than requests leave free that wait themselves
(vLLM #45387, #57841). It is ended by the front end, which knows its client.
"""

from __future__ import annotations

from typing import Any

from ...model.healing import HealProof
from ..hooks import vllm_objects
from ..state import engine
from ..versions import kv_transfers, requests
from ..versions import scheduler as scheduling


def find_blocking_requests() -> list[HealProof]:
    """The request at the head, if nothing that runs can make room for it."""
    scheduler = vllm_objects.find_latest("scheduler")
    if scheduler is None or engine.is_paused_or_asleep(scheduler):
        return []
    waiting, queue = (
        scheduling.list_waiting_requests(scheduler),
        scheduling.list_undeferred_requests(scheduler),
    )
    proofs = []
    for head in waiting[:1] + [one for one in queue[:1] if one is not waiting[0]]:
        if why := explain_too_large(scheduler, head):
            told = f"this request can never run here: {why}"
        elif [head] == queue[:1] and (why := explain_blocked(scheduler, head)):
            told = f"this request can't run now: {why}: send it again"
        else:
            continue
        proofs.append(
            HealProof(
                subject=head.request_id,
                evidence=f"{why}; requests behind it: {len(waiting) - 1:,}",
                client_message=told,
                progress_key=f"{id(head)} {head.num_tokens} {head.num_computed_tokens}",
                rises=engine.find_current_step(scheduler),
            )
        )
    return proofs


def explain_too_large(scheduler: Any, request: Any) -> str:
    """Why a request can never be admitted; empty if it can."""
    needed = scheduling.count_needed_blocks(scheduler, request)
    usable = scheduling.count_usable_blocks(scheduler)
    if needed > usable and scheduling.has_one_block_pool(scheduler):
        return (
            f"its {request.num_tokens:,} tokens need {needed:,} blocks of the KV cache, which has "
            f"{usable:,}"
        )
    return ""


def explain_blocked(scheduler: Any, request: Any) -> str:
    """Why a request can't be admitted although all of it would fit; empty if that may change.

    Blocks become free while a request runs, while a transfer from or to elsewhere is under way, and
    once a session that waits for input gets on.
    """
    sessions = getattr(scheduler, "num_waiting_for_streaming_input", 0)
    if scheduler.running or sessions or kv_transfers.list_loading_requests(scheduler):
        return ""
    if not scheduling.has_one_block_pool(scheduler):
        return ""
    known = requests.list_scheduler_requests(scheduler)
    if any(one.is_finished() for one in known):
        return ""
    held = sum(requests.count_blocks_by_request(scheduler).values())
    needed, free = (
        scheduling.count_blocks_to_schedule(scheduler, request),
        scheduling.count_free_blocks(scheduler),
    )
    if needed <= free or not held:
        return ""
    rest = f"{free:,} are free, and requests that wait hold {held:,}"
    return f"it needs {needed:,} more blocks of the KV cache; {rest}"
