"""What is stuck and can't be healed, and what a restart would lose."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ..collect.machine import proc
from ..model.environment import STORE
from ..model.findings import Finding
from ..model.server_snapshot import ServerSample
from ..observe import server_snapshot
from ..observe.requests import listing
from ..rules import diagnosis as doctor
from ..rules import progress
from ..servers.discovery import Server
from ..support.errors import VllmopsError

APART_S = 0.3


class RemainingStall(msgspec.Struct, frozen=True, kw_only=True):
    """What stays stuck.

    Args:
        finding: that explains it best.
        in_flight: requests that a restart would lose; None if nobody could say.
        background: those of them that are background responses.
        restart: what ``vllmops restart`` brings back.
    """

    finding: Finding
    in_flight: int | None
    background: int
    restart: str


def find_remaining_stall(
    server: Server, show: Callable[[str], None] = lambda _: None, settle_s: float = 0.0
) -> RemainingStall | None:
    """What is stuck now; None if everything gets on.

    Args:
        server: to look at; heartbeats alone, unless they show a stall.
        show: called with what is waited for.
        settle_s: how long a stall may still show: a step, or a heartbeat on a busy machine, takes
            its time.
    """
    until = time.monotonic() + settle_s
    while stalls := progress.find_stalls(collect_samples(server)):
        if time.monotonic() >= until:
            break
    else:
        return None
    diagnosis = doctor.diagnose_snapshot(server_snapshot.examine_server(server, show=show))
    in_flight, background = count_in_flight_and_background(server)
    return RemainingStall(
        finding=doctor.find_cause(stalls, diagnosis),
        in_flight=in_flight,
        background=background,
        restart=describe_restart(server),
    )


def collect_samples(server: Server) -> list[ServerSample]:
    """Looks that show a stall, if there is one."""
    began, looks = time.monotonic(), []
    for pause_s in (0.0, APART_S):
        time.sleep(pause_s)
        looks.append(server_snapshot.observe_server(server, began, web=False))
    return looks


def count_in_flight_and_background(server: Server) -> tuple[int | None, int]:
    """The requests in flight, and how many of them are background responses."""
    try:
        processes, _ = listing.collect_process_requests(server)
    except VllmopsError:
        return None, 0
    fronts = {request for process in processes for request in process.front or ()}
    engines = {request.id for process in processes for request in process.engine or ()}
    known = {request.id for request in fronts if request.id}
    return len(fronts) + len(engines - known), sum(request.background for request in fronts)


def describe_restart(server: Server) -> str:
    """What a restart brings back, in words."""
    if server.name is None:
        return "vllmops did not start this server: restart it as you started it"
    store = proc.read_environment(server.pid).get(STORE, "") if server.pid else ""
    kept = "lost"
    if store and not store.startswith("memory:"):
        kept = "kept, and with --rerun background responses run again"
    return f"vllmops restart {server.name} runs the same command; stored responses are {kept}"
