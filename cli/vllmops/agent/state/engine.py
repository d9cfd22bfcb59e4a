"""Reads the engine's state from the agent's thread: plain attributes, no calls to connectors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ...model.agent_state import STORE_AWAY, EngineState, Traffic
from ..hooks import socket_handover, vllm_objects
from ..hooks.request_gate import gate
from ..identity import detect_role
from ..recording import step_recorder
from ..versions import engine

T = TypeVar("T")

MOST_OF_ID = 64  # characters; a heartbeat has room for little more


def observe_engine() -> EngineState:
    """The state of this process's engine; None for each attribute of an unknown shape."""
    scheduler = vllm_objects.find_latest("scheduler")
    if scheduler is None:
        return EngineState()
    executor, kv_cache = (
        vllm_objects.find_latest("executor"),
        getattr(scheduler, "kv_cache_manager", None),
    )
    running, waiting = count_requests(scheduler)
    return EngineState(
        running=running,
        waiting=waiting,
        unfinished_requests=read_or_none(lambda: len(scheduler.requests)),
        current_step=find_current_step(scheduler),
        pause_state=read_or_none(lambda: str(scheduler.pause_state.name).lower()),
        sleeping=read_or_none(lambda: executor and bool(executor.is_sleeping)),
        kv_cache_usage=read_or_none(lambda: engine.kv_cache_usage(scheduler)),
        kv_cache_blocks=read_or_none(lambda: kv_cache and int(kv_cache.block_pool.num_gpu_blocks)),
        prefix_caching=read_or_none(lambda: kv_cache and bool(kv_cache.enable_caching)),
        max_running=read_or_none(lambda: int(scheduler.max_num_running_reqs)),
    )


class ProgressTracker:
    """Whether an engine makes progress, checked with each heartbeat, so cheap.

    Steps are no proof: an idle scheduler takes them too. Nor is who arrives or gives up: under load
    there is always somebody. Progress means that tokens are computed.
    """

    def __init__(self) -> None:
        self.last_progress: object = None
        self.unchanged_since = 0.0
        self.pending = False
        # By id: a running request's computed tokens, and since when it has had them.
        self.requests: dict[str, tuple[int, float]] = {}

    def observe_scheduler(
        self, now: float
    ) -> tuple[int | None, int | None, int | None, float | None]:
        """``current_step``, requests running and waiting, and for how many seconds they stall.

        Args:
            now: monotonic, in seconds.
        """
        scheduler = vllm_objects.find_latest("scheduler")
        if scheduler is None:
            return None, None, None, None
        running, waiting = count_requests(scheduler)
        tokens = read_or_none(lambda: count_tokens_by_request(scheduler)) or {}
        before = self.requests
        self.requests = {
            name: known if (known := before.get(name)) and known[0] == count else (count, now)
            for name, count in tokens.items()
        }
        computed = step_recorder.count_computed_tokens(scheduler)
        seen = (tokens, running, waiting) if computed is None else computed
        # vLLM counts an idle streaming session as waiting, too.
        listening = read_or_none(lambda: int(scheduler.num_waiting_for_streaming_input)) or 0
        pending = (running or 0) + (waiting or 0) > listening
        waits = pending and not is_paused_or_asleep(scheduler)
        if seen != self.last_progress or not (waits and self.pending):
            self.last_progress, self.unchanged_since = seen, now
        self.pending = waits
        return find_current_step(scheduler), running, waiting, now - self.unchanged_since

    def measure_stall_s(self, request: Any, now: float) -> float | None:
        """For how many seconds a running request has made no progress; None if unknown."""
        tokens, since = self.requests.get(request.request_id, (None, now))
        if tokens is None:
            return None
        return now - since if tokens == request.num_computed_tokens else 0.0


progress = ProgressTracker()


