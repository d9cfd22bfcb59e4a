"""Only a parser that all looks find in one and the same block of the event loop is ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from vllmops.actions import blocked_event_loop, healing
from vllmops.actions.healing import HealResult
from vllmops.collect.agents import agent_files
from vllmops.collect.machine.processes import Process
from vllmops.collect.stacks import pyspy
from vllmops.model.roles import Role
from vllmops.model.stacks import Frame
from vllmops.servers.discovery import Server

API = Process(Role.API, 11, 1)
PARSER = Frame("Hermes.extract_tool_calls", "/x.py", "x.py")
LOOKS = 3


def heal_blocked_loop(
    monkeypatch: pytest.MonkeyPatch, begins: Sequence[float]
) -> tuple[HealResult, int]:
    """Heal a server, and count the signals that it got.

    Args:
        monkeypatch: for what a server is needed for.
        begins: since when the loop has been blocked, as each heartbeat that is read has it; the
            last one is of a loop that goes on.
    """
    left, signals = list(begins), list[int]()

    def beat(_: Process) -> agent_files.TimedHeartbeat:
        loop_s = 20.0 - len(left) if len(left) > 1 else 0.0
        begin = left.pop(0) if len(left) > 1 else left[0]
        beat_ = SimpleNamespace(monotonic=begin + loop_s, loop_s=loop_s, interrupt=50)
        return agent_files.TimedHeartbeat(beat_, 0.1)  # type: ignore[arg-type]

    thread = SimpleNamespace(tid=API.pid, frames=(PARSER,))
    dump = SimpleNamespace(pid=API.pid, threads=[thread])
    monkeypatch.setattr(agent_files, "read_heartbeat", beat)
    monkeypatch.setattr(pyspy, "dump_stacks", lambda *_, **__: SimpleNamespace(processes=[dump]))
    monkeypatch.setattr(blocked_event_loop, "has_signal_handler", lambda *_: True)
    monkeypatch.setattr(blocked_event_loop, "send_signal", lambda _, number: signals.append(number))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(healing, "ping_agent", lambda _: None)
    monkeypatch.setattr(healing, "log_outcomes", lambda *_: None)
    server = Server(name="demo", processes=(API,))
    return healing.heal_server(server, [blocked_event_loop.BlockedEventLoop()]), len(signals)


def test_a_parser_that_blocks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three looks, what tells the signal's number, and a look before the signals. Then comes a beat.
    done, signals = heal_blocked_loop(monkeypatch, [*(LOOKS + 2) * [100.0], 200.0])
    assert ([one.done for one in done.outcomes], signals) == ([True], 2)


@pytest.mark.parametrize("at", range(1, LOOKS))
def test_looks_that_see_two_blocks_prove_nothing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    begins = [*at * [100.0], *(LOOKS - at) * [150.0]]
    assert heal_blocked_loop(monkeypatch, [*begins, 200.0]) == (HealResult([], [], []), 0)


def test_a_block_that_ends_before_the_signals_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = [*(LOOKS + 1) * [100.0], *3 * [150.0]]
    assert heal_blocked_loop(monkeypatch, [*begins, 200.0])[1] == 0
