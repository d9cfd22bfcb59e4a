"""Heals a server: each action looks three times, acts on what all looks show, and looks again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from ..collect.agents import agent_client
from ..collect.agents.proven_states import (
    HealCase,
    is_running_python,
    prove_cases,
    send_heal_request,
)
from ..collect.machine.processes import Process
from ..model.caches import ProcessGap
from ..model.healing import HealAnswer, HealRequest
from ..model.ranks import format_role_and_ranks
from ..model.roles import ROLES
from ..servers.discovery import Server
from ..support.errors import VllmopsError
from ..support.home import format_user
from .action import Action, Outcome
from .blocked_admission import StuckAdmission
from .blocked_event_loop import BlockedEventLoop
from .damaged_caches import FaultyCaches
from .dead_io_threads import DeadIoThreads
from .encoder_cache_deadlock import HeldEncoderCache
from .lost_broadcast import LostBroadcast
from .one_sided_requests import ZombieRequests
from .paused_engine import PausedEngine
from .stalled_transfers import LostTransfers
from .stopped_process import StoppedProcess

# In this order: a process that runs again may need the next ones, and what threads have lost is
# ended last.
ACTIONS: Final[tuple[Action, ...]] = (
    StoppedProcess(),
    BlockedEventLoop(),
    DeadIoThreads(),
    LostBroadcast(),
    FaultyCaches(),
    PausedEngine(),
    HeldEncoderCache(),
    StuckAdmission(),
    LostTransfers(),
    ZombieRequests(),
)
REACH_S = 2.0
GONE_S, POLL_S = 3.0, 0.2
# One request at the head of a queue may stand before the next one like it.
ROUNDS = 20


class HealResult(NamedTuple):
    """What was done.

    Args:
        outcomes: of everything that was proven.
        gaps: the processes whose agents did not answer.
        problems: actions that could not look or act, and why.
    """

    outcomes: list[Outcome]
    gaps: list[ProcessGap]
    problems: list[str]


def heal_server(
    server: Server,
    actions: Sequence[Action] = ACTIONS,
    *,
    dry_run: bool = False,
    resume: bool = False,
    initiator: str = "vllmops heal",
    show: Callable[[str], None] = lambda _: None,
) -> HealResult:
    """Heal what is proven, and nothing else.

    Args:
        server: to heal.
        actions: which to try, in this order.
        dry_run: look only.
        resume: act on states that somebody may have wanted, too.
        initiator: what the line in the server's log names.
        show: called with what happens now.

    Raises:
        VllmopsError: ``heal.no-agent``, if no agent answers and nothing else could be done.
    """
    agents = server.select_processes(*ROLES)
    answers, silent = agent_client.collect_answers(agents, ping_agent)
    outcomes: list[Outcome] = []
    problems: list[str] = []
    show(f"{server.label}: looking for what can be healed")
    for action in actions:
        for _ in range(1 if dry_run else ROUNDS):
            try:
                cases = prove_cases(partial(action.find_cases, server))
                if not cases:
                    break
                if not dry_run:
                    show(f"{server.label}: healing {action.name}")
                done = run_action(server, action, cases, should_act=not dry_run, resume=resume)
            except VllmopsError as error:
                problems.append(f"{action.name}: {error.message}")
                break
            outcomes += done
            if not dry_run:
                log_outcomes(server, done, initiator)
            if not all(outcome.done for outcome in done):
                break
    if silent and any(outcome.done for outcome in outcomes):  # what was healed may answer now
        answers, silent = agent_client.collect_answers(agents, ping_agent)
    if agents and not answers and not outcomes:
        raise agent_client.make_no_answer_error(
            "heal.no-agent", f"nothing of {server.label} can be healed", silent
        )
    return HealResult(outcomes, silent, problems)


def ping_agent(process: Process) -> HealAnswer:
    """Whether an agent answers; one whose process runs no Python is not waited for.

    Raises:
        VllmopsError: it does not.
    """
    if not is_running_python(process):
        raise agent_client.make_timeout_error(process)
    return send_heal_request(process, HealRequest(), REACH_S)


def run_action(
    server: Server, action: Action, cases: Sequence[HealCase], *, should_act: bool, resume: bool
) -> list[Outcome]:
    """Act on proven cases, if that may be, and look again; raises VllmopsError."""
    if action.asks and not resume:
        left = dict.fromkeys((case.proof.subject for case in cases), "only with --resume")
        should_act = False
    elif should_act:
        left = action.heal_or_explain(server, cases)
    else:
        left = {}
    still = wait_until_gone(server, action, cases) if should_act else cases
    outcomes = []
    for case in cases:
        subject = case.proof.subject
        why = left.get(subject, "")
        if should_act and case in still:
            why = why or f"it is still there {GONE_S:g} s later"
        outcomes.append(
            Outcome(
                action=action.name,
                process=f"{format_role_and_ranks(case.process.role, case.process.place)}"
                f" {case.process.pid}",
                subject=subject,
                evidence=case.proof.evidence,
                done=should_act and not why,
                did=action.does,
                reason=why,
            )
        )
    return outcomes


def wait_until_gone(server: Server, action: Action, cases: Sequence[HealCase]) -> list[HealCase]:
    """The cases that are still there after a while; raises VllmopsError."""
    until = time.monotonic() + GONE_S
    while True:
        now = {case.comparison_key for case in action.find_cases(server)}
        still = [case for case in cases if case.comparison_key in now]
        if not still or time.monotonic() > until:
            return still
        time.sleep(POLL_S)


def log_outcomes(server: Server, outcomes: Sequence[Outcome], initiator: str) -> None:
    """Write what was done into the log of the first process that takes it."""
    for outcome in outcomes:
        result = "healed" if outcome.done else f"not healed: {outcome.reason}"
        line = (
            f"{initiator} by {format_user(os.geteuid())}: {outcome.action}, {outcome.process}, "
            f"{outcome.subject}: {outcome.evidence}; {outcome.did}; {result}"
        )
        for process in server.select_processes(*ROLES):
            try:
                send_heal_request(process, HealRequest(note=line))
                break
            except VllmopsError:
                continue
