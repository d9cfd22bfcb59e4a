"""``vllmops probe``, with a stand-in for vLLM, and with agents that have no vLLM."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from vllmops.commands import probe
from vllmops.model.probe import ProbeResult, judge_state
from vllmops.model.process_identity import read_boot_id
from vllmops.model.roles import Role
from vllmops.servers import quick_probe
from vllmops.servers.record import InstanceFolder
from vllmops.supervision import supervisor
from vllmops.support.errors import VllmopsError

from ..support.commands import background
from ..support.ports import free_port
from ..support.waiting import until

Spawn = Callable[..., Any]
KINDS = ("--liveness", "--readiness", "--startup")


def answers(vllmops: Any, *words: str, env: dict[str, str] | None = None) -> list[int]:
    return [vllmops("probe", kind, *words, env=env).code for kind in KINDS]


@pytest.fixture
def ready_file(tmp_path: Path) -> Path:
    """A file without which a server does not become ready, however long that takes."""
    return tmp_path / "held"


def test_a_life(lab: Any, ready_file: Path) -> None:
    lab.start_in_foreground("a", ready_with=str(ready_file))
    assert answers(lab.vllmops) == [0, 1, 1]  # the only one need not be named
    told = lab.vllmops("probe", "--readiness", "-t", "a")
    assert told.out.startswith("a is not ready: it is starting: ")
    ready_file.touch()
    until(lambda: lab.state("a") == "ready")
    assert answers(lab.vllmops, "-t", "a") == [0, 0, 0]
    assert answers(lab.vllmops, env={"VLLMOPS_TARGET": "a"}) == [0, 0, 0]
    assert lab.vllmops("probe", "--liveness", "-t", "a").out == "a is live\n"
    answer = lab.vllmops("probe", "--liveness", "-t", "a", "--json")
    assert (answer.code, answer.envelope["command"]) == (0, "probe")
    assert answer.data == {
        "server": "a",
        "live": True,
        "ready": True,
        "started": True,
        "reason": "",
        "evidence": "",
    }
    assert answers(lab.vllmops, "-t", lab.record("a").url) == [0, 0, 0]
    assert lab.vllmops("stop", "a").code == 0
    assert answers(lab.vllmops, "-t", "a") == [1, 1, 1]
    assert lab.vllmops("probe", "--liveness", "-t", "a").out == "a is not live: it has stopped\n"


def test_processes_that_are_gone(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill_supervisor("a")
    lab.kill(lab.pid_of(record.processes, "worker"))
    until(lambda: answers(lab.vllmops, "-t", "a") == [0, 1, 0])
    assert "worker" in lab.vllmops("probe", "--readiness", "-t", "a").out


@pytest.mark.parametrize("target", ["nobody", "4194400", "http://localhost:9"])
def test_probe_reports_an_unknown_target(lab: Any, target: str) -> None:
    answer = lab.vllmops("probe", "--liveness", "-t", target, "--json")
    assert (answer.code, answer.error["code"]) == (5, "target.unknown")


@pytest.mark.parametrize(
    "words", [(), ("--liveness", "--readiness"), ("--liveness", "--listen", "8")]
)
def test_probe_requires_exactly_one_check(vllmops: Any, words: tuple[str, ...]) -> None:
    answer = vllmops("probe", *words, "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")


@pytest.mark.parametrize("place", ["0", "x", "127.0.0.1:", "a:b:c", "65536"])
def test_a_port_that_is_none(vllmops: Any, place: str) -> None:
    answer = vllmops("probe", "--listen", place, "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")


SCHEDULER = """
from types import SimpleNamespace as Made
from vllmops.agent.hooks import vllm_objects as objects
class Scheduler(Made):
    __hash__ = object.__hash__
scheduler = Scheduler(running=[], waiting=[], current_step=7)
objects.track_object("scheduler", scheduler)
"""


class Kept:
    """An instance's folder whose record names a process with an agent."""

    def __init__(self, engine: Any, home: Path) -> None:
        self.folder = InstanceFolder("a").path
        self.folder.mkdir(mode=0o700, parents=True)
        process = engine.process
        self.record = {
            "state": "ready",
            "stage": "ready",
            "note": "",
            "started_at": 7.0,
            "processes": [
                {"role": "engine", "pid": process.pid, "start_ticks": process.start_ticks}
            ],
        }
        self.write("instance.json", self.record)

    def write(self, name: str, content: Any) -> None:
        path = self.folder / name
        path.write_text(json.dumps(content))
        path.chmod(0o600)

    def write_watch_verdict(self, verdict: ProbeResult, **fields: Any) -> None:
        until_ = time.monotonic() + 600
        self.write(
            quick_probe.FILE,
            {"start": 7.0, "boot": read_boot_id(), "until": until_, "verdict": verdict, **fields},
        )

    @property
    def verdict(self) -> ProbeResult:
        found = quick_probe.read_verdict(self.folder)
        assert found
        return found


