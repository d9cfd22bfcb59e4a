"""NCCL's RAS service: whose it is, what it says, and what two looks at it tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops.collect.machine import nccl_ras
from vllmops.model.pasted_stacks import PastedStacks
from vllmops.model.server_snapshot import RasCapture
from vllmops.rules.stacks.explanation import explain_stacks
from vllmops.rules.stacks.tool_reports import find_ras_evidence

from ...support.ports import free_port

PROGRAM = Path(__file__).parents[2] / "support/nccl_ras.py"
Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Makes a process with a RAS service, of a behaviour and answers."""
    with ExitStack() as stack:

        def start_ras_program(kind: str, *answers: str, **environment: str) -> Any:
            files = [tmp_path / f"{number}" for number, _ in enumerate(answers)]
            for file, answer in zip(files, answers, strict=True):
                file.write_text(answer)
            # NCCL reads its variables before it listens, so the port is chosen before.
            port = free_port()
            text = PROGRAM.read_text().replace('("127.0.0.1", 0)', f'("127.0.0.1", {port})')
            named = {"NCCL_RAS_ADDR": f"localhost:{port}"}
            process = subprocess.Popen(
                [sys.executable, "-c", text, kind, *map(str, files)],
                stdout=subprocess.PIPE,
                env={**os.environ, **named, **environment},
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout
            process.stdout.readline()
            return SimpleNamespace(pid=process.pid)

        yield start_ras_program


def status(*counts: int, aborted: bool = False) -> str:
    """RAS's JSON of one communicator; PID stands for the process that answers."""
    ranks = [
        {
            "rank": rank,
            "pid": "PID",
            "status": {"abort_flag": aborted},
            "collective_counts": {"AllReduce": count},
        }
        for rank, count in enumerate(counts)
    ]
    text = json.dumps({"communicators": [{"hash": "0x1", "size": len(counts), "ranks": ranks}]})
    return text.replace('"PID"', "PID")


MISMATCH = """Communicators ranks have different AllReduce operation counts
  Rank 1 has launched up to operation 911 -- GPU 0 managed by process 285 on node b
  Rank 0 has launched up to operation 860 -- GPU 0 managed by process PID on node a
"""


def collect_captures_twice(process: Any) -> list[RasCapture]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nccl_ras, "ANSWER_S", 60.0)  # on a busy machine
        return [
            found
            for _ in range(2)
            for found in nccl_ras.collect_captures([process], time.monotonic())
        ]


@pytest.mark.parametrize(
    ("answers", "first", "confidence", "subject"),
    [
        ((status(20, 20, 17, 20),), "collective-mismatch", "likely", "rank 2"),
        ((status(20, 20, 17, 20, aborted=True),), "collective-mismatch", "possible", "rank 2"),
        ((status(8, 8, 8, 8),), "gpu-kernel-stuck", "possible", "rank 0"),
        ((status(8, 8, 7, 8),), "gpu-kernel-stuck", "possible", "rank 2"),
    ],
)
def test_counts_that_stand_still(
    start: Start, answers: tuple[str, ...], first: str, confidence: str, subject: str
) -> None:
    (clue,) = find_ras_evidence(collect_captures_twice(start("json", *answers)))
    assert (clue.ids[0], clue.confidence) == (first, confidence)
    assert clue.subject.startswith(subject)
    assert "have stood still" in clue.line


def test_an_answer_about_another_server_does_not_count(start: Start) -> None:
    """NCCL's processes share the port, and the kernel picks one of them."""
    foreign = status(20, 17).replace("PID", str(os.getpid()))
    assert collect_captures_twice(start("json", foreign)) == []


def test_ranks_in_another_order_have_not_moved(start: Start) -> None:
    there, back = (json.loads(status(5, 3).replace("PID", "1")) for _ in range(2))
    back["communicators"][0]["ranks"].reverse()
    captures = [
        RasCapture(at_s=at, pid=1, port=1, text=json.dumps(found))
        for at, found in ((0.0, there), (5.0, back))
    ]
    assert [clue.ids[0] for clue in find_ras_evidence(captures)] == ["collective-mismatch"]


def test_counts_that_move_tell_of_work(start: Start) -> None:
    found = collect_captures_twice(start("json", status(8, 9), status(10, 12)))
    assert len(found) == 2
    assert find_ras_evidence(found) == []
    assert find_ras_evidence(found[:1]) == []


def test_an_older_service_answers_in_text(start: Start) -> None:
    (clue,) = find_ras_evidence(collect_captures_twice(start("old", MISMATCH)))
    assert (clue.ids[0], clue.subject) == ("collective-mismatch", "rank 0")


@pytest.mark.parametrize("kind", ["silent", "other", "endless"])
def test_a_service_that_is_none_is_given_up(start: Start, kind: str) -> None:
    assert list(nccl_ras.collect_captures([start(kind, "")], time.monotonic())) == []


def test_only_ras_services_of_the_process_itself_are_found(start: Start) -> None:
    stranger = start("json", status(1, 1))
    assert nccl_ras.find_service_addresses(stranger.pid)
    assert nccl_ras.find_service_addresses(os.getpid()) == []
    assert nccl_ras.find_service_addresses(start("json", status(1), NCCL_RAS_ENABLE="0").pid) == []
    assert (
        nccl_ras.find_service_addresses(start("json", status(1), NCCL_RAS_ADDR="localhost:1").pid)
        == []
    )


@pytest.mark.parametrize(
    ("value", "port"),
    [
        ("", nccl_ras.PORT),
        ("localhost:4711", 4711),
        ("[::1]:4711", 4711),
        ("x", nccl_ras.PORT),
        (":0", 28028),
    ],
)
def test_the_port_that_is_named(value: str, port: int) -> None:
    assert nccl_ras.find_service_port({"NCCL_RAS_ADDR": value}) == port


@pytest.mark.parametrize("text", ["", "{", "[]", '{"communicators": 3}', "\0" * 99])
def test_answers_without_counts_tell_nothing(text: str) -> None:
    captures = [RasCapture(at_s=at, pid=1, port=1, text=text) for at in (0.0, 5.0)]
    assert find_ras_evidence(captures) == []


def test_it_counts_where_a_server_makes_no_progress() -> None:
    captures = tuple(
        RasCapture(at_s=at, pid=1, port=1, text=status(20, 17, 20).replace("PID", "1"))
        for at in (0.0, 5.0)
    )
    pasted = PastedStacks((), complete=True, ras=captures)
    found = explain_stacks(pasted, {"progress": "frozen"})
    assert (found.verdict, found.findings[0].code) == ("hang", "stack.collective-mismatch")
    assert found.findings[0].subject == "rank 1"
    assert explain_stacks(pasted, {"waiting": "0"}).findings == ()


FINE = """Communicators... (0.00s)

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING      OK
"""


def test_an_answer_that_names_no_process_counts_where_nobody_else_listens(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In text, NCCL names the processes of ranks that are behind alone."""
    process = start("old", FINE)
    found = collect_captures_twice(process)
    assert [capture.text for capture in found] == [FINE, FINE]
    assert find_ras_evidence(found) == []  # no counts: whether they move is not known
    monkeypatch.setattr(nccl_ras, "find_listener_pids", lambda _: {process.pid, None})
    assert collect_captures_twice(process) == []
