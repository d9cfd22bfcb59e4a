"""Heals a server: each action looks three times, acts on what all looks show, and looks again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from ..errors import VllmopsError
from ..home import user
from ..host.processes import ROLES, Process
from ..instances.servers import Server
from ..protocol.caches import Silent
from ..protocol.heal import Healing, HealRequest
from ..protocol.place import named
from ..rpc import agent
from ..rpc.proofs import Case, ask, awake, certain
from .action import Action, Outcome
from .actions.admission import Admission
from .actions.broadcast import Broadcast
from .actions.caches import Caches
from .actions.encoder_cache import EncoderCache
from .actions.event_loop import EventLoop
from .actions.io_threads import IoThreads
from .actions.paused import Paused
from .actions.stopped import Stopped
from .actions.transfers import Transfers
from .actions.zombies import Zombies

# In this order: a process that runs again may need the next ones, and what threads have lost is
# ended last.
ACTIONS: Final[tuple[Action, ...]] = (
    Stopped(),
    EventLoop(),
    IoThreads(),
    Broadcast(),
    Caches(),
    Paused(),
    EncoderCache(),
    Admission(),
    Transfers(),
    Zombies(),
)
REACH_S = 2.0
GONE_S, POLL_S = 3.0, 0.2
# One request at the head of a queue may stand before the next one like it.
ROUNDS = 20


class Healed(NamedTuple):
    """What was done.

    Args:
        outcomes: of everything that was proven.
        silent: the processes whose agents did not answer.
        problems: actions that could not look or act, and why.
    """

    outcomes: list[Outcome]
    silent: list[Silent]
    problems: list[str]


def heal(
    server: Server,
    actions: Sequence[Action] = ACTIONS,
    *,
    dry_run: bool = False,
    resume: bool = False,
    by: str = "vllmops heal",
    show: Callable[[str], None] = lambda _: None,
) -> Healed:
    """Heal what is proven, and nothing else.

    Args:
        server: to heal.
        actions: which to try, in this order.
        dry_run: look only.
        resume: act on states that somebody may have wanted, too.
        by: what the line in the server's log names.
        show: called with what happens now.

    Raises:
        VllmopsError: ``heal.no-agent``, if no agent answers and nothing else could be done.
    """
    agents = server.of(*ROLES)
    answers, silent = agent.side_by_side(agents, answer)
    outcomes: list[Outcome] = []
    problems: list[str] = []
    show(f"{server.label}: looking for what can be healed")
    for action in actions:
        for _ in range(1 if dry_run else ROUNDS):
            try:
                cases = certain(partial(action.look, server))
                if not cases:
                    break
                if not dry_run:
                    show(f"{server.label}: healing {action.name}")
                done = treated(server, action, cases, act=not dry_run, resume=resume)
            except VllmopsError as error:
                problems.append(f"{action.name}: {error.message}")
                break
            outcomes += done
            if not dry_run:
                note(server, done, by)
            if not all(outcome.done for outcome in done):
                break
    if silent and any(outcome.done for outcome in outcomes):  # what was healed may answer now
        answers, silent = agent.side_by_side(agents, answer)
    if agents and not answers and not outcomes:
        raise agent.nobody("heal.no-agent", f"nothing of {server.label} can be healed", silent)
    return Healed(outcomes, silent, problems)


def answer(process: Process) -> Healing:
    """Whether an agent answers; one whose process runs no Python is not waited for.

    Raises:
        VllmopsError: it does not.
    """
    if not awake(process):
        raise agent.silent(process)
    return ask(process, HealRequest(), REACH_S)


def treated(
    server: Server, action: Action, cases: Sequence[Case], *, act: bool, resume: bool
) -> list[Outcome]:
    """Act on proven cases, if that may be, and look again; raises VllmopsError."""
    if action.asks and not resume:
        left = dict.fromkeys((case.proof.subject for case in cases), "only with --resume")
        act = False
    elif act:
        left = action.act(server, cases)
    else:
        left = {}
    still = remaining(server, action, cases) if act else cases
    outcomes = []
    for case in cases:
        subject = case.proof.subject
        why = left.get(subject, "")
        if act and case in still:
            why = why or f"it is still there {GONE_S:g} s later"
        outcomes.append(
            Outcome(
                action=action.name,
                process=f"{named(case.process.role, case.process.place)} {case.process.pid}",
                subject=subject,
                seen=case.proof.what,
                done=act and not why,
                did=action.does,
                left=why,
            )
        )
    return outcomes


def remaining(server: Server, action: Action, cases: Sequence[Case]) -> list[Case]:
    """The cases that are still there after a while; raises VllmopsError."""
    until = time.monotonic() + GONE_S
    while True:
        now = {case.key for case in action.look(server)}
        still = [case for case in cases if case.key in now]
        if not still or time.monotonic() > until:
            return still
        time.sleep(POLL_S)


def note(server: Server, outcomes: Sequence[Outcome], by: str) -> None:
    """Write what was done into the log of the first process that takes it."""
    for outcome in outcomes:
        result = "healed" if outcome.done else f"not healed: {outcome.left}"
        line = (
            f"{by} by {user(os.geteuid())}: {outcome.action}, {outcome.process}, "
            f"{outcome.subject}: {outcome.seen}; {outcome.did}; {result}"
        )
        for process in server.of(*ROLES):
            try:
                ask(process, HealRequest(note=line))
                break
            except VllmopsError:
                continue
