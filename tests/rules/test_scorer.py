"""The scorer of labelled texts: the first cause, the root and the phase, each by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.diagnosis import Case, cases, report

TEXT = """\
Process 9: VLLM::Worker_TP1
Thread 9 (active): "MainThread"
    synchronize (torch/cuda/streams.py:231)
    forward (vllm/model_executor/models/qwen3.py:200)
    execute_model (vllm/v1/worker/gpu_worker.py:640)
    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:930)
"""


def folder(path: Path, *columns: str) -> Path:
    (path / "one.txt").write_text(TEXT)
    (path / "INDEX.tsv").write_text("\t".join(("one", "own", "text", *columns)) + "\n")
    return path


def case(path: Path, *columns: str) -> Case:
    (found,) = cases(folder(path, *columns))
    return found


@pytest.mark.parametrize(
    ("root", "right"),
    [
        ("Worker_TP1", True),
        ("TP1", True),
        ("TP0|TP1", True),
        ("TP", False),
        ("TP1,TP2", False),
        ("Worker_TP0", False),
    ],
)
def test_the_root_is_all_the_processes_and_no_other(tmp_path: Path, root: str, right: bool) -> None:
    assert case(tmp_path, "a kernel", "gpu-kernel-stuck", root, "-").is_root_right is right


@pytest.mark.parametrize(
    ("phase", "right"), [("forward", True), ("draft|forward", True), ("sample", False)]
)
def test_the_phase(tmp_path: Path, phase: str, right: bool) -> None:
    assert case(tmp_path, "a kernel", "gpu-kernel-stuck", "-", phase).is_phase_right is right


def test_root_and_phase_may_be_missing(tmp_path: Path) -> None:
    found = case(tmp_path, "a kernel (accept host-sync-wait)", "gpu-kernel-stuck")
    assert (found.root, found.phase) == ((), frozenset())
    assert found.is_within(1)


def test_the_report_names_what_is_wrong(tmp_path: Path) -> None:
    said: list[str] = []
    path = folder(tmp_path, "a kernel", "collective-stall", "Worker_TP0", "sample")
    assert report(path, said.append)
    text = "\n".join(said)
    assert "no: one: collective-stall; answers gpu-kernel-stuck" in text
    assert "root: one: Worker_TP0; answers Worker_TP1 9" in text
    assert "phase: one: sampling; answers running the model" in text
    assert "root: 0/1 = 0.00" in text
