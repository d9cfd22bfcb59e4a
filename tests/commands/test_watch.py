"""``vllmops watch`` and ``serve --watch`` on real processes with vLLM's titles.

What they are stuck in is made up; tests/live has real hangs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllmops.bundle import bundle_file, parts
from vllmops.collect.agents import agent_files
from vllmops.collect.stacks import pyspy
from vllmops.model.roles import Role
from vllmops.observe import server_snapshot
from vllmops.rules import diagnosis, stall_detector
from vllmops.servers.discovery import resolve_server
from vllmops.servers.record import InstanceFolder
from vllmops.supervision import supervisor
from vllmops.support.errors import VllmopsError
from vllmops.watch import watch_target

from ..rules.sample_servers import make_healthy_sample, process
from ..support.commands import background
from ..support.waiting import until

Spawn = Callable[..., Any]
QUICK = ("--interval", "0.2", "--checks", "3", "--patience", "1.5")
SCHEDULER = """
from types import SimpleNamespace as Made
from vllmops.agent.hooks import vllm_objects as objects
class Scheduler(Made):
    __hash__ = object.__hash__
scheduler = Scheduler(running=[], waiting=[], current_step=7)
objects.track_object("scheduler", scheduler)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long pauses in the watches and supervisors that are forks of this process."""
    monkeypatch.setattr(stall_detector, "ASK_S", 1.0)
    monkeypatch.setattr(supervisor, "WATCH_S", 0.5)


@pytest.fixture
def engine(spawn: Spawn, home: Path, standin: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose scheduler is a toy: requests come and go as it is told."""
    # A bundle has the output of vLLM's collect_env, which takes seconds of CPU time.
    monkeypatch.syspath_prepend(standin)
    child = spawn("VLLM::EngineCore", Role.ENGINE, home=home)
    child.run(SCHEDULER)
    return child


def stick(engine: Any) -> None:
    engine.run("scheduler.waiting.append(Made(request_id='a'))")


def let_go(engine: Any) -> None:
    engine.run("scheduler.waiting.clear()")


class Watching:
    """A watch in a process of its own, and what it has said so far."""

    def __init__(self, place: Path, *words: object) -> None:
        self.err = place / f"watch-{time.monotonic_ns()}.err"
        with self.err.open("wb") as err:
            given = map(str, words)
            self.popen = background("watch", *given, env={"COLUMNS": "200"}, stderr=err)
        self.says("watching")

    @property
    def stderr_text(self) -> str:
        return self.err.read_text()

    def says(self, words: str, timeout_s: float = 60) -> None:
        def has_printed_words() -> bool:
            assert words in self.stderr_text or self.popen.poll() is None, self.stderr_text
            return words in self.stderr_text

        until(has_printed_words, timeout_s, lambda: self.stderr_text)

    def end(self, timeout_s: float = 60) -> tuple[int, str]:
        out, _ = self.popen.communicate(timeout=timeout_s)
        return self.popen.returncode, out


Begin = Callable[..., Watching]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    made: list[Watching] = []

    def start(*words: object) -> Watching:
        made.append(Watching(tmp_path, *words))
        return made[-1]

    yield start
    for item in made:
        item.popen.kill()
        item.popen.communicate()


def bundles(home: Path) -> list[Path]:
    return sorted((home / "bundles").glob("*.tar.gz"))


def read_bundle_gaps(path: Path) -> dict[str, str]:
    """What a bundle does not have, and why."""
    with tarfile.open(path) as found:
        index = json.load(found.extractfile("index.json"))  # type: ignore[arg-type]
    return {item["name"]: item["why"] for item in index["missing"]}


def test_a_stall_from_its_beginning_to_its_end(engine: Any, home: Path, begin: Begin) -> None:
    hook = home / "hook.sh"
    hook.write_text(f"cat >> {home}/events; echo >> {home}/events; echo heard $VLLMOPS_EVENT")
    watch = begin("-t", engine.process.pid, *QUICK, "--exec", f"sh {hook}", "--json")
    time.sleep(3)
    assert (watch.popen.poll(), bundles(home)) == (None, [])
    stick(engine)
    watch.says("has stalled")
    (kept,) = bundles(home)
    assert kept.stat().st_mode & 0o077 == 0
    snapshot = bundle_file.load_bundle(kept)
    assert len(snapshot.stacks) == 3
    assert "engine.no-progress" in {
        item.code for item in diagnosis.diagnose_snapshot(snapshot, 1.5).findings
    }
    assert str(kept) in watch.stderr_text
    let_go(engine)
    watch.says("makes progress again")
    watch.popen.send_signal(signal.SIGINT)
    code, out = watch.end()
    assert code == 130
    told = json.loads(out)
    assert re.fullmatch(
        "interrupted: watched for .*: 1 stalled, 1 recovered, 0 failed",
        told["errors"][0]["message"],
    )
    data = told["data"]
    assert (data["stalls"], data["failures"]) == (1, 0)
    output = [item["event"] for item in data["events"]]
    assert output == ["stalled", "recovered"]
    heard = [json.loads(line) for line in (home / "events").read_text().splitlines()]
    assert [item["event"] for item in heard] == output
    assert heard[0]["bundle"] == str(kept)
    assert heard[0]["code"] == "engine.no-progress"
    # Not on standard output, which has the envelope.
    assert "heard stalled" in watch.stderr_text
    assert len(bundles(home)) == 1


