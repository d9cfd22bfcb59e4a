"""``vllmops drain`` and ``resume`` on real agents and real HTTP, without vLLM."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllmops.commands import drain
from vllmops.model.roles import Role
from vllmops.servers.discovery import resolve_server
from vllmops.servers.drain import explain_unreadiness

from ..support.fleet import Fleet
from ..support.waiting import until

Spawn = Callable[..., Any]
# Its engine has no scheduler that could count, so the command asks for vLLM's own figures.
COUNTED = """
import asyncio, os
from vllmops.agent.hooks.request_gate import gate
app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") != "/metrics"]
@app.get("/metrics")
def counted():
    return PlainTextResponse(f'vllm:num_requests_running{{engine="0"}} {gate.in_flight}.0\\n')
@app.get("/slow")
async def slow():
    while not os.path.exists(RELEASED): await asyncio.sleep(0.05)
"""


@pytest.fixture
def fleet(spawn: Spawn, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(spawn, tmp_path)
    made.child.run(COUNTED.replace("RELEASED", repr(str(tmp_path / "released"))))
    yield made
    made.kill()


def test_drain_and_resume(fleet: Fleet, vllmops: Any) -> None:
    target = fleet.words()

    def row() -> Any:
        (found,) = vllmops("ps", *target, "--json").data["instances"]
        return found

    assert httpx.get(f"{fleet.url}/health", timeout=60).status_code == 200
    answer = vllmops("drain", *target, "--wait", "--json")
    assert answer.code == 0, answer
    assert (answer.data["draining"], answer.data["in_flight"]) == (True, 0)
    assert httpx.get(f"{fleet.url}/health", timeout=60).status_code == 503
    assert httpx.get(f"{fleet.url}/metrics", timeout=60).status_code == 200
    until(lambda: row()["unready"] == "draining")  # with the next heartbeat
    assert ", draining" in vllmops("status", *target).out
    assert vllmops("drain", *target, "--json").code == 0  # again
    answer = vllmops("resume", *target, "--json")
    assert (answer.code, answer.data["draining"]) == (0, False)
    assert httpx.get(f"{fleet.url}/health", timeout=60).status_code == 200
    until(lambda: not row()["unready"])


def test_a_server_that_dies_meanwhile(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = lab.serve("a")
    engine = lab.process("a", "engine").pid
    # It has no agent that could be told.
    monkeypatch.setattr(drain, "set_draining", lambda *_, **__: lab.kill(engine))
    with socket.create_connection(("127.0.0.1", record.port)) as slow:
        slow.sendall(b"GET /slow/600 HTTP/1.1\r\n\r\n")
        answer = lab.vllmops("drain", "-t", "a", "--wait", "--timeout", "50", "--json")
    assert (answer.code, answer.error["code"]) == (1, "drain.ended"), answer
    assert f"engine (pid {engine}) has ended" in answer.error["message"]


def test_drain_waits_for_running_requests(fleet: Fleet, vllmops: Any, tmp_path: Path) -> None:
    done: list[int] = []

    def send_slow_request() -> None:
        done.append(httpx.get(f"{fleet.url}/slow", timeout=60).status_code)

    slow = threading.Thread(target=send_slow_request)
    slow.start()
    until(lambda: fleet.child.run("out = gate.in_flight") == "1")
    target = fleet.words()
    answer = vllmops("drain", *target, "--wait", "--timeout", "0.3", "--json")
    assert (answer.code, answer.error["code"]) == (3, "drain.timeout"), answer
    assert answer.data["in_flight"] == 1
    threading.Timer(1, (tmp_path / "released").touch).start()
    assert vllmops("drain", *target, "--wait", "--timeout", "60", "--json").code == 0
    slow.join()
    assert done == [200]


def test_an_api_server_without_an_agent(lab: Any) -> None:
    lab.serve("a")
    answer = lab.vllmops("drain", "a", "--json")
    assert (answer.code, answer.error["code"]) == (5, "drain.no-agent")
    assert "1 of 1 API servers of a could not be told" in answer.error["message"]


def test_a_server_without_an_api_server(spawn: Spawn, home: Path, vllmops: Any) -> None:
    engine = spawn("VLLM::EngineCore", Role.ENGINE, home=home)
    answer = vllmops("drain", "-t", str(engine.process.pid), "--json")
    assert (answer.code, answer.error["code"]) == (5, "drain.no-api-server")


def test_why_a_server_is_no_place_for_new_requests(spawn: Spawn, home: Path) -> None:
    """Each rank says it for itself."""
    engine = spawn("VLLM::EngineCore", Role.ENGINE, home=home)
    server = resolve_server(str(engine.process.pid))
    assert explain_unreadiness(server) == ""
    engine.run(
        """
from types import SimpleNamespace as Made
from vllmops.agent.hooks import vllm_objects as objects
class Scheduler(Made):
    __hash__ = object.__hash__
scheduler = Scheduler(running=[], waiting=[], current_step=7, pause_state=Made(name="PAUSED_ALL"))
executor = Scheduler(is_sleeping=False)
objects.track_object("scheduler", scheduler)
objects.track_object("executor", executor)
"""
    )
    until(lambda: explain_unreadiness(server) == "paused")
    engine.run("executor.is_sleeping = True")
    until(lambda: explain_unreadiness(server) == "asleep")
    engine.run("executor.is_sleeping = False; scheduler.pause_state.name = 'UNPAUSED'")
    until(lambda: explain_unreadiness(server) == "")
    engine.run(
        """
class Serving(Made):
    __hash__ = object.__hash__
serving = Serving(store=Made(refuses=True))
objects.track_object("responses", serving)
"""
    )
    until(lambda: explain_unreadiness(server) == "its store is unavailable")
    engine.run("serving.store.refuses = False")
    until(lambda: explain_unreadiness(server) == "")