@pytest.fixture
def engine(spawn: Spawn, home: Path) -> Any:
    return spawn("VLLM::EngineCore", Role.ENGINE, home=home)


def test_by_heartbeats(engine: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(engine, home)
    engine.run(SCHEDULER)
    assert kept.verdict == ProbeResult(live=True, ready=True, started=True)
    engine.run("scheduler.pause_state = Made(name='PAUSED_ALL')")
    until(lambda: kept.verdict.reason == "paused")
    engine.run("scheduler.pause_state.name = 'UNPAUSED'")
    until(lambda: kept.verdict.ready)
    monkeypatch.setattr(quick_probe, "PATIENCE_S", 2.5)
    engine.run("scheduler.waiting.append(Made(request_id='a'))")
    # If it stands still for as long, the heartbeat has stopped, too.
    stuck = f"engine {engine.process.pid}: requests are pending and no token is produced"
    until(lambda: (verdict := kept.verdict).reason == stuck and not verdict.ready)
    engine.run("scheduler.waiting.clear()")
    until(lambda: kept.verdict.ready)
    os.kill(engine.process.pid, signal.SIGSTOP)
    until(lambda: "the heartbeat has stopped" in kept.verdict.reason)
    assert kept.verdict.live  # nobody has kept evidence
    os.kill(engine.process.pid, signal.SIGCONT)
    kept.write("instance.json", {**kept.record, "note": "node b does not answer"})
    until(lambda: kept.verdict.reason == "node b does not answer")


def test_the_verdict_of_a_watch_counts_while_it_is_fresh(engine: Any, home: Path) -> None:
    kept = Kept(engine, home)
    stuck = ProbeResult(live=False, ready=False, started=True, reason="no token", evidence="b")
    well = ProbeResult(live=True, ready=True, started=True)
    kept.write_watch_verdict(stuck)
    assert kept.verdict == stuck
    kept.write_watch_verdict(stuck, until=time.monotonic() - 1)  # its watch was killed
    assert kept.verdict == well
    kept.write_watch_verdict(stuck, start=6.0)  # of an earlier start
    assert kept.verdict == well
    kept.write_watch_verdict(stuck, boot="another")
    assert kept.verdict == well
    kept.write_watch_verdict(stuck)
    (kept.folder / quick_probe.FILE).chmod(0o666)  # others may have written it
    assert kept.verdict == well
    kept.write(quick_probe.FILE, [1])
    assert kept.verdict == well
    kept.write_watch_verdict(judge_state("starting", "warming up"))
    assert kept.verdict == well  # it is ready since the watch looked
    kept.write_watch_verdict(stuck)
    kept.write("instance.json", {**kept.record, "state": "stopping"})
    assert kept.verdict.live


def test_a_folder_that_others_may_write_to_is_not_believed(
    engine: Any, home: Path, vllmops: Any
) -> None:
    kept = Kept(engine, home)
    kept.write_watch_verdict(ProbeResult(live=True, ready=True, started=True))
    kept.folder.chmod(0o777)
    answer = vllmops("probe", "--liveness", "-t", "a", "--json")
    assert answer.code not in {0, 1}


def test_over_http_until_it_is_told_to_end(lab: Any) -> None:
    lab.serve("a")
    port = free_port()
    serving = background("probe", "--listen", str(port), "-t", "a")
    url = f"http://127.0.0.1:{port}"

    def status(path: str) -> int | None:
        try:
            return httpx.get(f"{url}/{path}", timeout=60).status_code
        except httpx.TransportError:
            return None

    try:
        until(lambda: status("livez") == 200)
        until(lambda: (status("readyz"), status("startupz")) == (200, 200))
        lab.vllmops("stop", "a")
        until(lambda: status("livez") == 503)
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=60)
    assert serving.returncode == 130


