"""``vllmops doctor``, with a stand-in for vLLM (see supervision/standin.py)."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllmops.collect.machine.shared_memory import SHM
from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.commands import step_history_view
from vllmops.commands.doctor import render_finding
from vllmops.model.step_recording import Step, StepsRecording
from vllmops.rules.diagnosis import list_checks
from vllmops.rules.stacks.explanation import explain_stacks

from ..support.waiting import until

# What a machine that runs tests has in /dev/shm is none of a server's business.
OWN = ("--skip", "machine")
STACKS = Path(__file__).parents[1] / "rules/stacks"


def codes(answer: Any) -> list[str]:
    return [finding["code"] for finding in answer.data["findings"]]


def test_a_healthy_server_has_no_findings(lab: Any) -> None:
    record = lab.serve("a")
    answer = lab.vllmops("doctor", *OWN, columns=60)
    assert answer.code == 0, answer
    assert "No findings of the selected checks in what could be seen" in answer.out
    assert record.url in answer.out
    assert max(map(len, answer.out.splitlines())) <= 60
    # One line for all three processes, which have no agent for one and the same reason.
    assert answer.out.count("not seen: agent of") == 1
    data = lab.vllmops("doctor", *OWN, "--json").data
    assert (data["findings"], data["stalls"]) == ([], [])
    assert {part["code"] for part in data["unseen"]} == {"agent.absent"}


def test_a_stopped_process_is_named(lab: Any) -> None:
    record = lab.serve("a")
    worker = lab.pid_of(record.processes, "worker")
    lab.kill(worker, signal.SIGSTOP)
    try:
        answer = lab.vllmops("doctor", *OWN, "--json")
        assert (answer.code, codes(answer)) == (1, ["process.stopped"])
        assert lab.vllmops("doctor", *OWN, "--skip", "process").code == 0
        other = lab.vllmops("doctor", "--only", "security.no-api-key", "--json")
        assert (other.code, other.data and other.data["findings"]) == (0, []), other
        shown = lab.vllmops("doctor", *OWN).out
        assert shown.count("kill -CONT") == 1
        assert f"next: kill -CONT {worker} resumes it" in shown
        assert "help: vllmops help process.stopped" in shown
        assert "1. error: a signal stopped a process [process.stopped]" in shown
    finally:
        lab.kill(worker, signal.SIGCONT)


def test_finding_lists_waiting_processes_beside_the_root() -> None:
    text = (STACKS / "worker-stuck-broadcast.cpu.txt").read_text()
    finding = explain_stacks(parse_stacks(text)).findings[0]
    lines = [line.text for line in render_finding(1, finding)]
    assert lines[1:3] == ["where: Worker 4200", "waiting for it: EngineCore 4120"]


def test_doctor_warns_about_an_exposed_server_without_api_key(lab: Any) -> None:
    lab.serve("a", "--host", "0.0.0.0")
    answer = lab.vllmops("doctor", *OWN, "--fail-on", "warning", "--json")
    assert (answer.code, codes(answer)) == (1, ["security.no-api-key"])
    assert lab.vllmops("doctor", *OWN).code == 0


def test_processes_of_a_server_that_is_gone(lab: Any) -> None:
    server = lab.stranger()
    listed = lab.vllmops("ps", "--json").data["instances"]
    engine = next(p["pid"] for row in listed for p in row["processes"] if p["role"] == "engine")
    lab.kill(server.pid)
    until(lambda: server.poll() is not None)
    answer = lab.vllmops("doctor", *OWN, "-t", str(engine), "--json")
    assert "process.orphaned" in codes(answer)
    assert answer.code == 0


def test_every_check_is_listed(lab: Any) -> None:
    listed = lab.vllmops("doctor", "--list", "--json").data["checks"]
    assert [check["code"] for check in listed] == [check.code for check in list_checks()]
    shown = lab.vllmops("doctor", "--list").out
    assert all(check.code in shown for check in list_checks())
    some = lab.vllmops("doctor", "--list", "--only", "stack", "--json").data["checks"]
    assert some
    assert all(check["code"].startswith("stack.") for check in some)


def test_doctor_rejects_invalid_arguments(lab: Any, tmp_path: Path) -> None:
    answer = lab.vllmops("doctor", "--only", "nonsense", "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    assert "vllmops doctor --list" in answer.error["hint"]
    answer = lab.vllmops("doctor", str(tmp_path / "x"), "--canary", "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    assert lab.vllmops("doctor", "--json").error["code"] == "target.none"


def test_a_canary_that_is_not_answered(lab: Any) -> None:
    lab.serve("a")  # it answers GET alone: 501 to the request
    answer = lab.vllmops("doctor", *OWN, "--canary", "--json")
    assert (answer.code, codes(answer)) == (1, ["canary.failed"])


@pytest.fixture
def shm_folder_lock() -> Iterator[None]:
    """No other test process cleans the machine's shared memory meanwhile."""
    folder = os.open(SHM, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    yield
    os.close(folder)


@pytest.mark.root_only
@pytest.mark.usefixtures("shm_folder_lock")
def test_shared_memory_that_is_left_is_named_and_cleaned(lab: Any) -> None:
    lab.serve("a")
    names = [f"psm_{os.getpid():08x}", f"sem.mp-{os.getpid():08x}", f"psm_{os.getpid():08x}_young"]
    other = f"PostgreSQL.{os.getpid()}"
    try:
        for name in (*names, other):
            (SHM / name).touch()
            os.truncate(SHM / name, 1 << 40)  # sparse, and the first of all that are named
        for name in (*names[:2], other):
            os.utime(SHM / name, (0, 0))
        answer = lab.vllmops("doctor", "-t", "a", "--only", "machine.shm-leftovers", "--json")
        (finding,) = answer.data["findings"]
        assert answer.code == 0
        for word in (names[0], names[1], "root", "min old", "no process"):
            assert word in finding["evidence"], finding
        assert other not in finding["evidence"]
        assert (SHM / names[0]).exists()  # to look changes nothing

        used = lab.record("a").segments[0]
        answer = lab.vllmops("doctor", "--clean-shm", "--json")
        assert answer.code == 0
        assert {segment["name"] for segment in answer.data["removed"]} >= set(names[:2])
        (young,) = [segment for segment in answer.data["left"] if segment["name"] == names[2]]
        assert "old" in young["why"]
        left = {path.name for path in SHM.iterdir()}
        assert {names[2], other, used} <= left
        assert not set(names[:2]) & left
    finally:
        for name in (*names, other):
            (SHM / name).unlink(missing_ok=True)


@pytest.mark.usefixtures("shm_folder_lock")
def test_shared_memory_is_cleaned_without_any_server(home: Path, vllmops: Any) -> None:
    answer = vllmops("doctor", "--clean-shm")
    assert answer.code == 0, answer
    assert vllmops("doctor", "--clean-shm", "--canary").code == 2


def test_a_history_fits_a_narrow_terminal() -> None:
    """Its bars get shorter, and stay in proportion."""
    taken = tuple(
        Step(number, 1000.0 + number, 0.01, 1, 1, tokens, 1, 1, 0, 0, 0.5, "ended")
        for number, tokens in enumerate((40, 20, 40))
    )
    recording = StepsRecording(pid=20, read_at=1004.0, steps=taken)
    console = Console(width=80, record=True, file=StringIO())
    console.print(*step_history_view.render_recordings("demo", [recording], []), sep="\n")
    lines = console.export_text().splitlines()
    bars = [line.count("#") for line in lines if "#" in line]
    assert bars[0] == bars[2] > 8
    assert abs(bars[0] - 2 * bars[1]) < 2
    assert "deferred" in lines[1]
