"""What this process can look for and heal, by the name of the action."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ...model.healing import HealAnswer, HealProof, HealRequest
from .. import cost
from ..identity import make_process_fields
from ..log import log
from . import (
    blocked_admission,
    dead_io_threads,
    encoder_cache_deadlock,
    in_flight_messages,
    lost_broadcast,
    paused_engine,
    stalled_transfers,
)


class Action(NamedTuple):
    """What a module of this package does.

    Args:
        find_proofs: what a look shows; changes nothing.
        heal: heals subjects that a look of its own still shows; returns why one was not healed, by
            subject. None where the command line heals it in another way.
        find_request_proofs: what a look shows of some requests, in a process that may know them.
    """

    find_proofs: Callable[[], list[HealProof]]
    heal: Callable[[list[str]], dict[str, str]] | None = None
    find_request_proofs: Callable[[Sequence[str]], list[HealProof]] | None = None


ACTIONS: Final = {
    "admission": Action(blocked_admission.find_blocking_requests),
    "broadcast": Action(lost_broadcast.find_stuck_readers, lost_broadcast.wake_readers),
    "encoder-cache": Action(
        encoder_cache_deadlock.find_deadlocked_holders, encoder_cache_deadlock.release_holders
    ),
    "io-threads": Action(dead_io_threads.find_dead_threads, dead_io_threads.restart_threads),
    "paused": Action(paused_engine.find_paused_engine, paused_engine.wake_engines),
    "pauser": Action(paused_engine.find_pausing_request),
    "sleeping-weights": Action(paused_engine.find_dropped_weights),
    "transfers": Action(
        stalled_transfers.find_lost_loads,
        stalled_transfers.fail_lost_loads,
        stalled_transfers.find_known_loads,
    ),
    "transit": Action(in_flight_messages.prove_queues_empty),
}


# Two may heal at once. Each act looks once more, and so finds what the one before it has left.
_acting = threading.Lock()


def answer_heal(request: HealRequest) -> HealAnswer:
    """``POST /heal``: look, or act."""
    proofs: list[HealProof] = []
    left: dict[str, str] = {}
    if action := ACTIONS.get(request.action):
        if request.request_ids:
            proofs = (
                action.find_request_proofs(request.request_ids)
                if action.find_request_proofs
                else []
            )
        elif request.subjects is None:
            proofs = action.find_proofs()
        elif action.heal:
            with _acting:
                left = action.heal(request.subjects)
            cost.repairs[request.action] += len(set(request.subjects) - left.keys())
    if request.note:
        log.warning("vllmops: heal: %s", " ".join(request.note.split()))
    return HealAnswer(
        pid=os.getpid(), **make_process_fields(), proofs=tuple(proofs), reason_by_subject=left
    )
