"""``vllmops memory`` on real processes with vLLM's titles, and on saved recordings."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from vllmops.model.memory import MemoryRecordingHead, MemorySample, ProcessMemory
from vllmops.model.roles import Role
from vllmops.observe.memory import plot, recorder

from ..support.commands import Answer, background, run_vllmops
from ..support.waiting import until

Spawn = Callable[..., Any]
QUICK = ("--interval", "0.1", "--duration", "2")
MANY = 20  # samples; what a busy machine is too late for is left out


def begin(*words: object, **env: str) -> subprocess.Popen[str]:
    return background("memory", *map(str, words), env={"COLUMNS": "60", **env})


def run(*words: object) -> Answer:
    return run_vllmops("memory", *map(str, words), env={"COLUMNS": "60"})


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where recordings are kept that nobody asked to save."""
    place = tmp_path / "state"
    monkeypatch.setenv("VLLMOPS_HOME", str(place))
    return place


@pytest.fixture
def engine(spawn: Spawn) -> Any:
    return spawn("VLLM::EngineCore", Role.ENGINE)


def test_by_time_and_the_same_from_the_file(engine: Any, tmp_path: Path) -> None:
    path, drawn = tmp_path / "memory.json", tmp_path / "memory.svg"
    pid = engine.process.pid
    for seconds in (2, 20):  # what a busy machine is too late for is left out
        words = ("--interval", "0.1", "--duration", seconds, "--save", path, "--plot", drawn)
        live = run("record", "-t", pid, *words, "--json")
        assert (live.code, live.err) == (0, "")
        found = live.data
        assert 2 <= len(found["samples"]) <= 10 * seconds
        if not all("agent" in sample["processes"][0] for sample in found["samples"]):
            break
    (first,), *_, (last,) = (sample["processes"] for sample in found["samples"])
    own = psutil.Process(pid).memory_full_info()
    assert first["rss_bytes"] == pytest.approx(own.rss, rel=0.1)
    assert last["uss_bytes"] == pytest.approx(own.uss, rel=0.1)
    # They cost more than RSS, so not each time.
    for figure in ("pss_bytes", "uss_bytes", "agent"):
        measured = [figure in sample["processes"][0] for sample in found["samples"]]
        assert (measured[0], all(measured), measured[-1]) == (True, False, True)
    assert last["agent"]["gc"][0]["collections"] >= first["agent"]["gc"][0]["collections"]
    assert {item["verdict"] for item in found["trends"]} == {"can't say yet"}
    assert found["findings"] == []
    assert drawn.read_text().startswith("<?xml")
    again = run("report", path, "--json")
    assert {**again.data, "plot": str(drawn)} == found
    shown = run("report", path)
    assert max(map(len, shown.out.splitlines())) <= 60
    assert "can't say yet" in shown.out
    assert path.stat().st_mode & 0o777 == 0o600


def test_rounds_of_a_command_that_makes_it_grow(engine: Any, tmp_path: Path) -> None:
    # The load asks the process, by a file, to take 3 MB more; it takes 40 MB in the first round.
    request = tmp_path / "request"
    engine.run("held = []")
    engine.send(
        "import os, time\n"
        f"while not os.path.exists({str(tmp_path / 'end')!r}):\n"
        f"    if os.path.exists({str(request)!r}):\n"
        "        held.append(b'x' * (40 if not held else 3) * 1_000_000)\n"
        f"        os.unlink({str(request)!r})\n"
        "    time.sleep(0.01)"
    )
    code = (
        "import os, sys, time; path = sys.argv[1]; open(path, 'w').close()\n"
        "while os.path.exists(path): time.sleep(0.01)"
    )
    load = shlex.join([sys.executable, "-c", code, str(request)])
    path = tmp_path / "memory.json"
    words = ("-t", engine.process.pid, "--load", load, "--save", path)
    done = run("record", *words)
    (tmp_path / "end").touch()
    assert done.code == 1, done.err
    found = run("report", path, "--json").data
    trend = found["trends"][1]
    assert (trend["verdict"], trend["steps"]) == ("growing", 4)
    assert trend["mean"] == pytest.approx(3_000_000, rel=0.05)
    assert [item["code"] for item in found["findings"]] == ["memory.rss-growing"]
    for word in ("idle", "after R1 (warm-up)", "growth R2-R5", "mean per round", "growing"):
        assert word in done.out
    assert max(map(len, done.out.splitlines())) <= 60
    assert run("report", path, "--tolerance", "10M").code == 0
    assert run("report", path, "--fail-on", "error").code == 1


