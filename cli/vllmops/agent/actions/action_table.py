"""What this process can look for and heal, by the name of the action."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ...model.healing import HealAnswer, HealProof, HealRequest
from .. import cost as account
from ..identity import make_process_fields
from ..log import log
from . import blocked_admission as admission
from . import dead_io_threads as io_threads
from . import encoder_cache_deadlock as encoder_cache
from . import in_flight_messages as transit
from . import lost_broadcast as broadcast
from . import paused_engine as paused
from . import stalled_transfers as transfers


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
    "admission": Action(admission.find_blocking_requests),
    "broadcast": Action(broadcast.find_stuck_readers, broadcast.wake_readers),
    "encoder-cache": Action(encoder_cache.find_deadlocked_holders, encoder_cache.release_holders),
    "io-threads": Action(io_threads.find_dead_threads, io_threads.restart_threads),
    "paused": Action(paused.find_paused_engine, paused.wake_engines),
    "pauser": Action(paused.find_pausing_request),
    "sleeping-weights": Action(paused.find_dropped_weights),
    "transfers": Action(
        transfers.find_lost_loads, transfers.fail_lost_loads, transfers.find_known_loads
    ),
    "transit": Action(transit.prove_queues_empty),
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
            account.repairs[request.action] += len(set(request.subjects) - left.keys())
    if request.note:
        log.warning("vllmops: heal: %s", " ".join(request.note.split()))
    return HealAnswer(
        pid=os.getpid(), **make_process_fields(), proofs=tuple(proofs), reason_by_subject=left
    )
