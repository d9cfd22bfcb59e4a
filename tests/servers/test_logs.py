"""A server's log: stages and causes out of real logs, and rotation under a process that writes."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops.model.roles import Role
from vllmops.servers import logs
from vllmops.servers.logs import (
    STAGES,
    LogRotation,
    LogTail,
    find_failure,
    parse_line_role,
    parse_stage,
    rotate_log,
    start_new_log,
)

LOGS = Path(__file__).with_name("logs")


def lines(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


def test_the_stages_of_a_start_come_in_order() -> None:
    seen = [found for line in lines("ready") if (found := parse_stage(line))]
    assert list(dict.fromkeys(seen)) == ["loading weights", "profiling", "warming up"]
    assert [STAGES.index(one) for one in seen] == sorted(STAGES.index(one) for one in seen)


def test_on_a_gpu_it_compiles_meanwhile() -> None:
    """vLLM 0.26 with torch.compile, CUDA graphs and its second model runner."""
    seen = [found for line in lines("gpu-ready") if (found := parse_stage(line))]
    assert list(dict.fromkeys(seen)) == [
        *("loading weights", "compiling", "profiling", "warming up"),
    ]


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        (
            "ValueError: Free memory on device cuda:0 (119.51/139.8 GiB) on startup is less than"
            " desired GPU memory utilization (0.98, 137.0 GiB). Decrease GPU memory utilization or"
            " reduce GPU memory used by other processes.",
            "nvidia-smi",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (32768), (0.75"
            " GiB KV cache is needed, which is larger than the available KV cache memory (0.06"
            " GiB). Based on the available memory, the estimated maximum model length is 2720.",
            "--max-model-len",
        ),
    ],
)
def test_memory_failure_hint_names_the_remedy(cause: str, hint: str) -> None:
    prefix = "(EngineCore pid=7) ERROR 11-26 04:45:33 [core.py:1301] "
    found = find_failure([f"{prefix}Traceback (most recent call last):", f"{prefix}{cause}"])
    assert found is not None
    assert hint in found.hint


# From runs of vLLM 0.32 with the frames in the middle left out; two are written after the
# messages that PyTorch and torchvision print, since neither can be had without a GPU's builds.
@pytest.mark.parametrize(
    ("log", "cause", "process", "hint"),
    [
        ("unknown-argument", "unrecognized arguments: --frobnicate", "", "--help=all"),
        (
            "not-a-model",
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form",
            "",
            "config.json",
        ),
        (
            "worker-assertion",
            "AssertionError: num_heads (3) is not divisible by num_kv_heads (4)",
            "Worker",
            "",
        ),
        (
            "pydantic",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
            " Value error, User-specified max_model_len (99999999) is greater than",
            "",
            "",
        ),
        ("out-of-memory", "torch.OutOfMemoryError: CUDA out of memory.", "", "--max-model-len"),
        (
            "torchvision",
            "RuntimeError: operator torchvision::nms does not exist",
            "",
            "pip uninstall -y torchvision",
        ),
    ],
)
def test_the_true_cause_of_a_failure(log: str, cause: str, process: str, hint: str) -> None:
    found = find_failure(lines(log))
    assert found
    assert found.cause.startswith(cause)
    assert "type=value_error" not in found.cause
    assert hint in found.hint
    if process:
        assert found.process == process


def test_a_start_that_works_has_no_cause() -> None:
    assert find_failure(lines("ready")) is None  # although it warns with a traceback
    assert find_failure([]) is None


def test_a_plugin_that_does_not_load_is_not_the_cause() -> None:
    assert find_failure(lines("unknown-argument")[:10]) is None
    engine = [line for line in lines("worker-assertion") if "__init__.py:72" in line]
    assert len(engine) > 10
    assert find_failure(engine) is None


def test_exception_at_interpreter_exit_is_not_the_cause() -> None:
    said = (
        "Exception ignored in: <function AsyncLLM.__del__ at 0x7f70be5f09a0>\n"
        "Traceback (most recent call last):\n"
        '  File "/venv/vllm/v1/engine/async_llm.py", line 298, in shutdown\n'
        "TypeError: 'NoneType' object is not callable\n"
    )
    assert find_failure(said.splitlines()) is None


def test_complaint_of_the_tracker_of_shared_memory_is_no_cause() -> None:
    """It is told of segments that a process was killed with, and another one removed."""
    code = "import multiprocessing.resource_tracker as t; t.unregister('/psm_1', 'shared_memory')"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, stderr=subprocess.PIPE, text=True
    )
    complaint = ran.stderr.splitlines()
    assert complaint[-1] == "KeyError: '/psm_1'"
    assert find_failure(complaint) is None
    found = find_failure([*lines("worker-assertion"), *complaint])
    assert found
    assert "num_heads" in found.cause


def test_exception_while_vllm_kills_its_processes_is_not_the_cause() -> None:
    says = "(APIServer pid=7) ERROR 11-23 01:50:00 [core.py:1] "
    stumble = [
        f"{says}Traceback (most recent call last):",
        f'{says}  File "system_utils.py", line 1, in kill_process_tree',
        f"{says}psutil.ZombieProcess: PID still exists but it's a zombie (pid=9)",
    ]
    assert find_failure(stumble) is None
    found = find_failure([*lines("worker-assertion"), *stumble])
    assert found
    assert "num_heads" in found.cause


def test_an_exception_without_a_message_is_a_cause_whatever_ends_its_line() -> None:
    """As vLLM 0.32 logs a worker's that is in the middle of a message."""
    head = "(Worker_DP0 pid=7) ERROR 11-23 04:10:27 [multiproc_executor.py:1063] "
    raised = ("Traceback (most recent call last):\r", "    raise it\r", "NotImplementedError\r", "")
    found = find_failure([head + text for text in raised])
    assert found
    assert (found.cause, found.process) == ("NotImplementedError", "Worker_DP0")


