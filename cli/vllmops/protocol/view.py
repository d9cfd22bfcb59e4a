"""A server as metrics show it: what is cheap to ask of its agents again and again."""

from __future__ import annotations

from typing import Literal

import msgspec

from .caches import ProcessCaches
from .keys import ProcessKeys
from .patches import ProcessPatches
from .requests import ProcessRequests
from .server import Gpu, ProcessState, Pulse

Certainty = Literal["", "likely", "sure"]


class KnownBad(msgspec.Struct, frozen=True):
    """An installed version that is known to hang."""

    package: str
    version: str


class StoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the store of an API server.

    Args:
        backend: its kind, such as ``sqlite``.
        statuses: responses by status.
        bytes: of responses, as they are kept.
        evictions: responses that had to make room, ever.
        capacity: responses that it keeps before it evicts.
    """

    backend: str
    statuses: dict[str, int]
    bytes: int
    evictions: int
    capacity: int


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A server at about one moment.

    Args:
        processes: as the kernel sees them.
        pulses: the heartbeats of those that have one.
        caches, requests, patches, keys: of the agents that answered.
        stall: whether the server makes no progress; empty if it does.
        store: of the API server that looks; None without one, or if it does not answer.
        known_bad: what the processes run with.
        gpus: of the machine that looks, by the name of its node.
    """

    processes: tuple[ProcessState, ...] = ()
    pulses: tuple[Pulse, ...] = ()
    caches: tuple[ProcessCaches, ...] = ()
    requests: tuple[ProcessRequests, ...] = ()
    patches: tuple[ProcessPatches, ...] = ()
    keys: tuple[ProcessKeys, ...] = ()
    stall: Certainty = ""
    store: StoreUse | None = None
    known_bad: tuple[KnownBad, ...] = ()
    gpus: dict[str, tuple[Gpu, ...]] = {}
