"""Waiting requests that hold the encoder cache, so that nothing gets a token (vLLM #31857).

vLLM lets go of what a request holds when it can't be admitted. The same is done here, for as few
waiting requests as it takes, the youngest first. None is ended: each asks again at its turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...model.healing import HealProof
from ..hooks import vllm_objects
from ..state import engine
from ..versions import scheduler as scheduling
from .engine_thread import run_between_steps


class EncoderCacheDeadlock(NamedTuple):
    """A request without room in the encoder cache, and those that hold it and wait.

    Args:
        blocked_request: the request.
        slots: that its next input needs.
        holders: waiting requests to release, as few as give it room.
    """

    blocked_request: Any
    slots: int
    holders: list[Any]


def find_deadlock() -> EncoderCacheDeadlock | None:
    """The knot at this moment."""
    scheduler = vllm_objects.find_latest("scheduler")
    if scheduler is None or engine.is_paused_or_asleep(scheduler):
        return None
    manager = scheduler.encoder_cache_manager
    if not can_list_holders(manager):
        return None
    queue = scheduling.list_undeferred_requests(scheduler)
    stuck = list(scheduler.running) or queue[:1]
    needs = [scheduling.find_unencoded_input(manager, request) for request in stuck]
    if any(one is None or one[1] <= manager.num_freeable_slots for one in needs):
        return None  # it gets on
    for blocked, need in zip(stuck, needs, strict=True):
        assert need
        holders: list[Any] = []
        for request in sorted(queue, key=lambda request: -request.arrival_time):
            if request is not blocked and scheduling.count_slots_by_entry(manager, request):
                holders.append(request)
            if manager.num_freeable_slots + count_releasable_slots(manager, holders) >= need[1]:
                return EncoderCacheDeadlock(blocked, need[1], holders)
    return None


def can_list_holders(manager: Any) -> bool:
    """Whether a manager tells who holds what: the one of Whisper's kind does not."""
    return hasattr(manager, "get_cached_input_ids") and hasattr(manager, "cached")


def count_releasable_slots(manager: Any, holders: list[Any]) -> int:
    """The slots that become free once some requests have let go of what they hold."""
    gone = {request.request_id for request in holders}
    held: dict[str, int] = {}
    for request in holders:
        held |= scheduling.count_slots_by_entry(manager, request)
    return sum(slots for name, slots in held.items() if manager.cached.get(name, gone) <= gone)


def find_deadlocked_holders() -> list[HealProof]:
    """The waiting requests of a knot; nothing where anything gets on."""
    found, scheduler = find_deadlock(), vllm_objects.find_latest("scheduler")
    if found is None or scheduler is None:
        return []
    manager = scheduler.encoder_cache_manager
    far = sorted((request.request_id, request.num_computed_tokens) for request in scheduler.running)
    return [
        HealProof(
            subject=request.request_id,
            evidence=(
                "it waits and holds "
                f"{sum(scheduling.count_slots_by_entry(manager, request).values()):,} slots of the "
                "encoder cache; "
                f"{found.blocked_request.request_id} needs {found.slots:,}, and "
                f"{manager.num_freeable_slots:,} are free"
            ),
            progress_key=f"{id(request)} {found.blocked_request.request_id} {far}",
            rises=engine.find_current_step(scheduler),
        )
        for request in found.holders
    ]


def release_holders(subjects: list[str]) -> dict[str, str]:
    """Release what the holders have, on the engine's own thread; returns why that failed."""

    def release_subjects() -> None:
        found, scheduler = find_deadlock(), vllm_objects.find_latest("scheduler")
        if found is None or scheduler is None:
            return
        for request in found.holders:
            if request.request_id in subjects:
                scheduling.release_encoder_slots(scheduler.encoder_cache_manager, request)

    left = run_between_steps(vllm_objects.find_latest("engine-core"), release_subjects)
    return dict.fromkeys(subjects, left) if left else {}
