"""What a server tells of its processes to an operator on another machine."""

from __future__ import annotations

import msgspec

from .agent_state import AgentAnswer
from .server_snapshot import ProcessHeartbeat, ProcessState

ROUTES = "/v1/vllmops/"
KEYS = f"{ROUTES}keys"
# And below it "/PID/ROUTE": a route of that process's agent; "/PID@ADDRESS/ROUTE" on another node.
PROCESSES = f"{ROUTES}processes"
# The seconds that the caller waits for an agent; a server may wait for less.
TIMEOUT = "X-Vllmops-Timeout"
# Between nodes: the ids of the server that a question is about, a JSON array.
SERVERS = "X-Vllmops-Servers"
NODE_PORT = "VLLMOPS_NODE_PORT"  # the environment's name for the port, equal on all nodes
USUAL_NODE_PORT = 28765
LONGEST_S = 3600.0
# The routes of agents that are passed on; what follows "?" counts.
GETS = frozenset(
    {"hello", "engine", "caches", "caches?keys=1", "stacks", "memory", "packages", "requests"}
    | {"steps", "traffic", "heartbeat", "patches", "patches?verify=1", "keys", "keys?reload=1"}
)
POSTS = frozenset({"abort", "compare", "drain", "heal", "repair", "reset"})


class ServerProcess(ProcessState, frozen=True, kw_only=True):
    """A process of the server, as the kernel sees it.

    Args:
        start_ticks, boot: with the pid its `ProcessIdentity`.
        node_address: the address of its node; empty for the node of the API server that answers.
    """

    start_ticks: int
    boot: str
    node_address: str = msgspec.field(default="", name="at")

    @property
    def route_prefix(self) -> str:
        """Of its agent's routes."""
        return f"{PROCESSES}/{self.pid}{self.node_address and '@'}{self.node_address}"


class NodeGap(msgspec.Struct, frozen=True):
    """A node that does not answer.

    Args:
        address: of the node.
        node: the name of the host, empty where it has never answered.
        reason: in words.
    """

    address: str
    node: str
    reason: str = msgspec.field(name="why")

    @property
    def text(self) -> str:
        name = f"{self.node} ({self.address})" if self.node else self.address
        return f"node {name} does not answer: {self.reason}"


class ServerProcesses(AgentAnswer, frozen=True, kw_only=True):
    """The processes of the server, on all nodes that the API server reaches.

    Args:
        vllmops: the version that runs there.
        node: the name of the host.
        model: as given to vLLM, None if unknown.
        processes: root first; of a node that has ceased to answer, what it had.
        heartbeats: the heartbeats of those that have one.
        gaps: the nodes that do not answer.
        compilers: as in `ServerSample`.
    """

    vllmops: str
    node: str
    model: str | None = None
    processes: tuple[ServerProcess, ...]
    heartbeats: tuple[ProcessHeartbeat, ...] = msgspec.field(default=(), name="pulses")
    gaps: tuple[NodeGap, ...] = msgspec.field(default=(), name="silent")
    compilers: tuple[str, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """Why a route refuses, as `VllmopsError` has it."""

    code: str
    message: str
    hint: str = ""
    exit_code: int = 1


class RefusalBody(msgspec.Struct, frozen=True):
    """The body of a refusal."""

    error: Refusal
