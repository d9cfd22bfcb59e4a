"""Multimodal caches with keys that have no data, or data that has no key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..collect.agents.proven_states import HealCase, is_running_python
from ..model.cache_repairs import CacheRepair
from ..model.healing import HealProof
from ..servers.discovery import Server
from . import cache_repair
from .action import Action


class FaultyCaches(Action):
    name = "caches"
    state = "a multimodal cache has keys without data, lost entries, or dead pins"
    does = "what vllmops cache repair does"
    risk = "none: only keys with a fault change"
    reference = "https://github.com/vllm-project/vllm/pull/43595"
    # A thread that takes new requests in may spin, while the engine goes on with those that it has.
    unseen = True

    def find_cases(self, server: Server) -> list[HealCase]:
        processes = {
            process.pid: process for process in server.processes if is_running_python(process)
        }
        server = replace(server, processes=tuple(processes.values()))
        return [
            HealCase(
                processes[repaired.pid],
                HealProof(
                    subject=format_subject(cache),
                    evidence=", ".join(
                        f"{change.count:,.0f} {change.defect}" for change in cache.changes
                    ),
                ),
            )
            for repaired in cache_repair.repair_caches(server, dry_run=True).repairs
            for cache in repaired.caches
        ]

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:  # noqa: ARG002
        repairs = cache_repair.repair_caches(server).repairs
        return {
            format_subject(cache): cache.reason
            for one in repairs
            for cache in one.caches
            if cache.reason
        }


def format_subject(cache: CacheRepair) -> str:
    return f"{cache.side} {cache.name}"
