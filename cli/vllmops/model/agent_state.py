"""What an agent says about its process and its engine; shared by the agent and the CLI."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from .process_identity import ProcessIdentity
from .ranks import Placement, ServerMembership

# Raised when an answer changes so that an older reader would misread it.
SCHEMA = 3

BEAT_BYTES = 1024
BEAT_INTERVAL_S = 1.0

# What somebody may request for: JSON has no NaN and no infinity, but 1e308, which no timer takes.
LONGEST_S = 36_500 * 24 * 3600
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
# Of files and answers, which may be a stranger's: what can be shown and reckoned with.
LAST_AT = 4e9  # seconds since the epoch; later dates can't all be shown
Moment = Annotated[float, msgspec.Meta(ge=0, lt=LAST_AT)]
Count = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class AgentAnswer(Placement, frozen=True, kw_only=True):
    """What every answer of an agent begins with; its place where it is about the process."""

    schema: int = SCHEMA


class Hello(AgentAnswer, frozen=True, kw_only=True):
    """The process that answers.

    Args:
        agent: version of vllmops that runs in the process.
        pid: process id.
        start_ticks, boot: with the pid its `ProcessIdentity`.
        role: the process's own guess; the process tree knows better.
        standing: whose it is, its node and its ranks.
        vllm_version: None if unknown.
        python: version of Python.
        features: the requests that this agent understands.
        problems: what the agent can't do here, in words.
    """

    agent: str
    pid: int
    start_ticks: int = 0
    boot: str = ""
    role: str
    standing: ServerMembership = ServerMembership()
    vllm_version: str | None = None
    python: str = ""
    features: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks, self.boot)


# Why new requests that must be stored had better go to another server.
STORE_AWAY: Final = "its store is unavailable"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A process's last heartbeat, and the state of its engine then.

    Args:
        schema: as in `AgentAnswer`.
        monotonic: CLOCK_MONOTONIC in seconds; every process of a machine shares that clock.
        sequence: beats so far.
        pid: process id.
        start_ticks, boot: with the pid its `ProcessIdentity`.
        role, standing: as in `Hello`.
        current_step: calls of ``schedule()`` so far; None if the process has no scheduler.
        running: requests running.
        waiting: requests waiting.
        still_s: seconds for which requests have been there and none got a token further; 0 if
            none is there and while it is paused or sleeps, None if the process has no scheduler.
        engine_requests: requests that an API server has handed to its engines and that are not
            over; None where the process is none.
        oldest_request_id: the id of the oldest of them, of a long one the ends; empty without one.
        rendering_s: seconds for which the oldest of the HTTP requests that have not come to the
            engine is there, 0 without one; None if the process takes none.
        loop_s: seconds for which an API server's event loop has run nothing; None if the process
            is none, or is not up yet.
        interrupt: the signal that ends a parser on an API server's event loop; 0 for none.
        unready: why new requests had better go to another server: it drains, is paused or asleep,
            or its store is unavailable; empty without a reason.
    """

    schema: int = SCHEMA
    monotonic: float
    sequence: int
    pid: int
    start_ticks: int = 0
    boot: str = ""
    role: str
    standing: ServerMembership = ServerMembership()
    current_step: int | None = None
    running: int | None = None
    waiting: int | None = None
    still_s: float | None = None
    engine_requests: int | None = msgspec.field(default=None, name="handed")
    oldest_request_id: str = msgspec.field(default="", name="oldest")
    rendering_s: float | None = None
    loop_s: float | None = None
    interrupt: int = 0
    unready: str = ""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks, self.boot)


class EngineState(AgentAnswer, frozen=True, kw_only=True):
    """How an engine is doing; every field is None if the process has no scheduler.

    Args:
        running: requests running.
        waiting: requests waiting.
        unfinished_requests: requests the scheduler knows that are not finished.
        current_step: calls of ``schedule()`` so far.
        pause_state: ``unpaused``, ``paused_new`` or ``paused_all``.
        sleeping: whether the executor sleeps.
        kv_cache_usage: share of the KV cache's blocks in use, 0 to 1.
        kv_cache_blocks: blocks in the KV cache.
        prefix_caching: whether prefixes are cached.
        max_running: most requests that run at once.
    """

    running: int | None = None
    waiting: int | None = None
    unfinished_requests: int | None = msgspec.field(default=None, name="unfinished")
    current_step: int | None = None
    pause_state: str | None = None
    sleeping: bool | None = None
    kv_cache_usage: float | None = None
    kv_cache_blocks: int | None = None
    prefix_caching: bool | None = None
    max_running: int | None = None


class Traffic(AgentAnswer, frozen=True, kw_only=True):
    """An API server's requests; health checks and scrapes not counted.

    Args:
        in_flight: over HTTP, being answered now; None if this process can't count them.
        engine_requests: of those and of background responses, what the engines have and have not
            finished, also if it still waits in front of an engine; None if this process can't count
            them.
        started_requests: since the process started.
        draining: whether new requests are refused.
        serves: whether this process takes connections.
    """

    in_flight: int | None = None
    engine_requests: int | None = msgspec.field(default=None, name="handed")
    started_requests: int | None = msgspec.field(default=None, name="started")
    draining: bool = False
    serves: bool = False
