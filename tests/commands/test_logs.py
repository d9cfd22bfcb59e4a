"""``vllmops logs``, with a stand-in for vLLM (see supervision/standin.py)."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vllmops.servers.logs import rotate_log
from vllmops.servers.record import InstanceFolder

from ..support.commands import background
from ..support.extent import long
from ..support.waiting import until


def test_logs_selects_lines_by_process_and_count(lab: Any) -> None:
    lab.serve("a")
    path = InstanceFolder("a").server_log
    for last in ("init engine", "startup complete"):  # later it says no more of its own
        until(lambda last=last: last in path.read_text())  # type: ignore[misc]
    path.write_text("".join(f"(Worker pid=1) INFO 11-20 19:05:14 [a.py:1] {n}\n" for n in range(9)))
    assert rotate_log(path, limit=1, keep=3)
    with path.open("a") as file:
        file.write("(EngineCore pid=2) INFO 11-20 19:05:14 [a.py:1] [red]x\n")
        file.write("nobody's\n(APIServer pid=3) INFO 11-20 19:05:14 [a.py:1] " + "y" * 300 + "\n")
        file.write("half a li")
    everything = [
        line for line in lab.vllmops("logs", "a").out.splitlines() if "GET /health" not in line
    ]
    assert len(everything) == 12
    assert everything[0].endswith("] 0")
    assert everything[-1].endswith("y" * 300)
    assert "[red]x" in everything[9]
    engine = lab.vllmops("logs", "a", "--process", "engine").out.splitlines()
    assert engine == [everything[9]]
    worker = lab.vllmops("logs", "a", "--process", "worker", "-n", "2").out.splitlines()
    assert worker == everything[7:9]
    assert lab.vllmops("logs", "a", "-n", "0").out == ""
    data = lab.vllmops("logs", "--process", "worker", "--json").data
    assert (data["name"], data["file"]) == ("a", str(path))
    assert data["lines"] == everything[:9]


def test_the_last_lines_are_read_from_the_end(lab: Any) -> None:
    """A log and its parts may have more bytes than there is memory."""
    lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    until(lambda: not InstanceFolder("a").is_supervised())
    path = InstanceFolder("a").server_log
    with path.with_name("server.log.1").open("ab") as file:
        file.truncate(1 << 40)
        file.write(b"\nthe first\nhalf of")
    path.write_text(" the second\n(EngineCore pid=2) INFO 11-20 19:05:14 [a.py:1] x\nthe last")
    seen = lab.vllmops("logs", "a", "-n", "4").out.splitlines()
    assert [line[:11] for line in seen] == ["the first", "half of the", "(EngineCore", "the last"]
    assert lab.vllmops("logs", "a", "-n", "1", "--process", "engine").out.splitlines() == seen[2:3]


def test_logs_shows_the_log_of_a_failed_server(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill(record.session)
    until(lambda: lab.state("a") == "failed")
    for words in ((), ("-f",)):
        answer = lab.vllmops("logs", "a", *words)
        assert answer.code == 0
        assert "(EngineCore" in answer.out


def test_the_last_line_of_one_that_is_over_may_have_no_end(lab: Any, tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.write_text("half of it is missing\nSegmentation fault in libx.so")
    answer = lab.vllmops(*lab.words("a", "--detach", says=str(said), exits=3))
    assert answer.code == 1
    assert lab.record("a").failure.cause.endswith("Segmentation fault in libx.so")
    for words in ((), ("-f",), ("-n", "1")):
        shown = lab.vllmops("logs", "a", *words).out.splitlines()
        assert shown[-1] == "Segmentation fault in libx.so"


def test_following_over_a_rotation_to_the_end(lab: Any) -> None:
    lab.serve("a")
    path = InstanceFolder("a").server_log
    follower = background("logs", "a", "-f")
    assert follower.stdout
    words: list[str] = []
    reader = threading.Thread(target=words.extend, args=(follower.stdout,))
    reader.start()

    def write(line: str) -> None:
        with path.open("a") as file:
            file.write(f"{line}\n")

    write("before")
    until(lambda: "before\n" in words)
    for number in range(20):  # faster than it looks
        write(f"line {number:02}")
        if number % 5 == 4:
            rotate_log(path, limit=1, keep=50)
            until(lambda: f"line {number:02}\n" in words)  # noqa: B023 - called at once
    lab.vllmops("stop", "a", "--force")
    assert follower.wait(60) == 0
    reader.join(60)
    assert "before\n" in words
    assert [line for line in words if line.startswith("line")] == [
        f"line {number:02}\n" for number in range(20)
    ]
    assert any("shutdown triggered" in line for line in words)  # its last words, too


def test_following_is_ended_by_ctrl_c(lab: Any) -> None:
    lab.serve("a")
    follower = background("logs", "a", "-f")
    assert follower.stdout
    follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=60)
    assert (follower.returncode, err) == (130, "")  # it is the only way to end it
    assert lab.state("a") == "ready"


def test_a_reader_that_goes_away(lab: Any) -> None:
    lab.serve("a")
    with InstanceFolder("a").server_log.open("a") as file:
        file.write("x\n" * 200_000)
    command = f"{sys.executable} -m vllmops logs a | head -n 1"
    answer = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stderr == ""
    assert answer.stdout.count("\n") == 1


def test_logs_explains_a_missing_log(lab: Any) -> None:
    assert lab.vllmops("logs", "nobody", "--json").error["code"] == "target.unknown"
    server = lab.stranger()
    answer = lab.vllmops("logs", str(server.pid), "--json")
    assert (answer.code, answer.error["code"]) == (1, "logs.none")
    assert f"/proc/{server.pid}/fd/1" in answer.error["hint"]
    answer = lab.vllmops("logs", "x", "-f", "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    assert lab.vllmops("logs", "x", "--process", "nonsense").code == 2


def test_the_log_is_rotated_while_it_serves(lab: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLMOPS_LOG_MAX_BYTES", "2000")
    lab.serve("a")
    path = InstanceFolder("a").server_log
    with path.open("a") as file:
        for _ in range(3):
            file.write("x" * 3000 + "\n")
            file.flush()
            until(lambda: path.stat().st_size < 2000)
    assert path.with_name("server.log.1").exists()
    assert lab.vllmops("logs", "a").out.count("x" * 3000) == 3


@long
@pytest.mark.parametrize("columns", [100, None])
def test_a_log_moves_no_cursor(lab: Any, columns: int | None) -> None:
    lab.serve("a")
    with InstanceFolder("a").server_log.open("a") as file:
        file.write("\x1b[32mgreen\x1b[0m\ttab \x1b]0;title\x07 10%\r90%\r\n")
    answer = lab.vllmops("logs", "a", columns=columns)
    assert "green\ttab ␛]0;title␇ 10%\n90%\n" in answer.out.replace("   tab", "\ttab")
    lines = lab.vllmops("logs", "a", "--json").data["lines"]
    (line,) = [line for line in lines if "green" in line]  # the server writes, too
    assert line == "\x1b[32mgreen\x1b[0m\ttab \x1b]0;title\x07 10%\r90%\r"
