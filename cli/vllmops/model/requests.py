"""The requests that a process of a server knows."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .agent_state import AgentAnswer


class RequestState(StrEnum):
    """How far a request is."""

    RENDERING = "rendering"  # in an API server; the engine does not have it yet
    SENT = "sent"  # an API server has handed it over, no engine shows it
    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting for grammar"
    WAITING_FOR_KV = "waiting for KV"
    WAITING_FOR_INPUT = "waiting for input"  # of a streaming session
    DEFERRED = "deferred"  # the scheduler has passed it over
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished, not freed"


class WaitCause(StrEnum):
    """What a scheduler's queue waits for."""

    PAUSED = "paused"
    MAX_NUM_SEQS = "max-num-seqs"
    KV_CACHE = "kv-cache"


class FrontRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as an API server knows it.

    Args:
        id: vLLM's own; empty before the engine has it.
        http_id: the one that the client sees, empty if unknown.
        age_s: seconds since it arrived.
        prompt_tokens: None before the engine has it.
        output_tokens: sent to the client so far.
        route: of its HTTP request, None if unknown.
        owner: a hash of the API key that it came with; empty without one, None if unknown.
        lora: the adapter's name.
        background: whether its HTTP request is over: a background response.
    """

    id: str = ""
    http_id: str = ""
    age_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    route: str | None = None
    owner: str | None = None
    lora: str | None = None
    background: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a scheduler knows it.

    Args:
        id: vLLM's own.
        state: one of `RequestState`.
        reason: why it waits; empty if it does not, or if nothing is known.
        cause: the same as one of `WaitCause`, or empty.
        age_s: seconds since it arrived at the API server, by the clock of that machine.
        still_s: seconds since it last got a token or had one computed; None if unknown.
        prompt_tokens, output_tokens: so far.
        kv_blocks: blocks of the KV cache that it holds; None if unknown.
        cache_pins: entries of the encoder cache that it holds.
        preemptions: so far.
        priority: lower is earlier.
        lora: the adapter's name.
    """

    id: str
    state: str
    reason: str = ""
    cause: str = ""
    age_s: float | None = None
    still_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    kv_blocks: int | None = None
    cache_pins: int = 0
    preemptions: int = 0
    priority: int = 0
    lora: str | None = None


class ProcessRequests(AgentAnswer, frozen=True, kw_only=True):
    """The requests of one process.

    Args:
        pid: process id.
        role: as in `Hello`.
        front: of an API server; None in other processes.
        engine: of a scheduler; None in other processes.
        worker: ids that a worker keeps a state for; None in other processes.
        leaving: ids that the scheduler has freed and will tell its workers with the next step.
        still_s: seconds for which an engine with pending requests has made no progress.
        resting: whether the engine is paused or asleep.
        problems: what can't be read.
    """

    pid: int
    role: str
    front: list[FrontRequest] | None = None
    engine: list[EngineRequest] | None = None
    worker: list[str] | None = None
    leaving: tuple[str, ...] = ()
    still_s: float | None = None
    resting: bool = False
    problems: tuple[str, ...] = ()


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to end requests, to an API server's agent or an engine's.

    Args:
        ids: vLLM's own.
        client_message: the error message for the client.
        timeout_s: seconds to wait for the event loop; it ends them later, too.
    """

    ids: list[str]
    client_message: str = msgspec.field(default="", name="why")
    timeout_s: float = 1.0


class AbortAnswer(AgentAnswer, frozen=True, kw_only=True):
    """What was done.

    Args:
        pid: process id.
        ids: those that this process knew and ends.
        pending: whether its event loop has not run yet, so that it ends them later.
    """

    pid: int
    ids: list[str]
    pending: bool = False


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for the prompt of a request.

    Args:
        id: vLLM's own.
    """

    id: str


class PromptAnswer(AgentAnswer, frozen=True, kw_only=True):
    """The prompt of a request.

    Args:
        text: None where vLLM kept only tokens.
        tokens: their ids, the first `PROMPT_TOKENS` of them.
        is_known: whether this process knows the request.
    """

    text: str | None = None
    tokens: tuple[int, ...] = ()
    is_known: bool = msgspec.field(default=False, name="known")


PROMPT_TOKENS = 100_000
