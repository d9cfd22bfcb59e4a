"""The server's state in vLLM's ``/metrics``, gathered beside the event loop while somebody scrapes.

A scrape shows what was gathered last and waits for nothing. Nobody scrapes, nothing is gathered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...metrics.collector import BackgroundCollector
from ...model.roles import Role
from ...model.server_metrics import MetricsSnapshot, StoreUsage
from ...model.server_snapshot import ServerSample
from ...support.errors import VllmopsError
from ..hooks import vllm_objects
from ..hooks.import_hook import when_imported
from ..log import log
from ..versions import metrics, module_locations

if TYPE_CHECKING:
    from ...metrics.snapshot_collector import MetricsCollector
    from ...model.admin_api import ServerProcess

TIMEOUT_S = 2.0


class ForwardedAgent:
    """The agent of a process, on this node or on another.

    Args:
        process: of this server.
    """

    def __init__(self, process: ServerProcess) -> None:
        self.pid_and_address = f"{process.pid}{process.node_address and '@'}{process.node_address}"

    def fetch_answer(self, method: str, path: str, kind: type[Any]) -> Any:
        """What it answers; raises VllmopsError."""
        from ...collect.agents import agent_client  # noqa: PLC0415
        from . import server_members  # noqa: PLC0415

        try:
            status, content = server_members.forward_to_agent(
                method, self.pid_and_address + path, None, TIMEOUT_S
            )
        except server_members.NO_ANSWER as error:
            raise VllmopsError("agent.broken", str(error)) from error
        if status != server_members.OK:
            raise VllmopsError("agent.broken", f"it answered {status} to {path}")
        return agent_client.decode_answer(f"the agent of pid {self.pid_and_address}", content, kind)


def install_collector(read_store_usage: Callable[[], StoreUsage | None]) -> None:
    """Show the server's state in the ``/metrics`` of an API server.

    Args:
        read_store_usage: as of `extensions.Extension`.
    """
    if module_locations.find_symbol_module("metrics") is None:
        lacks = module_locations.PLACES["metrics"].name
        vllm_objects.report_unsupported(
            f"the server's state is not in /metrics: there is no {lacks}"
        )
        return
    collector = BackgroundCollector(
        make_server_observer(read_store_usage), log.warning, locate_shared_file=find_shared_file
    )
    for module, show in metrics.SHOWN.items():
        when_imported(module, vllm_objects.catch_errors(partial(show, collector)))
    when_imported(metrics.FORMAT, vllm_objects.catch_errors(metrics.cache_escaped_names))


def find_shared_file() -> Path | None:
    """The file by which the API servers of this server share what one of them has gathered."""
    # vLLM makes this directory for several API servers; the launcher is their parent.
    place = os.environ.get(metrics.MULTIPROC_DIR)
    return Path(place) / f"vllmops-{os.getppid()}" if place else None


def make_server_observer(
    read_store_usage: Callable[[], StoreUsage | None],
) -> Callable[[], tuple[MetricsSnapshot, int]]:
    """Looks at the server of this process, again and again.

    Args:
        read_store_usage: as of `extensions.Extension`.
    """
    viewer: list[MetricsCollector] = []

    def observe_server() -> tuple[MetricsSnapshot, int]:
        from ...collect.machine import gpu  # noqa: PLC0415
        from ...metrics.metric_values import has_differing_sides  # noqa: PLC0415
        from ...metrics.snapshot_collector import MetricsCollector  # noqa: PLC0415 - slow, and nobody may ever scrape
        from . import server_members  # noqa: PLC0415

        if not viewer:
            viewer.append(MetricsCollector(ForwardedAgent, has_differing_sides))
        found = server_members.observe_server_processes()
        seen = ServerSample(
            at_s=time.monotonic(),
            heartbeats=found.heartbeats,
            processes=found.processes,
            compilers=found.compilers,
        )
        count = sum(process.role == Role.API for process in found.processes)
        gpus = {found.node: gpu.observe_gpus()}
        return replace(viewer[0].collect_snapshot(seen), store=read_store_usage(), gpus=gpus), count

    return observe_server