class EventLoopMonitor:
    """Whether an API server's event loop runs, checked with each heartbeat."""

    def __init__(self) -> None:
        self.scheduled_at: float | None = None

    def measure_blocked_s(self, now: float) -> float | None:
        """For how many seconds it has run nothing; None if this process is no API server.

        Args:
            now: monotonic, in seconds.
        """
        asked = self.scheduled_at
        try:
            _, loop = require_front_end()
            if asked is None:
                self.scheduled_at = now  # before `note_iteration` can run
                loop.call_soon_threadsafe(self.note_iteration)
        except RuntimeError:  # there is none, or it is closed
            self.scheduled_at = None
            return None
        return 0.0 if asked is None else now - asked

    def note_iteration(self) -> None:
        self.scheduled_at = None


def is_paused_or_asleep(scheduler: Any) -> bool:
    """Whether no progress is expected, because the engine is paused or asleep."""
    paused = read_or_none(lambda: str(scheduler.pause_state.name)) not in {None, "UNPAUSED"}
    return paused or is_asleep()


def is_asleep() -> bool:
    """Whether this process's engine is asleep."""
    return bool(read_or_none(lambda: vllm_objects.find_latest("executor").is_sleeping))  # type: ignore[union-attr]


def count_tokens_by_request(scheduler: Any) -> dict[str, int]:
    """The computed tokens of each running request, by its id."""
    return {request.request_id: request.num_computed_tokens for request in list(scheduler.running)}


def count_handed_requests() -> int | None:
    """Requests that this API server has handed to its engines; None in other processes."""
    client = vllm_objects.find_latest("engine-client")
    if client is None:
        return None
    return read_or_none(lambda: engine.count_unfinished_requests(client))


def find_oldest_request_id() -> str:
    """The id of the oldest of them, of a long one the ends; empty without one."""
    client = vllm_objects.find_latest("engine-client")
    name = (
        "" if client is None else read_or_none(lambda: engine.find_oldest_request_id(client)) or ""
    )
    # A client may choose it, and vLLM adds to it on both sides what tells requests apart.
    return name if len(name) <= MOST_OF_ID else name[: MOST_OF_ID // 2] + name[-MOST_OF_ID // 2 :]


def measure_rendering_s(now: float) -> float | None:
    """The age in seconds of the oldest request before the engine; None outside API servers."""
    return gate.measure_rendering_s(now) if gate.installed and detect_role() == "api" else None


def explain_unreadiness() -> str:
    """Why new requests had better go to another server; empty if this process knows no reason."""
    scheduler = vllm_objects.find_latest("scheduler")
    if scheduler is not None and is_paused_or_asleep(scheduler):
        return "asleep" if is_asleep() else "paused"
    if gate.is_closed:
        return "draining"
    refuses = read_or_none(lambda: vllm_objects.find_latest("responses").store.refuses)  # type: ignore[union-attr]
    return STORE_AWAY if refuses else ""


def observe_traffic() -> Traffic:
    """The requests of this process, if it is an API server."""
    if not gate.installed or detect_role() != "api":
        return Traffic()
    return Traffic(
        in_flight=gate.in_flight,
        engine_requests=count_handed_requests(),
        started_requests=gate.started_requests,
        draining=gate.is_closed,
        serves=socket_handover.is_accepting_connections(),
    )


def is_busy() -> bool:
    """Whether this process knows of requests in flight."""
    return bool(observe_traffic().in_flight or observe_engine().unfinished_requests)


def require_front_end() -> tuple[Any, asyncio.AbstractEventLoop]:
    """The engine client of an API server, and its event loop.

    Raises:
        RuntimeError: this process has none.
    """
    client = vllm_objects.find_latest("engine-client")
    handler = getattr(client, "output_handler", None)
    if client is None or handler is None:
        raise RuntimeError("this process has no engine client")
    try:
        return client, handler.get_loop()
    except AttributeError as error:
        raise RuntimeError("its engine client has an unknown shape") from error


def count_requests(scheduler: Any) -> tuple[int | None, int | None]:
    """Requests running and waiting."""
    return read_or_none(lambda: engine.count_requests(scheduler)) or (None, None)


def find_current_step(scheduler: Any) -> int | None:
    """Calls of ``schedule()`` so far."""
    return read_or_none(lambda: int(scheduler.current_step))


def read_or_none(read: Callable[[], T]) -> T | None:
    """The result of `read`, None if this vLLM has an unknown shape."""
    try:
        return read()
    except Exception:
        return None