def test_over_http_an_error_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found = 100.0, judge_state("ready")
    error: VllmopsError | None = None
    asked: list[Callable[[], ProbeResult]] = []

    def judge_or_fail(_: str | None) -> tuple[str, ProbeResult]:
        if error:
            raise error
        return "a", found

    def probe_after(seconds: float, code: Any = "") -> ProbeResult:
        nonlocal now, error
        now, error = now + seconds, VllmopsError(code, "why") if code else None
        return asked[0]()

    monkeypatch.setattr(probe, "judge_server", judge_or_fail)
    monkeypatch.setattr(probe, "ProbeServer", lambda _, verdict: asked.append(verdict))
    monkeypatch.setattr(probe, "make_stop_event", lambda *_: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: now))
    probe.serve_probes("a", ("127.0.0.1", 1))
    # The event loop of a server on another machine may be blocked, and its gateway may restart.
    for code in ("admin.timeout", "admin.unreachable", "agent.broken"):
        assert probe_after(1, code) == ProbeResult(
            live=True, ready=False, started=True, reason="why"
        )
    assert probe_after(30, "admin.unreachable").live, "it did not answer only now"
    assert probe_after(1) == found
    for code in ("target.over", "target.unknown"):
        assert not probe_after(1, code).live
        assert probe_after(1) == found
    assert [probe_after(4, "admin.unreachable").live for _ in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not probe_after(1, "admin.timeout").ready


@pytest.mark.parametrize(
    ("target", "again"), [("12", "a"), (None, "a"), ("https://h/x+y", "https://h/x+y")]
)
def test_over_http_it_is_the_same_server(
    monkeypatch: pytest.MonkeyPatch, target: str | None, again: str
) -> None:
    looked: list[str | None] = []

    def record_target(asked: str | None) -> tuple[str, ProbeResult]:
        looked.append(asked)
        return "https://h/…" if asked and "://" in asked else "a", judge_state("ready")

    monkeypatch.setattr(probe, "judge_server", record_target)
    monkeypatch.setattr(probe, "ProbeServer", lambda _, verdict: verdict())
    monkeypatch.setattr(probe, "make_stop_event", lambda *_: SimpleNamespace(wait=lambda: None))
    probe.serve_probes(target, ("127.0.0.1", 1))
    assert looked == [target, again]


@pytest.mark.first
def test_serve_has_a_watch_that_answers_from_the_start(
    lab: Any, ready_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "WATCH_S", 0.5)
    port = free_port()
    lab.start_in_foreground("a", "--probe-port", str(port), ready_with=str(ready_file))
    url = f"http://127.0.0.1:{port}"

    def fetch_probe(path: str) -> tuple[int, str]:
        try:
            answer = httpx.get(f"{url}/{path}", timeout=60)
        except httpx.TransportError:
            return 0, ""
        return answer.status_code, answer.text

    until(lambda: fetch_probe("livez")[0] == 200)
    code, text = fetch_probe("startupz")
    assert (code, lab.state("a")) == (503, "starting"), text
    assert "it is starting" in text
    ready_file.touch()
    until(lambda: fetch_probe("readyz")[0] == 200)
    assert fetch_probe("startupz") == (200, "started\n")
    kept = json.loads((InstanceFolder("a").path / quick_probe.FILE).read_text())
    assert ProbeResult(*kept["verdict"]).ready
    lab.vllmops("stop", "a")
    until(lambda: fetch_probe("livez")[0] == 0)  # it ends with the server


def test_a_probe_port_that_is_taken(lab: Any) -> None:
    record = lab.serve("a")
    answer = lab.vllmops(*lab.words("b", "--detach", "--probe-port", str(record.port), "--json"))
    assert (answer.code, answer.error["code"]) == (1, "port.taken")
    port = str(free_port())
    answer = lab.vllmops(
        *lab.words("b", "--detach", "--port", port, "--probe-port", port, "--json")
    )
    assert (answer.code, answer.error["code"]) == (2, "usage")


def test_a_server_that_vllmops_did_not_start(engine: Any, vllmops: Any) -> None:
    target = ("-t", str(engine.process.pid))
    assert answers(vllmops, *target) == [0, 1, 1]
    engine.run(SCHEDULER)
    until(lambda: answers(vllmops, *target) == [0, 0, 0])
    engine.run("scheduler.pause_state = Made(name='PAUSED_NEW')")
    until(lambda: answers(vllmops, *target) == [0, 1, 0])
