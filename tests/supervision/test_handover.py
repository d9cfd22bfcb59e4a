"""A listening socket goes from one process to another, and no connection is refused meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllmops.agent.hooks import socket_handover
from vllmops.collect.agents import agent_client
from vllmops.collect.machine.processes import Process
from vllmops.model import process_identity
from vllmops.model.agent_state import Traffic
from vllmops.model.roles import Role
from vllmops.model.socket_handover import LISTEN
from vllmops.supervision import handover
from vllmops.support.errors import VllmopsError

LISTENER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    input()
"""


def test_queued_connection_is_accepted_by_the_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [sys.executable, "-c", LISTENER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as first:
        assert first.stdout
        port = int(first.stdout.readline())
        tree = [Process(Role.API, first.pid, 0)]
        with pytest.raises(OSError, match=r"listens on port 1$"):
            handover.copy_listening_socket(tree, 1)
        number = handover.copy_listening_socket(tree, port)
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        first.communicate("\\n")
    module = ModuleType("launcher")
    calls = list[Any]()

    def create_server_socket(addr: tuple[str, int], *, reuse_port: bool) -> None:
        calls.append((addr, reuse_port))

    create_server_socket.__module__ = module.__name__
    module.create_server_socket = create_server_socket  # type: ignore[attr-defined]
    monkeypatch.setenv(LISTEN, f"{number} {port} 127.0.0.1")
    socket_handover.hook_socket_creation(module)
    module.create_server_socket(("127.0.0.1", port + 1), reuse_port=False)
    assert calls == [(("127.0.0.1", port + 1), False)]
    with module.create_server_socket(("127.0.0.1", port), reuse_port=True) as listener, client:
        taken, _ = listener.accept()
        with taken:
            client.sendall(b"a")
            assert taken.recv(1) == b"a"
    assert len(calls) == 1


def test_a_second_server_needs_as_much_memory_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = [Process(Role.API, os.getpid(), 0)]
    assert handover.explain_insufficient_memory(tree) == ""
    monkeypatch.setattr(
        "vllmops.collect.machine.memory.read_available_memory", lambda _: (10**6, 10**6)
    )
    assert "0.0 GB of memory are free" in handover.explain_insufficient_memory(tree)


class Agent:
    """What an API server's agent and an engine's answer; None where one does not in time.

    A real one that answers late, or not at all, can't be had at a given moment.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_flight = 0
        self.engine_answers = self.api_answers = True
        self.leaves = 0
        monkeypatch.setattr(agent_client, "open_agent", lambda _: self)
        monkeypatch.setattr(handover, "KEEP_ALIVE_S", 0.2)
        monkeypatch.setattr(handover, "SLACK_S", 0.2)
        monkeypatch.setattr(handover, "POLL_S", 0.02)
        started = process_identity.read_identity(os.getpid()).start_ticks
        self.tree = [Process(role, os.getpid(), started) for role in (Role.API, Role.ENGINE)]

    def fetch_traffic(self) -> Traffic:
        return Traffic(
            in_flight=self.in_flight,
            engine_requests=0,
            started_requests=9,
            draining=False,
            serves=False,
        )

    def set_draining(self, *, leave: bool = False, **_: object) -> Traffic:
        if leave:
            self.leaves += 1
            if not self.api_answers:
                raise VllmopsError("agent.timeout", "no answer")
        return self.fetch_traffic()

    def fetch_engine_state(self) -> Any:
        if not self.engine_answers:
            raise VllmopsError("agent.timeout", "no answer")
        return SimpleNamespace(unfinished_requests=0)

    def drain(self, seconds: float) -> str:
        return handover.drain_first_server(self.tree, seconds, lambda _: None, lambda: False, {})


def test_a_first_server_is_empty_when_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = Agent(monkeypatch)
    assert agents.drain(600) == "no request was lost"
    assert agents.leaves == 1
    agents.in_flight = 5
    assert agents.drain(0.5) == "requests cut off: 5"


def test_an_engine_that_does_not_answer_may_have_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = Agent(monkeypatch)
    agents.engine_answers, agents.in_flight = False, 5
    assert agents.drain(0.5) == "requests cut off: 5"


def test_an_api_server_that_did_not_hear_it_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections until then."""
    agents = Agent(monkeypatch)
    agents.api_answers = False

    def update_api_answers(_: str) -> None:
        agents.api_answers = agents.leaves > 3

    assert (
        handover.drain_first_server(agents.tree, 600, update_api_answers, lambda: False, {})
        == "no request was lost"
    )
    assert agents.leaves == 5
    agents.api_answers, said = False, list[str]()
    handover.drain_first_server(agents.tree, 600, said.append, lambda: bool(said), {})
    assert "still takes connections" in said[-1]