def test_record_shows_the_samples_taken_before_its_load_failed(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    code = "import os, sys; sys.exit('enough') if os.environ['VLLMOPS_ROUND'] == '3' else 0"
    load = shlex.join([sys.executable, "-c", code])
    done = run("record", "-t", engine.process.pid, "--load", load, "--save", path)
    assert done.code == 1
    assert "after R2" in done.out
    assert "enough" in done.err
    assert [sample["round"] for sample in run("report", path, "--json").data["samples"]] == [
        0,
        1,
        2,
    ]
    envelope = run("record", "-t", engine.process.pid, "--load", load, "--json").envelope
    assert envelope["errors"][0]["code"] == "load.failed"
    assert len(envelope["data"]["samples"]) == 3


def test_interrupted_it_shows_what_there_is(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    recording = begin("record", "-t", engine.process.pid, "--interval", "0.1", "--save", path)
    until(lambda: lines(path) > 4)
    recording.send_signal(signal.SIGINT)
    out, err = recording.communicate(timeout=60)
    assert recording.returncode == 130
    assert "mean per hour" in out
    assert err.endswith("error: interrupted\n")
    report = run("report", path)
    assert report.code == 0
    assert "cut short: interrupted" in report.out


def test_killed_it_has_kept_what_it_had(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    recording = begin("record", "-t", engine.process.pid, "--interval", "0.1", "--save", path)
    until(lambda: lines(path) > 4)
    recording.kill()
    recording.communicate()
    with path.open("ab") as file:
        file.write(b'{"type":"sample","taken')
    report = run("report", path, "--json")
    assert report.code == 0
    assert len(report.data["samples"]) >= 4
    assert "killed" in report.data["cut_short"]


def test_a_process_that_ends_ends_the_recording(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    recording = begin("record", "-t", engine.process.pid, "--interval", "0.1", "--save", path)
    until(lambda: lines(path) > 4)
    engine.popen.kill()
    out, err = recording.communicate(timeout=60)
    assert recording.returncode == 1
    assert f"engine {engine.process.pid} ended" in " ".join(err.split())
    assert "mean per hour" in out
    assert run("report", path).code == 0


def test_a_stopped_process_is_still_measured(engine: Any, patience: pytest.MonkeyPatch) -> None:
    patience.undo()
    os.kill(engine.process.pid, signal.SIGSTOP)
    done = run("record", "-t", engine.process.pid, "--interval", "0.2", "--duration", "3")
    os.kill(engine.process.pid, signal.SIGCONT)
    assert done.code == 0
    assert "did not answer" in " ".join(done.out.split())
    assert "MiB" in done.out


def test_two_at_once(engine: Any) -> None:
    both = [begin("record", "-t", engine.process.pid, *QUICK, "--json") for _ in range(2)]
    for item in both:
        out, err = item.communicate(timeout=60)
        assert (item.returncode, err) == (0, "")
        assert 2 <= len(json.loads(out)["data"]["samples"]) <= MANY


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--rounds", "3"), "usage"),
        (("--rounds", "3", "--interval", "1", "--load", "text"), "usage"),
        (("--interval", "2", "--duration", "1"), "usage"),
        (("--tolerance", "much"), "usage"),
        (("--tolerance", "-1"), "usage"),
        (("--plot", "x.pdf"), "plot.format"),
    ],
)
def test_usage(vllmops: Any, words: tuple[str, ...], code: str) -> None:
    answer = vllmops("memory", "record", *words, "--json")
    assert (answer.code, answer.error["code"]) == (2, code)
    assert answer.error["hint"]


def test_a_tolerance_is_a_size(vllmops: Any) -> None:
    error = vllmops("memory", "record", "--tolerance", "5x", "--json").error
    assert "'5x' is not a size; write it as 500K, 2M or 1G" in error["message"]


def test_record_reports_files_that_are_not_writable(engine: Any, tmp_path: Path) -> None:
    target = ("-t", str(engine.process.pid))
    answer = run("record", *target, "--save", tmp_path / "no" / "file")
    assert (answer.code, answer.out) == (1, "")
    assert "can't be written" in " ".join(answer.err.split())
    for name in (tmp_path / "no" / "x.png", tmp_path):
        path = name if name.suffix else tmp_path / "dir.png"
        if not name.suffix:
            path.mkdir()
        answer = run("record", *target, "--plot", path)
        assert (answer.code, answer.out) == (1, "")
        assert "--plot" in answer.err


def test_without_matplotlib(vllmops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is installed here, so it is made not to be found.
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    answer = vllmops("memory", "record", "--plot", "x.png", "--json")
    assert (answer.code, answer.error["code"]) == (1, "plot.no-matplotlib")
    assert answer.error["hint"] == "pip install 'vllmops-cli[plot]'"


def encode_recording(*pids: list[int]) -> bytes:
    """A recording with a sample of the processes of each list."""
    head = MemoryRecordingHead(server="s", started_at=1.0)
    samples = [
        MemorySample(
            taken_at=float(at),
            processes=[ProcessMemory(role="api", pid=pid, rss_bytes=1) for pid in each],
        )
        for at, each in enumerate(pids)
    ]
    return b"".join(msgspec.json.encode(one) + b"\n" for one in (head, *samples))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "file.not-a-snapshot"),
        (b"nonsense\n", "file.not-a-snapshot"),
        (b'{"kind":"caches","schema":1,"server":"s","samples":[]}', "file.other-kind"),
        (b'{"kind":"memory","schema":99}\n', "file.newer"),
        (b'{"kind":"memory","schema":1,"server":"s","started_at":1}\n', "memory.empty"),
        (
            b'{"kind":"memory","schema":1,"server":"s","started_at":1}\nx\n{}\n',
            "file.not-a-snapshot",
        ),
        (encode_recording([1], [1, 2]), "file.not-a-snapshot"),
        (encode_recording([1], [2]), "file.not-a-snapshot"),
        (encode_recording([], []), "file.not-a-snapshot"),
        (encode_recording([1], [1]).replace(b"api", b"engine", 1), "file.not-a-snapshot"),
    ],
)
def test_files_that_are_no_recording(
    vllmops: Any, tmp_path: Path, content: bytes, code: str
) -> None:
    path = tmp_path / "memory.json"
    path.write_bytes(content)
    answer = vllmops("memory", "report", str(path), "--json")
    assert answer.error["code"] == code
    assert vllmops("memory", "report", str(tmp_path / "none"), "--json").code == 1