def test_an_echo_counts_where_nothing_else_was_said() -> None:
    words = lines("worker-assertion")[-8:]
    assert find_failure(words) is None
    found = find_failure(words, echoes=True)
    assert found
    assert found.cause.startswith("RuntimeError: Engine core initialization failed")


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("(APIServer pid=1) INFO 11-20 19:05:14 [a.py:1] x", Role.API),
        ("(ApiServer_1 pid=1) INFO 11-20 19:05:14 [a.py:1] x", Role.API),
        ("(EngineCore_DP0 pid=1) INFO 11-20 19:05:14 [a.py:1] x", Role.ENGINE),
        ("(Worker_TP1 pid=1) INFO 11-20 19:05:14 [a.py:1] x", Role.WORKER),
        ("(VllmWorker-0 pid=1) ERROR 11-20 19:05:14 [a.py:1] x", Role.WORKER),
        ('INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK', Role.API),
        ("Triton is installed, but doesn't include CPU backend.", None),
        ("", None),
    ],
)
def test_role_is_parsed_from_a_log_line(line: str, role: Role | None) -> None:
    assert parse_line_role(line) is role


def test_a_tail_gives_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    tail = LogTail(path)
    assert tail.read_new_lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.read_new_lines() == ["one"]
    with path.open("ab") as file:
        file.write("o\nü\n".encode() + b"\xff\n")
    assert tail.read_new_lines() == ["two", "ü", "\ufffd"]


def test_a_tail_gives_the_lines_before_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 7)
    path = tmp_path / "server.log"
    lines = ["", "a", "two words", "", "much longer than a chunk is", "ü" * 9, "b"]
    assert list(LogTail(path).read_backwards()) == []
    with path.open("a") as server:
        for number, letter in enumerate("\n".join(lines)):
            print(letter, end="", file=server, flush=True)
            if number % 20 == 19:
                assert rotate_log(path, limit=1, keep=9)
        assert list(LogTail(path).read_backwards(ended=True)) == lines[::-1]
        tail = LogTail(path)
        assert list(tail.read_backwards()) == lines[-2::-1]
        print(" and more", file=server, flush=True)
        assert tail.read_new_lines() == ["b and more"]


@pytest.mark.parametrize("after", ["c", "c" * 200], ids=["shorter", "longer"])
def test_a_tail_loses_nothing_over_a_rotation(tmp_path: Path, after: str) -> None:
    path = tmp_path / "server.log"
    path.write_text("a\n" * 20)
    tail = LogTail(path)
    assert len(tail.read_new_lines()) == 20
    with path.open("a") as server:
        print("b", file=server, flush=True)
        assert rotate_log(path, limit=10, keep=3)
        print(after, file=server, flush=True)
        assert tail.read_new_lines() == ["b", after]


def test_rotation_keeps_so_many_and_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    assert not rotate_log(path, limit=10, keep=2)  # there is none
    with path.open("a") as server:
        for number in range(4):
            assert not rotate_log(path, limit=10, keep=2)
            print(f"{number}" * 20, file=server, flush=True)
            assert rotate_log(path, limit=10, keep=2)
    assert path.read_bytes() == b""
    found = {item.name: item.read_text()[:1] for item in tmp_path.iterdir() if item != path}
    assert found == {"server.log.1": "3", "server.log.2": "2"}


# It writes until a file is gone, and says which line was the last.
WRITER = """
import os, sys, time
log, number = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), 0
while number % 100 or os.path.exists(sys.argv[2]):
    os.write(log, b"%08d\\n" % number)
    number += 1
    if number % 100 == 0:
        time.sleep(0.001)
os.write(log, b"%08d\\n" % number)  # after the last rotation
print(number)
"""


