"""Where a process stands in its server: its node and its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

# Anybody's process may have such a title, and Python reads no number of thousands of digits.
RANK = "[0-9]{1,9}"
# A dimension of a title, as vLLM writes it if there is more than one rank: Worker_DP0_PP1_TP0.
IN_TITLE = re.compile(rf"_(DP|TP|PP)({RANK})(?=_|\s|$)")
# Ranks as people write them: "3", "0 and 2", "1-3", "0, 1 and 4".
NUMBERS = rf"{RANK}(?:(?:, ?(?:and )?| and | & |[-/]|\u2013| to ){RANK})*"
MOST_WRITTEN = 64
# The order in which a person reads them.
DIMENSIONS = ("DP", "TP", "PP")


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The node and the ranks of one process.

    Args:
        node: the name of the host; empty if unknown.
        dp_rank, tp_rank, pp_rank: data, tensor and pipeline parallel rank; None if unknown, or
            where the process has none: an API server, an engine inside its pipeline.
        ranks: the ranks for a person, such as ``DP0 TP1``, without dimensions of size 1.
    """

    node: str = ""
    dp_rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None
    ranks: str = ""

    def ranks_by_dimension(self) -> dict[str, int]:
        """The ranks that are known, by the names in `DIMENSIONS`."""
        ranks = (self.dp_rank, self.tp_rank, self.pp_rank)
        return {
            name: rank for name, rank in zip(DIMENSIONS, ranks, strict=True) if rank is not None
        }

    def placement_fields(self) -> dict[str, Any]:
        """The node and the ranks, as fields of another struct that has them."""
        return {name: getattr(self, name) for name in Placement.__struct_fields__}


class ServerMembership(Placement, frozen=True, kw_only=True):
    """What an agent says of its process's place; the command line adds the names.

    Args:
        servers: ids of the server. They come from vLLM's own configuration, which reaches every
            rank: two processes that share one are of one server, whoever started them.
        sizes: how many ranks there are of each kind, by the names in `DIMENSIONS`.
    """

    servers: tuple[str, ...] = ()
    sizes: dict[str, int] = {}


def make_placement(node: str, ranks: Mapping[str, int], sizes: Mapping[str, int]) -> Placement:
    """A place, from ranks and sizes by the names in `DIMENSIONS`."""
    return Placement(
        node=node,
        dp_rank=ranks.get("DP"),
        tp_rank=ranks.get("TP"),
        pp_rank=ranks.get("PP"),
        ranks=" ".join(
            f"{name}{ranks[name]}"
            for name in DIMENSIONS
            if name in ranks and sizes.get(name, 1) > 1
        ),
    )


def parse_title(title: str) -> Placement:
    """What the title of a vLLM process says: no rank of a dimension of size 1."""
    ranks = {name: int(rank) for name, rank in IN_TITLE.findall(title)}
    return make_placement("", ranks, dict.fromkeys(ranks, 2))


def parse_ranks(text: str) -> Iterator[int]:
    """The ranks that a text with the form of `NUMBERS` means."""
    for part in re.split(r", ?(?:and )?| and | & |/", text):
        first, _, last = re.sub(r"\u2013| to ", "-", part).partition("-")
        low, high = int(first), int(last or first)
        yield from range(low, min(high, low + MOST_WRITTEN) + 1)


def format_role_and_ranks(role: str, placement: Placement) -> str:
    """How a person reads a process: ``worker DP0 TP1``."""
    return f"{role} {placement.ranks}".rstrip()


def choose_process_title(title: str, role: str, placement: Placement) -> str:
    """A process for a person: by its own title, or by its role if the title lacks ranks."""
    title = title.removeprefix("VLLM::").removeprefix("sglang::")
    return (
        title
        if title and placement.ranks in {"", parse_title(title).ranks}
        else format_role_and_ranks(role, placement)
    )


class RankedProcess(Protocol):
    """How messages name a process: its role, its pid and its place."""

    @property
    def role(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def dp_rank(self) -> int | None: ...
    @property
    def tp_rank(self) -> int | None: ...
    @property
    def pp_rank(self) -> int | None: ...
    @property
    def ranks(self) -> str: ...


class NodeProcess(Protocol):
    """A process of some node."""

    @property
    def node(self) -> str: ...
    @property
    def pid(self) -> int: ...


def make_process_key(process: NodeProcess) -> tuple[str, int]:
    """Which process of a server it is: other nodes have the same pids."""
    return process.node, process.pid


def format_process(process: RankedProcess) -> str:
    """How messages name a process: ``worker DP0 TP1 4711``."""
    return " ".join(filter(None, (process.role, process.ranks, str(process.pid))))


def make_process_fields(process: RankedProcess) -> dict[str, Any]:
    """Which process it is, as fields for ``--json``."""
    names = ("role", "pid", "node", "dp_rank", "tp_rank", "pp_rank", "ranks")
    return {name: getattr(process, name) for name in names}
