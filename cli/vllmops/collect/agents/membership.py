"""Which processes of this machine are one server's, with the place of each one.

A server is more than a tree of processes. Ray's actors hang below a raylet, and the engines of a
headless node were started on their own. The agents in them say whose they are: they share an id
that comes from vLLM's own configuration.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...model.ranks import ServerMembership, make_placement
from ...model.roles import ROLES, Role, find_title_role
from ...support.errors import VllmopsError
from ...support.home import resolve_home
from ..machine import processes
from ..machine.processes import Process, Table
from ..machine.server_address import find_option
from . import agent_files

Tree = tuple[Process, ...]
NODE = os.uname().nodename
WITH_AGENT = {*ROLES, Role.LAUNCHER}


def find_root_pids(table: Table) -> set[int]:
    """The topmost vLLM processes: servers, Ray's actors, and what dead servers left behind."""
    vllm = {
        pid
        for pid, seen in table.items()
        if not seen.zombie
        and (
            processes.parse_serve_arguments(seen.arguments) is not None
            or find_title_role(seen.arguments)
        )
    }
    pids = set()
    for pid in vllm:
        # A tree counts once, even with another program's process inside it.
        above = table[pid].ppid
        while above in table and above not in vllm:
            above = table[above].ppid
        if above not in vllm:
            pids.add(pid)
    return pids


def group_server_trees(
    table: Table, known_trees: Sequence[Tree] = ()
) -> tuple[list[Tree], list[Tree]]:
    """Every server of a process table.

    A tree without an API server, such as an actor of Ray's, is added to the one with an API server
    that it belongs to. Only processes of one user are put together: what another user's process
    says of itself is not trusted.

    Args:
        table: the process table.
        known_trees: the trees of instances; a headless one stays a server of its own, too.

    Returns:
        The known trees, completed, and the other ones, the oldest first.
    """
    trees, voices, hidden = collect_trees(table, known_trees)
    ids = [collect_server_ids(tree, voices) for tree in trees]
    joined = [fill_places(tree, voices) for tree in merge_trees(trees, ids)]
    joined = [sort_tree(table, tree) for tree in joined]
    count = len(known_trees)
    often = Counter(process.pid for tree in joined for process in tree)
    # A program of somebody's own that has an agent, and no server, is none either.
    shown = joined[count : len(joined) - hidden]
    alone = [tree for tree in shown if tree and often[tree[0].pid] == 1]
    return joined[:count], sorted(alone, key=lambda tree: tree[0].start_ticks)


def collect_trees(
    table: Table, known_trees: Sequence[Tree] = ()
) -> tuple[list[Tree], dict[int, AgentClaim], int]:
    """The trees of a process table, what their agents say, and how many trees have no title.

    Args:
        table: the process table.
        known_trees: the first trees.
    """
    trees = [
        *known_trees,
        *(
            processes.build_process_tree(table, [pid])
            for pid in sorted(find_root_pids(table) - collect_pids(known_trees))
        ),
    ]
    voices = read_agent_claims(table, [process for tree in trees for process in tree])
    # Some have no title that shows them, as an actor of somebody's own class.
    hidden = sorted(voices.keys() - collect_pids(trees))
    trees = [*trees, *(processes.build_process_tree(table, [pid]) for pid in hidden)]
    return (
        [tuple(fill_role_and_home(p, voices) for p in tree) for tree in trees],
        voices,
        len(hidden),
    )


def collect_server_ids(tree: Tree, claim_by_pid: Mapping[int, AgentClaim]) -> set[str]:
    """The ids of the servers that the processes of a tree are of."""
    return set().union(
        *(claim_by_pid[pid].server_ids for pid in collect_pids([tree]) & claim_by_pid.keys())
    )


def collect_server_processes(table: Table, ids: Iterable[str], uid: int) -> Tree:
    """What a server has on a machine that has none of its API servers.

    Args:
        table: the process table.
        ids: of the server.
        uid: the user whose processes count.
    """
    trees, voices, _ = collect_trees(table)
    known, joined = set(ids), list[Tree]()
    left = [tree for tree in trees if find_tree_uid(tree) == uid]
    while more := [tree for tree in left if collect_server_ids(tree, voices) & known]:
        joined += more
        left = [tree for tree in left if tree not in more]
        known.update(*(collect_server_ids(tree, voices) for tree in more))
    once = {process.pid: process for tree in joined for process in tree}
    return fill_places(tuple(once.values()), voices)


def merge_trees(trees: Sequence[Tree], ids: Sequence[set[str]]) -> list[Tree]:
    """The trees, those with an API server with all trees of theirs that have none."""
    users = [find_tree_uid(tree) for tree in trees]
    joined = list(trees)
    fronts = [index for index, tree in enumerate(trees) if any(p.role is Role.API for p in tree)]
    lost = [index for index in range(len(trees)) if index not in fronts]
    # One may be known only through another, as the worker of an engine of another node.
    while True:
        shared, index, front = max(
            (
                (len(ids[front] & ids[index]), index, front)
                for index in lost
                for front in fronts
                if users[front] == users[index]
            ),
            default=(0, 0, 0),
        )
        if not shared:
            return joined
        have = collect_pids([joined[front]])
        joined[front] += tuple(process for process in trees[index] if process.pid not in have)
        ids[front].update(ids[index])
        lost.remove(index)