def test_a_file_that_can_not_grow_is_told_and_the_recording_goes_on(
    engine: Any, tmp_path: Path
) -> None:
    path, other = tmp_path / "memory.json", tmp_path / "other.json"
    words = ("record", "-t", str(engine.process.pid), *QUICK, "--json", "--save")
    assert run(*words, other).code == 0
    head, first, second, *_ = other.read_bytes().splitlines(keepends=True)
    # Not a full disk: the last page of a file still takes a dozen samples there, and a busy machine
    # may take no more than those.
    most = len(head) + len(first) + len(second) // 2

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    done = run_vllmops("memory", *words, str(path), before=small)
    envelope = done.envelope
    assert done.code == 1
    assert "File too large" in envelope["errors"][0]["message"]
    kept = run("report", path, "--json").data["samples"]
    assert 1 <= len(kept) < len(envelope["data"]["samples"])


def test_recordings_of_what_is_gone_do_not_pile_up(engine: Any, state: Path) -> None:
    place = state / "memory"
    place.mkdir(parents=True)
    # Numbers that no process has; one has a new owner.
    gone = [*range(1 << 22, (1 << 22) + recorder.KEPT + 2), os.getpid()]
    (state / "instances" / str(1 << 23)).mkdir(parents=True)
    others = ["demo", str(1 << 23), str(os.getppid())]
    for age, name in enumerate([*gone, *others]):
        path = place / f"{name}.jsonl"
        path.touch()
        at = time.time() if name in others else 1e9 - age
        os.utime(path, (at, at))
    label = str(engine.process.pid)
    assert run("record", "-t", label, "--interval", "0.1", "--duration", "0.3").code == 0
    left = {path.stem for path in place.glob("*.jsonl")}
    assert left == {label, *others, *map(str, gone[: recorder.KEPT])}


