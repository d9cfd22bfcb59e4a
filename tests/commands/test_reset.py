"""``vllmops cache reset`` on real agents, each with a stand-in for vLLM's engine client.

Which processes are one server's is told to the command: several API servers of one server that
have an agent take a vLLM.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops.collect.agents.agent_client import open_agent
from vllmops.commands.cache import reset
from vllmops.model.cache_resets import ResetRequest

from ..support.extent import long
from ..support.waiting import until

Spawn = Callable[..., Any]

CLIENT = """
import asyncio, threading
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects
from vllmops.agent.hooks.request_gate import gate
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
class Client:
    def __init__(self, left):
        self.left, self.resets = left, 0
        self.output_handler = SimpleNamespace(get_loop=lambda: loop)
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.left)
    async def reset_mm_cache(self):
        self.resets += 1
client = Client({left})
objects.track_object("engine-client", client)
"""


@pytest.fixture
def api(spawn: Spawn) -> Callable[..., Any]:
    def start(left: int = 0) -> Any:
        made = spawn()
        made.run(CLIENT.format(left=left))
        return made

    return start


@pytest.fixture
def run(vllmops: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def command(*children: Any, words: tuple[str, ...] = ()) -> Any:
        found = [item.process for item in children]
        server = SimpleNamespace(
            label="a", url=None, processes=found, select_processes=lambda *_: found
        )
        monkeypatch.setattr(reset, "resolve_server", lambda _: server)
        return vllmops("cache", "reset", "--timeout", "0.5", *words, "--json")

    return command


def resets(child: Any) -> int:
    return int(child.run("out = client.resets"))


def name(child: Any) -> str:
    return f"api {child.process.pid}"


def test_reset_clears_the_caches_of_all_api_servers(api: Any, run: Any) -> None:
    one, two = api(), api()
    answer = run(one, two)
    assert answer.code == 0, answer
    rows = answer.data["processes"]
    assert [(row["pid"], row["done"]) for row in rows] == [
        (item.process.pid, True) for item in (one, two)
    ]
    assert (resets(one), resets(two)) == (1, 1)


def test_reset_skips_a_busy_api_server(api: Any, run: Any) -> None:
    free, busy = api(), api(left=3)
    answer = run(free, busy)
    assert (answer.code, answer.error["code"]) == (3, "reset.partly")
    message = answer.error["message"]
    assert f"only {name(free)} reset the caches" in message
    assert f"{name(busy)} still had 3 requests in flight" in message
    assert [row["done"] for row in answer.data["processes"]] == [True, False]
    assert (resets(free), resets(busy)) == (1, 0)
    assert busy.run("out = gate.is_closed") == "False"


@long
def test_reset_fails_if_all_api_servers_are_busy(api: Any, run: Any) -> None:
    answer = run(api(left=1), api(left=2))
    assert (answer.code, answer.error["code"]) == (3, "reset.busy")
    assert "were not reset" in answer.error["message"]
    assert [row["in_flight"] for row in answer.data["processes"]] == [1, 2]
    assert run(api(left=1), words=("--now",)).code == 0


def test_reset_reports_api_servers_that_do_not_answer(
    api: Any,
    run: Any,
    spawn: Spawn,
    monkeypatch: pytest.MonkeyPatch,
    patience: pytest.MonkeyPatch,
) -> None:
    patience.undo()
    monkeypatch.setattr(reset, "SLACK_S", 3.0)
    free, stuck, other = api(), api(), spawn()
    os.kill(stuck.process.pid, signal.SIGSTOP)
    try:
        answer = run(free, stuck, other)
    finally:
        os.kill(stuck.process.pid, signal.SIGCONT)
    assert (answer.code, answer.error["code"]) == (5, "reset.partly")
    assert f"only {name(free)} reset the caches" in answer.error["message"]
    assert "no engine client" in answer.error["message"]
    assert "may still reset later" in answer.error["message"]
    silent = {item["pid"]: item["code"] for item in answer.data["silent"]}
    assert silent == {stuck.process.pid: "agent.timeout", other.process.pid: "agent.broken"}
    answer = run(other)
    assert (answer.code, answer.error["code"]) == (5, "agent.broken")
    assert "were not reset" in answer.error["message"]


def test_reset_fails_without_an_agent(run: Any) -> None:
    answer = run()
    assert (answer.code, answer.error["code"]) == (5, "reset.no-agent")


def test_two_resets_at_once_open_the_gate_again(api: Any) -> None:
    child = api()

    def once(drain_s: float) -> Any:
        return open_agent(child.process, timeout_s=600).reset_caches(ResetRequest(drain_s=drain_s))

    def holds() -> int:
        return int(child.run("out = gate.holds"))

    for drain_s in (1.0, 10.0, 100.0):
        child.run("client.left = 1")
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(once, drain_s)
            until(lambda first=first: holds() or first.done())  # type: ignore[misc]
            second = pool.submit(once, 600.0)
            until(lambda first=first: holds() == 2 or first.done())  # type: ignore[misc]
            met = not first.done()
            assert not first.result().done
            until(holds)
            assert child.run("out = gate.is_closed") == "True"
            child.run("client.left = 0")
            assert second.result().done
        assert child.run("out = gate.is_closed") == "False"
        if met:  # on a busy machine the first may be over before the second begins
            return
    raise AssertionError("they were never there at once")


@pytest.mark.parametrize("timeout", ["nan", "inf", "1e308"])
def test_a_drain_ends(api: Any, run: Any, timeout: str) -> None:
    child = api()
    answer = run(child, words=("--timeout", timeout))
    assert answer.code == 2
    assert resets(child) == 0