def test_rotation_under_a_process_that_appends(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.touch()
    go_on = tmp_path / "go-on"
    go_on.touch()
    words = [sys.executable, "-S", "-c", WRITER, str(path), str(go_on)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        rotations = 0
        while rotations < 8:
            rotations += rotate_log(path, limit=20_000, keep=50)
            time.sleep(0.01)
        go_on.unlink()
        last = int(writer.communicate()[0])
    parts = [path, *sorted(tmp_path.glob("server.log.*"), key=lambda p: int(p.suffix[1:]))]
    assert len(parts) > 3
    # Who reads while another process writes may see half a line, where it crosses a page.
    lines = [line for part in reversed(parts) for line in part.read_text().split()]
    found = [int(line) for line in lines if len(line) == 8]
    assert len(lines) - len(found) < len(parts)
    # What is written between copying and truncating is lost, and no more.
    assert found == sorted(set(found))
    assert found[0] == 0
    assert found[-1] == last
    gaps = sum(after - before > 1 for before, after in pairwise(found))
    assert gaps <= rotations


def test_a_full_disk_keeps_what_there_is(home: Path, full_disk: Callable[[], None]) -> None:
    path = home / "server.log"
    path.write_text("x" * 50_000)
    full_disk()
    with pytest.raises(OSError, match="No space"):
        rotate_log(path, limit=10, keep=3)
    assert path.stat().st_size == 50_000
    assert {item.name for item in home.iterdir()} == {"server.log", "filler"}
    (home / "filler").unlink()
    assert rotate_log(path, limit=10, keep=3)
    assert (home / "server.log.1").stat().st_size == 50_000


def test_a_disk_that_fills_while_it_copies(
    home: Path, full_disk: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "server.log"
    path.write_text("x" * 60_000)
    logs.get_part_path(path, 1).write_text("older")
    logs.get_part_path(path, 2).write_text("oldest")
    full_disk()
    # Whoever fills it after the look is not to be had at that moment: the look is told otherwise.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    with pytest.raises(OSError, match="No space"):
        rotate_log(path, limit=10, keep=3)
    assert sizes(home) == {"server.log": 60_000, "server.log.1": 5, "server.log.2": 6}


def sizes(home: Path) -> dict[str, int]:
    return {item.name: item.stat().st_size for item in home.iterdir() if "filler" not in item.name}


def test_on_a_full_disk_hardly_anything_is_written(
    home: Path, full_disk: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "server.log"
    path.write_text("x" * 50_000)
    rotation = LogRotation(path, limit=10, keep=3)
    full_disk()
    # Room, but not enough: what was copied so far would be written and thrown away at each look.
    with (home / "filler").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 40_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    tried = []
    copy = shutil.copyfileobj

    def count_copy(*words: Any) -> None:
        tried.append(1)
        copy(*words)

    monkeypatch.setattr(shutil, "copyfileobj", count_copy)
    spoken = [rotation.rotate_if_due() for _ in range(100)]
    assert len(tried) == 1
    assert [item for item in spoken if item] == [
        "server.log is not rotated: No space left on device"
    ]
    (home / "filler").unlink()
    rotation.due = 0.0
    assert rotation.rotate_if_due() == ""
    assert sizes(home) == {"server.log": 0, "server.log.1": 50_000}


@pytest.mark.parametrize("after", ["copy", "shift", "replace"])
def test_a_rotation_that_was_killed(tmp_path: Path, after: str) -> None:
    """Whatever was done before the kill, the next supervisor finds each line once."""
    path = tmp_path / "server.log"
    parts = {path: "3\n", logs.get_part_path(path, 1): "2\n", logs.get_part_path(path, 2): "1\n"}
    for item, text in parts.items():
        item.write_text(text)
    logs.get_copy_path(path).write_text("3\n")
    if after != "copy":
        logs.shift_parts(path, 3)
    if after == "replace":
        logs.get_copy_path(path).replace(logs.get_part_path(path, 1))
    with path.open("a") as server:
        print("4", file=server, flush=True)
        rotation = LogRotation(path, limit=1, keep=3)
        found = {item.name: item.read_text() for item in tmp_path.iterdir()}
        assert found == {"server.log": "3\n4\n", "server.log.1": "2\n", "server.log.2": "1\n"}
        assert rotation.rotate_if_due() == ""
        print("5", file=server, flush=True)
    assert logs.read_last_lines(path, lines=9, limit=1000) == ["1", "2", "3", "4", "5"]


def test_a_new_run_puts_the_old_log_aside(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    start_new_log(path)
    path.write_text("old")
    logs.get_part_path(path, 1).write_text("older")
    logs.get_part_path(path, 2).write_text("oldest")
    start_new_log(path)
    assert {item.name: item.read_text() for item in tmp_path.iterdir()} == {
        "server.log.previous": "old"
    }


@pytest.mark.parametrize("number", ["9", "40", "999", "9" * 5000])
def test_a_signal_without_a_name_does_not_break_the_search_for_a_cause(number: str) -> None:
    """The log has what clients send, too."""
    line = f"INFO: 'Worker proc w died unexpectedly (exit code: -{number})'"
    found = find_failure([line])
    known = {"9": "w was killed by SIGKILL", "40": "w was killed by signal 40"}
    assert number not in known or (found and found.cause == known[number])


def test_a_node_that_ray_has_lost_has_a_name() -> None:
    line = (
        "(EngineCore pid=7) (raylet) The node with node id: 2c2e57 and address: 192.0.2.2 and node"
        " name: gpu-7 has been marked dead because the detector has missed too many heartbeats"
    )
    assert logs.find_lost_node(["INFO: started\n", line]) == "gpu-7"
    assert logs.find_lost_node(["INFO: started\n"]) is None
