"""What this process can look for and heal, by the name of the action."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ...protocol.heal import Healing, HealRequest, Proof
from .. import account
from ..identity import here
from ..log import log
from . import admission, broadcast, encoder_cache, io_threads, paused, transfers, transit


class Action(NamedTuple):
    """What a module of this package does.

    Args:
        look: what a look shows; changes nothing.
        act: heals subjects that a look of its own still shows; returns why one was not healed, by
            subject. None where the command line heals it in another way.
        known: what a look shows of some requests, in a process that may know them.
    """

    look: Callable[[], list[Proof]]
    act: Callable[[list[str]], dict[str, str]] | None = None
    known: Callable[[Sequence[str]], list[Proof]] | None = None


ACTIONS: Final = {
    "admission": Action(admission.look),
    "broadcast": Action(broadcast.look, broadcast.act),
    "encoder-cache": Action(encoder_cache.look, encoder_cache.act),
    "io-threads": Action(io_threads.look, io_threads.act),
    "paused": Action(paused.look, paused.act),
    "pauser": Action(paused.pauser),
    "sleeping-weights": Action(paused.weights),
    "transfers": Action(transfers.look, transfers.act, transfers.known),
    "transit": Action(transit.look),
}


# Two may heal at once. Each act looks once more, and so finds what the one before it has left.
_acting = threading.Lock()


def heal(request: HealRequest) -> Healing:
    """``POST /heal``: look, or act."""
    proofs: list[Proof] = []
    left: dict[str, str] = {}
    if action := ACTIONS.get(request.action):
        if request.among:
            proofs = action.known(request.among) if action.known else []
        elif request.subjects is None:
            proofs = action.look()
        elif action.act:
            with _acting:
                left = action.act(request.subjects)
            account.repairs[request.action] += len(set(request.subjects) - left.keys())
    if request.note:
        log.warning("vllmops: heal: %s", " ".join(request.note.split()))
    return Healing(pid=os.getpid(), **here(), proofs=tuple(proofs), left=left)