def complete_tree(table: Table, tree: Tree) -> Tree:
    """A server's tree, with what else on this machine is of that server."""
    return group_server_trees(table, [tree])[0][0]


def find_raylets(table: Table, tree: Tree) -> dict[Process, str]:
    """The raylets that a server's actors hang below, each with the name of its node."""
    names = {}
    for process in tree:
        above = table.get(table[process.pid].ppid) if process.pid in table else None
        if above and os.path.basename(above.arguments[0] if above.arguments else "") == "raylet":
            name = find_option(above.arguments, "--node-name") or find_option(
                above.arguments, "--node-ip-address"
            )
            raylet = Process(Role.OTHER, above.pid, above.start_ticks, "raylet")
            names[raylet] = name or "of raylet"
    return names


def sort_tree(table: Table, tree: Tree) -> Tree:
    """What is below the first process in the order of its start, then all else by rank.

    An instance's record has what was added in the order in which it appeared.
    """
    below = collect_pids(
        [processes.build_process_tree(table, [process.pid for process in tree[:1]])]
    )
    first = [process for process in tree if process.pid in below]
    return (*first, *sorted((p for p in tree if p.pid not in below), key=make_rank_key))


def make_rank_key(process: Process) -> tuple[int, bool, int, int]:
    """The order of the processes that are added: each engine before its workers."""
    place = process.place
    engine = process.role is Role.ENGINE
    return (place.dp_rank or 0, not engine, place.pp_rank or 0, place.tp_rank or 0)


def collect_pids(trees: Iterable[Tree]) -> set[int]:
    return {process.pid for tree in trees for process in tree}


@dataclasses.dataclass(frozen=True)
class AgentClaim:
    """What the agent of a process says of it, and the state directory where it says so."""

    role: str
    standing: ServerMembership
    home: str

    @property
    def server_ids(self) -> tuple[str, ...]:
        return self.standing.servers


def read_agent_claims(table: Table, known_processes: Iterable[Process]) -> dict[int, AgentClaim]:
    """What the agents of this machine say, by pid; from their heartbeats, so of stuck ones, too.

    A process's environment does not always show where its agent is: an actor of Ray's gets its
    environment only once it runs. So all agents in the state directories of the known processes
    are heard.
    """
    voices: dict[int, AgentClaim] = {}
    homes: set[Path] = set()

    def read_claims_in(state_home: Path) -> None:
        if state_home in homes:
            return
        homes.add(state_home)
        for pid in agent_files.list_agent_pids(state_home) - voices.keys():
            if (seen := table.get(pid)) and not seen.zombie:
                process = Process(Role.OTHER, pid, seen.start_ticks, home=str(state_home))
                with suppress(VllmopsError):
                    if pulse := agent_files.read_heartbeat(process):
                        voices[pid] = AgentClaim(
                            pulse.heartbeat.role, pulse.heartbeat.standing, process.home
                        )

    with suppress(VllmopsError):
        read_claims_in(resolve_home())
    for process in known_processes:
        if process.role in WITH_AGENT and process.pid not in voices:
            with suppress(VllmopsError, OSError):
                place = agent_files.find_state_home(process)
                read_claims_in(place)
                # In a container it has another pid for itself, and the place is below its root.
                if process.pid not in voices and (pulse := agent_files.read_heartbeat(process)):
                    voices[process.pid] = AgentClaim(
                        pulse.heartbeat.role, pulse.heartbeat.standing, str(place)
                    )
    return voices


def find_tree_uid(tree: Tree) -> int | None:
    """The uid of a tree's root, None if there is none any more."""
    with suppress(VllmopsError):
        return agent_files.read_process_uid(tree[0]) if tree else None
    return None


def fill_role_and_home(process: Process, claim_by_pid: Mapping[int, AgentClaim]) -> Process:
    """A process with its agent's state directory, and its role where no title shows that."""
    if process.pid not in claim_by_pid:
        return process
    voice = claim_by_pid[process.pid]
    hidden = process.role is Role.OTHER and voice.role in {Role.ENGINE, Role.WORKER}
    role = Role(voice.role) if hidden else process.role
    return dataclasses.replace(process, role=role, home=voice.home)


def fill_places(tree: Tree, claim_by_pid: Mapping[int, AgentClaim]) -> Tree:
    """A server's processes, each with its place.

    A dimension has as many ranks as any process of the server shows: data parallel engines of a
    model without experts know of themselves alone.
    """
    says = {
        p.pid: claim_by_pid[p.pid].standing if p.pid in claim_by_pid else ServerMembership()
        for p in tree
    }
    ranks = {p.pid: p.place.ranks_by_dimension() | says[p.pid].ranks_by_dimension() for p in tree}
    sizes: dict[str, int] = {}
    for process in tree:
        shown = dict.fromkeys(
            process.place.ranks_by_dimension(), 2
        )  # in a title, so there are several
        counted = {name: rank + 1 for name, rank in ranks[process.pid].items()}
        for known in (shown, counted, says[process.pid].sizes):
            sizes |= {name: max(size, sizes.get(name, 1)) for name, size in known.items()}
    return tuple(
        dataclasses.replace(p, place=make_placement(says[p.pid].node or NODE, ranks[p.pid], sizes))
        for p in tree
    )