def test_the_newest_recording_is_kept_for_doctor_and_bundle(engine: Any, state: Path) -> None:
    label, began = str(engine.process.pid), engine.process.create_time
    assert recorder.load_newest_recording(label, began) is None
    words = ("-t", label, "--interval", "0.1", "--duration")
    assert run("record", *words, "0.3").code == 0
    first = recorder.load_newest_recording(label, began)
    assert first is not None
    assert len(first.samples) >= 2
    assert first.end is not None
    assert run("record", *words, "0.2").code == 0
    second = recorder.load_newest_recording(label, began)
    assert second is not None
    assert second.head.started_at > first.head.started_at
    # Of a server that started later, which only has the same name, it is none.
    assert recorder.load_newest_recording(label, second.head.started_at + 60) is None
    kept = recorder.get_recording_path(label)
    assert kept.is_relative_to(state)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert run("report", kept).code == 0
    kept.write_bytes(b"broken")
    assert recorder.load_newest_recording(label, began) is None


def test_record_succeeds_where_its_recording_cannot_be_stored(engine: Any, state: Path) -> None:
    state.mkdir()
    (state / "memory").touch()
    done = run("record", "-t", engine.process.pid, "--interval", "0.1", "--duration", "0.2")
    assert done.code == 0
    assert "not kept for doctor and bundle" in " ".join(done.err.split())
    assert "can't say yet" in done.out


def test_a_full_disk_does_not_fail_a_recording_that_nobody_asked_to_save(
    spawn: Spawn, home: Path, full_disk: Callable[[], None]
) -> None:
    engine = spawn("VLLM::EngineCore", Role.ENGINE, home=home)
    # A file that has more than a page of memory.
    words = ("-t", engine.process.pid, "--interval", "0.1", "--duration", "8")
    recording = begin("record", *words)
    path = home / "memory" / f"{engine.process.pid}.jsonl"
    until(lambda: lines(path) > 4)
    full_disk()
    out, err = recording.communicate(timeout=60)
    assert recording.returncode == 0
    assert "not kept for doctor and bundle" in " ".join(err.split())
    assert "mean per hour" in out


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("taken_at", "1e308"),
        ("taken_at", "-1e308"),
        ("rss_bytes", f"1{'0' * 320}"),
        ("tolerance_bytes", f"1{'0' * 320}"),
        ("finished_alive", f"1{'0' * 320}"),
    ],
    ids=["late", "early", "size", "tolerance", "requests"],
)
def test_a_number_that_no_memory_has_is_damage(
    vllmops: Any, tmp_path: Path, place: str, value: str
) -> None:
    requests = '"requests":{"alive":1,"finished_alive":4,"known":1,"late_s":0.0}'
    agent = f'"agent":{{{requests}}}'
    head = '{"kind":"memory","schema":1,"server":"s","started_at":0.0,"tolerance_bytes":5}'
    lines = [
        f'{{"type":"sample","taken_at":{at}.5,"processes":'
        f'[{{"role":"engine","pid":1,"rss_bytes":{at * 1000},{agent}}}]}}'
        for at in range(1, 40)
    ]
    file = tmp_path / "file"
    file.write_text("\n".join([head, *lines, ""]))
    assert vllmops("memory", "report", str(file), "--json").data["trends"]
    spoilt = [re.sub(rf'(?<="{place}":)[\d.]+', value, line) for line in (head, lines[7])]
    file.write_text("\n".join([spoilt[0], *lines[:7], spoilt[1], *lines[8:], ""]))
    for words in ((), ("--json",)):
        shown = vllmops("memory", "report", str(file), *words)
        assert shown.code == 1
        assert "damaged" in shown.out + shown.err