def test_once(engine: Any, home: Path, vllmops: Any) -> None:
    target = ("-t", str(engine.process.pid))
    answer = vllmops("watch", *target, *QUICK, "--once", "--for", "3")
    assert answer.code == 0
    told = r"watched for \d+s: 0 stalled, 0 recovered, 0 failed\n"
    assert re.fullmatch(told, answer.out), answer.out
    stick(engine)
    answer = vllmops("watch", *target, *QUICK, "--once", "-o", str(home / "kept"), "--json")
    assert answer.code == 1
    (event,) = answer.data["events"]
    assert event["bundle"] == str(next((home / "kept").iterdir()))
    assert answer.envelope["status"] == "findings"


def test_a_stopped_process_is_a_stall_where_it_holds_up_work(
    engine: Any, spawn: Spawn, home: Path, begin: Begin, patience: pytest.MonkeyPatch
) -> None:
    patience.undo()
    stick(engine)

    def stands() -> bool:  # as its heartbeat has it
        pulse = agent_files.read_heartbeat(engine.process)
        return bool(pulse and pulse.heartbeat.waiting and pulse.heartbeat.still_s)

    until(stands)
    os.kill(engine.process.pid, signal.SIGSTOP)
    watch = begin("-t", engine.process.pid, *QUICK, "--once")
    idle = spawn("VLLM::EngineCore", Role.ENGINE, home=home)
    os.kill(idle.process.pid, signal.SIGSTOP)
    other = begin("-t", idle.process.pid, *QUICK, "--once", "--for", "5")
    code, out = watch.end()
    os.kill(engine.process.pid, signal.SIGCONT)
    assert code == 1
    assert "process.stopped" in watch.stderr_text
    assert f"kill -CONT {engine.process.pid}" in watch.stderr_text
    assert "1 stalled" in out
    code, _ = other.end()
    os.kill(idle.process.pid, signal.SIGCONT)
    assert code == 0


def test_the_server_ends(engine: Any, begin: Begin) -> None:
    watch = begin("-t", engine.process.pid, *QUICK)
    time.sleep(1)
    engine.popen.kill()
    engine.popen.wait()
    code, out = watch.end()
    assert (code, "0 stalled" in out) == (0, True)
    assert f"{engine.process.pid} has ended: its processes are gone" in watch.stderr_text


def test_a_full_disk_is_told_and_watching_goes_on(
    full_disk: Callable[[], None], engine: Any, begin: Begin
) -> None:
    stick(engine)
    watch = begin("-t", engine.process.pid, *QUICK)
    full_disk()
    watch.says("No space left on device")
    watch.says("has stalled")
    # Heartbeats get to a full disk, too: their place is there.
    let_go(engine)
    watch.says("makes progress again")
    assert watch.popen.poll() is None


