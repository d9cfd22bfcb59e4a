"""An engine that is paused or asleep, and that nobody wakes (AReaL #1160)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...protocol.heal import Proof
from .. import engine, objects
from ..adapters.engine import dropped_weights
from ..gate import gate

TIMEOUT_S = 60.0  # weights come back from the host's memory


def look() -> list[Proof]:
    """One proof where this process's engine rests."""
    scheduler = objects.latest("scheduler")
    if scheduler is None or not engine.rests(scheduler):
        return []
    state = engine.state()
    sleeps = "asleep" if state.sleeping else state.pause_state or "paused"
    waiting = (state.running or 0) + (state.waiting or 0)
    return [
        Proof(
            subject="engine",
            what=f"it is {sleeps}; requests that wait: {waiting:,}",
            same=sleeps,
        )
    ]


def pauser() -> list[Proof]:
    """In an API server: the last HTTP request that stopped the engine."""
    arrival = gate.pause
    if arrival is None or arrival.scope is None:
        return []
    client = (arrival.scope.get("client") or ("an unknown client",))[0]
    ago = time.monotonic() - arrival.at
    return [Proof(subject="engine", what=f"{arrival.route} from {client}, {ago:.0f} s ago")]


def weights() -> list[Proof]:
    """One proof where a worker of this process sleeps without its weights."""
    if not any(map(dropped_weights, objects.every("worker"))):
        return []
    return [Proof(subject="engine", what="its weights are gone: vLLM's sleep level 2 drops them")]


def act(subjects: list[str]) -> dict[str, str]:
    """Wake all engines of this front end and have them go on; returns why that failed."""
    try:
        client, loop = engine.front_end()
        asyncio.run_coroutine_threadsafe(woken(client), loop).result(TIMEOUT_S)
    except (RuntimeError, TimeoutError) as error:
        return dict.fromkeys(subjects, str(error) or f"it did not wake within {TIMEOUT_S:g} s")
    return {}


async def woken(client: Any) -> None:
    if await client.is_sleeping():
        await client.wake_up()
    if await client.is_paused():
        await client.resume_generation()
