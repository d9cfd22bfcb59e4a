"""Multimodal caches with keys that have no data, or data that has no key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...caches import repair
from ...instances.servers import Server
from ...protocol.heal import Proof
from ...protocol.repairs import CacheRepair
from ...rpc.proofs import Case, awake
from ..action import Action


class Caches(Action):
    name = "caches"
    state = "a multimodal cache has keys without data, lost entries, or dead pins"
    does = "what vllmops cache repair does"
    risk = "none: only keys with a fault change"
    reference = "https://github.com/vllm-project/vllm/pull/43595"
    # A thread that takes new requests in may spin, while the engine goes on with those that it has.
    unseen = True

    def look(self, server: Server) -> list[Case]:
        processes = {process.pid: process for process in server.processes if awake(process)}
        server = replace(server, processes=tuple(processes.values()))
        return [
            Case(
                processes[repaired.pid],
                Proof(
                    subject=subject(cache),
                    what=", ".join(
                        f"{change.count:,.0f} {change.fault}" for change in cache.changes
                    ),
                ),
            )
            for repaired in repair.repair(server, dry_run=True).repairs
            for cache in repaired.caches
        ]

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:  # noqa: ARG002
        repairs = repair.repair(server).repairs
        return {subject(cache): cache.left for one in repairs for cache in one.caches if cache.left}


def subject(cache: CacheRepair) -> str:
    return f"{cache.side} {cache.name}"
