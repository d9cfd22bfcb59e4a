"""An engine that is paused or asleep, and that nobody wakes (AReaL #1160)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...model.healing import HealProof
from ..hooks import vllm_objects
from ..hooks.request_gate import gate
from ..state import engine
from ..versions.engine import has_dropped_weights

TIMEOUT_S = 60.0  # weights come back from the host's memory


def find_paused_engine() -> list[HealProof]:
    """One proof where this process's engine rests."""
    scheduler = vllm_objects.find_latest("scheduler")
    if scheduler is None or not engine.is_paused_or_asleep(scheduler):
        return []
    state = engine.observe_engine()
    sleeps = "asleep" if state.sleeping else state.pause_state or "paused"
    waiting = (state.running or 0) + (state.waiting or 0)
    return [
        HealProof(
            subject="engine",
            evidence=f"it is {sleeps}; requests that wait: {waiting:,}",
            progress_key=sleeps,
        )
    ]


def find_pausing_request() -> list[HealProof]:
    """In an API server: the last HTTP request that stopped the engine."""
    arrival = gate.pause
    if arrival is None or arrival.scope is None:
        return []
    client = (arrival.scope.get("client") or ("an unknown client",))[0]
    ago = time.monotonic() - arrival.arrived_at
    return [HealProof(subject="engine", evidence=f"{arrival.route} from {client}, {ago:.0f} s ago")]


def find_dropped_weights() -> list[HealProof]:
    """One proof where a worker of this process sleeps without its weights."""
    if not any(map(has_dropped_weights, vllm_objects.list_objects("worker"))):
        return []
    return [
        HealProof(
            subject="engine", evidence="its weights are gone: vLLM's sleep level 2 drops them"
        )
    ]


def wake_engines(subjects: list[str]) -> dict[str, str]:
    """Wake all engines of this front end and have them go on; returns why that failed."""
    try:
        client, loop = engine.require_front_end()
        asyncio.run_coroutine_threadsafe(wake_and_resume(client), loop).result(TIMEOUT_S)
    except (RuntimeError, TimeoutError) as error:
        return dict.fromkeys(subjects, str(error) or f"it did not wake within {TIMEOUT_S:g} s")
    return {}


async def wake_and_resume(client: Any) -> None:
    if await client.is_sleeping():
        await client.wake_up()
    if await client.is_paused():
        await client.resume_generation()
