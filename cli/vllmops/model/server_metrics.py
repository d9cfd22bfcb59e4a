"""A server as metrics show it: what is cheap to ask of its agents again and again."""

from __future__ import annotations

from typing import Literal

import msgspec

from .caches import ProcessCaches
from .keys import ProcessKeys
from .patches import ProcessPatches
from .requests import ProcessRequests
from .server_snapshot import Gpu, ProcessHeartbeat, ProcessState

Certainty = Literal["", "likely", "sure"]


class KnownBadVersion(msgspec.Struct, frozen=True):
    """An installed version that is known to hang."""

    package: str
    version: str


class StoreUsage(msgspec.Struct, frozen=True, kw_only=True):
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


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A server at about one moment.

    Args:
        processes: as the kernel sees them.
        heartbeats: the heartbeats of those that have one.
        caches, requests, patches, keys: of the agents that answered.
        stall: whether the server makes no progress; empty if it does.
        store: of the API server that looks; None without one, or if it does not answer.
        known_bad: what the processes run with.
        gpus: of the machine that looks, by the name of its node.
    """

    processes: tuple[ProcessState, ...] = ()
    heartbeats: tuple[ProcessHeartbeat, ...] = msgspec.field(default=(), name="pulses")
    caches: tuple[ProcessCaches, ...] = ()
    requests: tuple[ProcessRequests, ...] = ()
    patches: tuple[ProcessPatches, ...] = ()
    keys: tuple[ProcessKeys, ...] = ()
    stall: Certainty = ""
    store: StoreUsage | None = None
    known_bad: tuple[KnownBadVersion, ...] = ()
    gpus: dict[str, tuple[Gpu, ...]] = {}