def test_on_a_slow_machine_all_samples_are_there(
    engine: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = home / "py-spy"
    script.write_text(f'#!/bin/sh\nsleep 1\nexec {pyspy.find_pyspy()} "$@"\n')
    script.chmod(0o755)
    # A machine that is as busy can't be had otherwise.
    monkeypatch.setattr(pyspy, "find_pyspy", lambda: str(script))
    stick(engine)
    server = watch_target.WatchedServer(resolve_server(str(engine.process.pid)))
    snapshot = server.take_snapshot([], 10.0, threading.Event(), needs_all_evidence=False)
    assert [item.processes[0].error for item in snapshot.stacks] == [None] * 3
    assert [item.processes[0].note for item in snapshot.stacks] == [""] * 3


def test_the_dead_do_not_move_and_one_sample_is_enough(engine: Any) -> None:
    server = watch_target.WatchedServer(resolve_server(str(engine.process.pid)))
    looks = [make_healthy_sample(0.0, processes=(process("api"), process("engine", state="")))]
    snapshot = server.take_snapshot(looks, 10.0, threading.Event(), needs_all_evidence=True)
    assert len(snapshot.stacks) == 1
    assert "cut-short" not in {item.code for item in snapshot.gaps}


@pytest.fixture
def pyspy_release_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A py-spy that hangs can't be had otherwise; it ends once there is this file."""
    script, end = home / "py-spy", home / "end"
    script.write_text(f"#!/bin/sh\nwhile [ ! -e {end} ]; do sleep 0.1; done\n")
    script.chmod(0o755)
    monkeypatch.setattr(pyspy, "find_pyspy", lambda: str(script))
    return end


def test_evidence_that_ends_early_has_all_that_is_there(
    engine: Any, pyspy_release_file: Path
) -> None:
    server = resolve_server(str(engine.process.pid))
    looking = server_snapshot.Examination(
        server, parts.make_examination_options(600.0), parts.ignore_progress
    )
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(looking.run)
        try:
            until(lambda: looking.build_partial_snapshot("late").machine.memory_total)
            early = looking.build_partial_snapshot("late")
            assert not whole.done()
        finally:
            pyspy_release_file.touch()
    assert early.stacks == ()
    assert [gap.reason for gap in early.gaps if "of 3 stacks" in gap.part] == ["late"]


@pytest.mark.usefixtures("pyspy_release_file")
def test_evidence_is_there_in_time_whatever_hangs(
    engine: Any, home: Path, patience: pytest.MonkeyPatch
) -> None:
    patience.undo()
    stick(engine)
    os.kill(engine.process.pid, signal.SIGSTOP)
    server = watch_target.WatchedServer(resolve_server(str(engine.process.pid)))
    snapshot = server.take_snapshot([], 10.0, threading.Event(), needs_all_evidence=True)
    kept = server.save_evidence(home / "bundles")
    assert watch_target.CAPTURE_S < 20
    # On a busy machine there may be no time left to ask the agent.
    codes = {item.code for item in snapshot.gaps}
    assert "stacks.timeout" in codes
    assert codes & {"agent.timeout", "cut-short"}
    assert bundle_file.load_bundle(kept).samples


def test_command_lines_that_are_wrong(engine: Any, vllmops: Any) -> None:
    for words, exit_code, error in (
        (("--exec", "no-such-program"), 2, "watch.no-command"),
        (("--webhook", "ftp://x"), 2, "usage"),
        (("--interval", "0"), 2, "usage"),
        (("--checks", "0"), 2, "usage"),
        (("--restart",), 1, "restart.stranger"),
    ):
        answer = vllmops("watch", "-t", str(engine.process.pid), *words, "--json")
        assert (answer.code, answer.error["code"]) == (exit_code, error), words


# -- instances ---------------------------------------------------------------------------


@contextmanager
def hang(lab: Any, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A request that its gauge counts, and that gets nowhere."""
    url = f"{lab.record(name).url}/slow/600"
    with subprocess.Popen(
        ["curl", "-s", "--noproxy", "*", url], stdout=subprocess.DEVNULL
    ) as request:
        try:
            yield request
        finally:
            request.kill()


def test_without_agents_and_with_a_restart(lab: Any, begin: Begin) -> None:
    before = lab.serve("a")
    with hang(lab, "a") as request:
        watch = begin("-t", "a", *QUICK, "--restart")
        watch.says("a restarts because it stalled")
        request.wait(60)
    watch.says("a is ready; watching it")
    assert watch.stderr_text.index("evidence:") < watch.stderr_text.index("restarts because")
    assert lab.record("a").session != before.session
    # With so little patience, what was seen before evidence that takes long is forgotten: on a busy
    # machine a stall is told twice.
    kept = bundles(lab.home)[-1]
    # There is none, and it had the time to say so.
    assert "No module named vllm.collect_env" in read_bundle_gaps(kept)["collect_env.txt"]
    lab.vllmops("stop", "a")
    watch.says("a has ended")
    assert watch.popen.poll() is None
    lab.vllmops("restart", "a")
    until(lambda: watch.stderr_text.count("a is ready; watching it") == 2)


def test_an_engine_that_dies_is_a_failure_with_evidence(lab: Any, begin: Begin) -> None:
    lab.serve("a")
    watch = begin("-t", "a", *QUICK, "--once")
    lab.kill(lab.process("a", "engine").pid)
    code, out = watch.end()
    assert (code, "1 failed" in out) == (1, True)
    assert "engine" in watch.stderr_text
    assert "died" in watch.stderr_text
    assert len(bundles(lab.home)) == 1


def read_watch_lines(lab: Any, name: str) -> list[str]:
    lines = lab.vllmops("logs", name, "--process", "watch", "--json").data["lines"]
    return [str(line).partition("[watch] ")[2] for line in lines]


def test_serve_watches_until_its_end(lab: Any) -> None:
    record = lab.serve("a", "--watch-exec", "true")
    assert record.watch == ("--exec", "true")
    until(lambda: read_watch_lines(lab, "a"))
    assert read_watch_lines(lab, "a")[0].startswith("watching a")
    assert "watch" in lab.vllmops("status", "a").out
    first = holder(lab)
    lab.kill(first)
    until(lambda: len(read_watch_lines(lab, "a")) == 2)
    assert InstanceFolder("a").has_watch()
    lab.vllmops("stop", "a")
    until(lambda: not InstanceFolder("a").has_watch())
    until(lambda: read_watch_lines(lab, "a")[-1].startswith("a has ended"))


def test_it_runs_where_serve_ran_wherever_restart_does(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the server: a command may be relative to that, and so may VLLMOPS_HOME be to another."""
    (tmp_path / "hook").touch(0o755)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path)
    lab.serve("a", "--watch-exec", "./hook")
    until(lambda: read_watch_lines(lab, "a"))
    lab.vllmops("stop", "a")
    until(lambda: not InstanceFolder("a").has_watch())
    monkeypatch.chdir("away")
    monkeypatch.setenv("VLLMOPS_HOME", os.path.relpath(lab.home))
    assert lab.vllmops("restart", "a").code == 0
    until(lambda: read_watch_lines(lab, "a"))
    assert read_watch_lines(lab, "a")[0].startswith("watching a")
    assert os.readlink(f"/proc/{holder(lab)}/cwd") == str(tmp_path)


def holder(lab: Any) -> int:
    """The pid of the watch beside an instance."""
    return int(lines_of(lab)[-1].split("pid=")[1].split(")")[0])


def lines_of(lab: Any) -> list[str]:
    return list(lab.vllmops("logs", "a", "--process", "watch", "--json").data["lines"])


def test_it_survives_the_supervisor_and_there_is_one(lab: Any) -> None:
    lab.serve("a", "--watch")
    until(lambda: read_watch_lines(lab, "a"))
    first = holder(lab)
    lab.kill_supervisor("a")
    assert InstanceFolder("a").has_watch()
    lab.vllmops("ps")
    until(lambda: lab.supervisor("a"))
    time.sleep(1.5)
    assert (holder(lab), len(read_watch_lines(lab, "a"))) == (first, 1)
    lab.vllmops("stop", "a")
    until(lambda: not InstanceFolder("a").has_watch())


def test_a_foreground_serve_shows_what_it_says(lab: Any) -> None:
    popen = lab.hold("a", "--watch", "--quiet")
    until(lambda: read_watch_lines(lab, "a"))
    time.sleep(0.5)
    popen.send_signal(signal.SIGINT)
    out, _ = popen.communicate(timeout=60)
    lines = [item for item in out.splitlines() if item]
    assert all("(Watch pid=" in line for line in lines), out
    assert "watching a" in lines[0]
    # Where the drain takes longer than the pause between two looks.
    assert all("a is not serving: stopping" in line for line in lines[1:]), out


def test_a_restart_comes_though_the_supervisor_dies_before_it_obeys(lab: Any) -> None:
    """The server hangs, and the watch asks once."""
    record = lab.serve("a")
    subject, supervisor = watch_target.WatchedServer(resolve_server("a")), lab.supervisor("a")
    os.kill(supervisor, signal.SIGSTOP)
    killing = threading.Timer(1.0, lab.kill, (supervisor,))
    killing.start()
    subject.restart()
    killing.join()
    until(lambda: lab.record("a").session != record.session and lab.state("a") == "ready")


def test_a_supervisor_that_does_nothing_does_not_hold_up_the_watch(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.serve("a")
    monkeypatch.setattr(watch_target, "RESTART_S", 0.5)
    pid = lab.supervisor("a")
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(VllmopsError) as caught:
        watch_target.WatchedServer(resolve_server("a")).restart()
    assert caught.value.code == "supervisor.silent"
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("words", [("--watch-exec", "no-such-program"), ("--watch-webhook", "x")])
def test_serve_refuses_what_watch_would(lab: Any, words: tuple[str, ...]) -> None:
    answer = lab.vllmops(*lab.words("a", "--json", *words))
    assert answer.code == 2
    assert lab.state("a") is None
