"""Requests that wait for KV blocks whose transfer is over, or whose sender is gone.

Where no part of the connector knows a load any more, nobody will ever report its end. Then the
scheduler is told what a worker would tell it of a load that failed, and vLLM does what its
``kv_load_failure_policy`` says (LMCache #4759, vLLM #49829, #50719, #50754).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeAlias

from ...model.healing import HealProof
from ...support.background import call_in_thread
from ..hooks import vllm_objects
from ..state import engine
from ..versions import kv_transfers
from . import heap_search
from .engine_thread import run_before_call

# A load takes less; one that native code alone knows has so long at least.
LEAST_S = 10.0
MOST = 50  # in one look
CONNECT_S, LOOKED_UP_S = 0.3, 1.0

Address: TypeAlias = tuple[str, int]
_asked: dict[Address, Future[bool]] = {}  # whose answer has not come


def find_lost_loads() -> list[HealProof]:
    """The requests of a scheduler whose sender is gone, or of which its connector knows nothing."""
    scheduler, now = vllm_objects.find_latest("scheduler"), time.time()
    if scheduler is None or engine.is_paused_or_asleep(scheduler):
        return []
    waiting = [
        one
        for one in kv_transfers.list_loading_requests(scheduler)
        if now - one.arrival_time >= LEAST_S
    ]
    if not (waiting := waiting[:MOST]):
        return []
    names, kept = [request.request_id for request in waiting], set[str]()
    if not kv_transfers.is_keyed_by_request(scheduler.connector):
        kept = find_tracked_requests(scheduler.connector, names)
    peers = [kv_transfers.find_sender_address(scheduler, request) for request in waiting]
    gone = find_refusing_addresses({peer for peer in peers if peer})
    return [
        proof
        for request, peer in zip(waiting, peers, strict=True)
        if (proof := prove_lost_load(scheduler, request, now, kept, peer if peer in gone else None))
    ]


def prove_lost_load(
    scheduler: Any, request: Any, now: float, known_ids: set[str], dead_address: Address | None
) -> HealProof | None:
    """What speaks for it that a request waits in vain; None if nothing does.

    Args:
        scheduler: of the request.
        request: that waits for the end of its load.
        now: seconds since the epoch.
        known_ids: ids that the scheduler's part of the connector knows.
        dead_address: the address of the server from which the blocks come, if nobody listens there.
    """
    name = request.request_id
    if name in known_ids and not dead_address:
        return None
    what = f"it waits for KV blocks, {now - request.arrival_time:.0f} s after it came"
    why = ""
    if dead_address:
        where = "{}:{}".format(*dead_address)
        what += f"; {where}, which has them, refuses connections"
        why = f"the server that has its KV blocks, {where}, is gone: send it again"
    else:
        policy = kv_transfers.find_failure_policy(scheduler)
        what += f"; the connector knows no such load; kv_load_failure_policy: {policy}"
    steps = engine.find_current_step(scheduler)
    preemptions, computed_tokens = request.num_preemptions, request.num_computed_tokens
    return HealProof(
        subject=name,
        evidence=what,
        client_message=why,
        progress_key=f"{id(request)} {preemptions} {computed_tokens} {bool(dead_address)}",
        rises=None if steps is None else steps // kv_transfers.get_max_concurrent_steps(scheduler),
    )


def find_refusing_addresses(addresses: Collection[Address]) -> set[Address]:
    """At which addresses nobody listens; a machine that does not answer is no proof.

    All are asked at once: to look a name up may take much longer than to connect.
    """
    asked = {
        address: _asked.get(address) or call_in_thread(partial(is_refusing_connections, address))
        for address in addresses
    }
    done, late = wait(asked.values(), LOOKED_UP_S)
    _asked.clear()
    _asked.update((address, answer) for address, answer in asked.items() if answer in late)
    return {address for address, answer in asked.items() if answer in done and answer.result()}


def is_refusing_connections(address: Address) -> bool:
    try:
        socket.create_connection(address, CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # ValueError: a name that can't be one
        return False
    return False


def find_known_loads(names: Sequence[str]) -> list[HealProof]:
    """One proof where this process has the workers' part of a connector: the loads it knows."""
    connector = kv_transfers.find_worker_connector()
    if connector is None:
        return []
    kept = sorted(find_tracked_requests(connector, names))
    return [HealProof(subject="connector", evidence=type(connector).__name__, requests=tuple(kept))]


def find_tracked_requests(connector: Any, names: Sequence[str]) -> set[str]:
    """The requests whose load a connector may know: all, where not all of it can be seen."""
    own = heap_search.find_mentioned_names(
        [connector], names, allow_native=kv_transfers.is_keyed_by_request(connector)
    )
    others = heap_search.find_mentioned_names(
        heap_search.list_thread_values(), names, allow_native=True
    )
    return set(names) if own is None or others is None else own | others


def fail_lost_loads(subjects: list[str]) -> dict[str, str]:
    """Have the next step's output say that these loads failed; returns why that was not done."""
    scheduler = vllm_objects.find_latest("scheduler")
    names = {proof.subject for proof in find_lost_loads() if not proof.client_message} & set(
        subjects
    )
    if scheduler is None or not names:
        return {}

    def report_failed_loads(plan: Any, output: Any) -> tuple[Any, Any]:
        return plan, kv_transfers.add_failed_loads(scheduler, output, names)

    left = run_before_call(scheduler, "update_from_output", report_failed_loads)
    return dict.fromkeys(names, left) if left else {}
