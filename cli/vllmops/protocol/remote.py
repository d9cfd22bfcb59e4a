"""What a server tells of its processes to an operator on another machine."""

from __future__ import annotations

import msgspec

from .engine import Answer
from .server import ProcessState, Pulse

PROCESSES = "/v1/vllmops/processes"  # and below it "/PID/ROUTE": a route of that process's agent
# The seconds that the caller waits for an agent; a server may wait for less.
TIMEOUT = "X-Vllmops-Timeout"
LONGEST_S = 3600.0
# The routes of agents that are passed on; what follows "?" counts.
GETS = frozenset(
    {"hello", "engine", "caches", "caches?keys=1", "stacks", "memory", "packages", "requests"}
    | {"steps", "traffic", "heartbeat", "patches", "patches?verify=1", "keys", "keys?reload=1"}
)
POSTS = frozenset({"abort", "compare", "drain", "repair", "reset"})


class Member(ProcessState, frozen=True, kw_only=True):
    """A process of the server, as the kernel sees it.

    Args:
        start_ticks, boot: with the pid its `Identity`.
    """

    start_ticks: int
    boot: str


class Members(Answer, frozen=True, kw_only=True):
    """The processes of the server on the node of the API server that answers.

    Args:
        vllmops: the version that runs there.
        node: the name of the host.
        model: as given to vLLM, None if unknown.
        processes: root first.
        pulses: the heartbeats of those that have one.
        compilers: as in `Observation`.
    """

    vllmops: str
    node: str
    model: str | None = None
    processes: tuple[Member, ...]
    pulses: tuple[Pulse, ...] = ()
    compilers: tuple[str, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """Why a route refuses, as `VllmopsError` has it."""

    code: str
    message: str
    hint: str = ""
    exit_code: int = 1


class Refused(msgspec.Struct, frozen=True):
    """The body of a refusal."""

    error: Refusal
