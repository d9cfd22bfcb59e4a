"""Reads the engine's state from the agent's thread: plain attributes, no calls to connectors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ..protocol.engine import STORE_AWAY, EngineState, Traffic
from . import handover, objects, recorder
from .adapters import engine as adapter
from .gate import gate
from .identity import role

T = TypeVar("T")

MOST_OF_ID = 64  # characters; a heartbeat has room for little more


def state() -> EngineState:
    """The state of this process's engine; None for each attribute of an unknown shape."""
    scheduler = objects.latest("scheduler")
    if scheduler is None:
        return EngineState()
    executor, kv_cache = objects.latest("executor"), getattr(scheduler, "kv_cache_manager", None)
    running, waiting = counts(scheduler)
    return EngineState(
        running=running,
        waiting=waiting,
        unfinished=attempt(lambda: len(scheduler.requests)),
        current_step=step(scheduler),
        pause_state=attempt(lambda: str(scheduler.pause_state.name).lower()),
        sleeping=attempt(lambda: executor and bool(executor.is_sleeping)),
        kv_cache_usage=attempt(lambda: adapter.kv_cache_usage(scheduler)),
        kv_cache_blocks=attempt(lambda: kv_cache and int(kv_cache.block_pool.num_gpu_blocks)),
        prefix_caching=attempt(lambda: kv_cache and bool(kv_cache.enable_caching)),
        max_running=attempt(lambda: int(scheduler.max_num_running_reqs)),
    )


class Progress:
    """Whether an engine makes progress, checked with each heartbeat, so cheap.

    Steps are no proof: an idle scheduler takes them too. Nor is who arrives or gives up: under load
    there is always somebody. Progress means that tokens are computed.
    """

    def __init__(self) -> None:
        self.seen: object = None
        self.since = 0.0
        self.pending = False
        # By id: a running request's computed tokens, and since when it has had them.
        self.requests: dict[str, tuple[int, float]] = {}

    def look(self, now: float) -> tuple[int | None, int | None, int | None, float | None]:
        """``current_step``, requests running and waiting, and for how many seconds they stall.

        Args:
            now: monotonic, in seconds.
        """
        scheduler = objects.latest("scheduler")
        if scheduler is None:
            return None, None, None, None
        running, waiting = counts(scheduler)
        tokens = attempt(lambda: tokens_of(scheduler)) or {}
        before = self.requests
        self.requests = {
            name: known if (known := before.get(name)) and known[0] == count else (count, now)
            for name, count in tokens.items()
        }
        computed = recorder.computed(scheduler)
        seen = (tokens, running, waiting) if computed is None else computed
        # vLLM counts an idle streaming session as waiting, too.
        listening = attempt(lambda: int(scheduler.num_waiting_for_streaming_input)) or 0
        pending = (running or 0) + (waiting or 0) > listening
        waits = pending and not rests(scheduler)
        if seen != self.seen or not (waits and self.pending):
            self.seen, self.since = seen, now
        self.pending = waits
        return step(scheduler), running, waiting, now - self.since

    def still_s(self, request: Any, now: float) -> float | None:
        """For how many seconds a running request has made no progress; None if unknown."""
        tokens, since = self.requests.get(request.request_id, (None, now))
        if tokens is None:
            return None
        return now - since if tokens == request.num_computed_tokens else 0.0


progress = Progress()


class Turns:
    """Whether an API server's event loop runs, checked with each heartbeat."""

    def __init__(self) -> None:
        self.asked: float | None = None

    def look(self, now: float) -> float | None:
        """For how many seconds it has run nothing; None if this process is no API server.

        Args:
            now: monotonic, in seconds.
        """
        asked = self.asked
        try:
            _, loop = front_end()
            if asked is None:
                self.asked = now  # before `ran` can run
                loop.call_soon_threadsafe(self.ran)
        except RuntimeError:  # there is none, or it is closed
            self.asked = None
            return None
        return 0.0 if asked is None else now - asked

    def ran(self) -> None:
        self.asked = None


def rests(scheduler: Any) -> bool:
    """Whether no progress is expected, because the engine is paused or asleep."""
    paused = attempt(lambda: str(scheduler.pause_state.name)) not in {None, "UNPAUSED"}
    return paused or sleeps()


def sleeps() -> bool:
    """Whether this process's engine is asleep."""
    return bool(attempt(lambda: objects.latest("executor").is_sleeping))  # type: ignore[union-attr]


def tokens_of(scheduler: Any) -> dict[str, int]:
    """The computed tokens of each running request, by its id."""
    return {request.request_id: request.num_computed_tokens for request in list(scheduler.running)}


def handed() -> int | None:
    """Requests that this API server has handed to its engines; None in other processes."""
    client = objects.latest("engine-client")
    if client is None:
        return None
    return attempt(lambda: adapter.unfinished(client))


def oldest() -> str:
    """The id of the oldest of them, of a long one the ends; empty without one."""
    client = objects.latest("engine-client")
    name = "" if client is None else attempt(lambda: adapter.oldest(client)) or ""
    # A client may choose it, and vLLM adds to it on both sides what tells requests apart.
    return name if len(name) <= MOST_OF_ID else name[: MOST_OF_ID // 2] + name[-MOST_OF_ID // 2 :]


def rendering(now: float) -> float | None:
    """The age in seconds of the oldest request before the engine; None outside API servers."""
    return gate.longest(now) if gate.installed and role() == "api" else None


def unready() -> str:
    """Why new requests had better go to another server; empty if this process knows no reason."""
    scheduler = objects.latest("scheduler")
    if scheduler is not None and rests(scheduler):
        return "asleep" if sleeps() else "paused"
    if gate.closed:
        return "draining"
    refuses = attempt(lambda: objects.latest("responses").store.refuses)  # type: ignore[union-attr]
    return STORE_AWAY if refuses else ""


def traffic() -> Traffic:
    """The requests of this process, if it is an API server."""
    if not gate.installed or role() != "api":
        return Traffic()
    return Traffic(
        in_flight=gate.in_flight,
        handed=handed(),
        started=gate.started,
        draining=gate.closed,
        serves=handover.serves(),
    )


def busy() -> bool:
    """Whether this process knows of requests in flight."""
    return bool(traffic().in_flight or state().unfinished)


def front_end() -> tuple[Any, asyncio.AbstractEventLoop]:
    """The engine client of an API server, and its event loop.

    Raises:
        RuntimeError: this process has none.
    """
    client = objects.latest("engine-client")
    handler = getattr(client, "output_handler", None)
    if client is None or handler is None:
        raise RuntimeError("this process has no engine client")
    try:
        return client, handler.get_loop()
    except AttributeError as error:
        raise RuntimeError("its engine client has an unknown shape") from error


def counts(scheduler: Any) -> tuple[int | None, int | None]:
    """Requests running and waiting."""
    return attempt(lambda: adapter.counts(scheduler)) or (None, None)


def step(scheduler: Any) -> int | None:
    """Calls of ``schedule()`` so far."""
    return attempt(lambda: int(scheduler.current_step))


def attempt(read: Callable[[], T]) -> T | None:
    """The result of `read`, None if this vLLM has an unknown shape."""
    try:
        return read()
    except Exception:
        return None
