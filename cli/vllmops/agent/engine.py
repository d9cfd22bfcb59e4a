"""Reads the engine's state from the agent's thread: plain attributes, no call into a connector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ..snapshots.engine import EngineState, Traffic
from . import found
from .gate import gate
from .identity import role

T = TypeVar("T")


def state() -> EngineState:
    """How this process's engine is doing; an attribute of another shape reads None."""
    scheduler = found.latest("scheduler")
    if scheduler is None:
        return EngineState()
    executor, kv_cache = found.latest("executor"), getattr(scheduler, "kv_cache_manager", None)
    running, waiting = counts(scheduler)
    return EngineState(
        running=running,
        waiting=waiting,
        unfinished=attempt(lambda: len(scheduler.requests)),
        current_step=step(scheduler),
        pause_state=attempt(lambda: str(scheduler.pause_state.name).lower()),
        sleeping=attempt(lambda: executor and bool(executor.is_sleeping)),
        kv_cache_usage=attempt(lambda: kv_cache and float(kv_cache.usage)),
        kv_cache_blocks=attempt(lambda: kv_cache and int(kv_cache.block_pool.num_gpu_blocks)),
        prefix_caching=attempt(lambda: kv_cache and bool(kv_cache.enable_caching)),
        max_running=attempt(lambda: int(scheduler.max_num_running_reqs)),
    )


def progress() -> tuple[int | None, int | None, int | None]:
    """``current_step``, requests running and waiting; for the heartbeat, so cheap."""
    scheduler = found.latest("scheduler")
    return (None, None, None) if scheduler is None else (step(scheduler), *counts(scheduler))


def traffic() -> Traffic:
    """This process's HTTP requests."""
    if not gate.installed or role() != "api":
        return Traffic()
    return Traffic(in_flight=gate.in_flight, started=gate.started, draining=gate.draining)


def busy() -> bool:
    """Whether something is in flight, as far as this process knows."""
    return bool(traffic().in_flight or state().unfinished)


def front_end() -> tuple[Any, asyncio.AbstractEventLoop]:
    """The engine client of an API server, and the loop that it runs on.

    Raises:
        RuntimeError: this process has none.
    """
    client = found.latest("engine-client")
    handler = getattr(client, "output_handler", None)
    if client is None or handler is None:
        raise RuntimeError("this process has no engine client")
    return client, handler.get_loop()


def counts(scheduler: Any) -> tuple[int | None, int | None]:
    """Requests running and waiting."""
    pair: tuple[int, int] | None = attempt(lambda: scheduler.get_request_counts())  # noqa: PLW0108
    if pair is not None:
        return pair
    # Older schedulers have no such method.
    return attempt(lambda: len(scheduler.running)), attempt(lambda: len(scheduler.waiting))


def step(scheduler: Any) -> int | None:
    """Calls of ``schedule()`` so far."""
    return attempt(lambda: int(scheduler.current_step))


def attempt(read: Callable[[], T]) -> T | None:
    """What `read` gives, None where this vLLM has another shape."""
    try:
        return read()
    except Exception:
        return None
