"""Every signature on its samples, in every form; and what is no hang is never called one.

Each form is tried with a few samples; ``VLLMOPS_TEST_ALL=1`` tries it with all of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.model.findings import Severity
from vllmops.model.pasted_stacks import PastedStacks
from vllmops.model.stacks import StacksGap
from vllmops.rules.stacks.explanation import Explanation, explain_stacks
from vllmops.rules.stacks.signatures import load_signatures
from vllmops.rules.stacks.wait_chains import load_hang_tables as answer_table

from .paste_forms import FORMS, WITHOUT_GIL, WITHOUT_LOG, WITHOUT_NATIVE, parts

SAMPLES = sorted((Path(__file__).parent / "stacks").glob("*.txt"))
IDS = [
    "mm-cache-eviction-spin", "input-thread-dead", "schedule-livelock", "admission-deadlock",
    "kv-connector-wait", "gpu-kernel-stuck", "launch-queue-full", "worker-stuck-broadcast",
    "lost-broadcast", "broadcast-writer-blocked", "structured-output-spin", "grammar-compile",
    "tool-parser-regex", "engine-core-missing", "jit-or-lock", "startup-capture",
    "dp-collective-mismatch", "idle-spin-normal", "gil-held", "collective-stall",
    "collective-mismatch", "host-sync-wait", "module-load-stuck", "scheduler-python-spin",
    "weight-load-io", "thread-lock-wait", "api-loop-blocked",
]  # fmt: skip


def answer(text: str) -> Explanation:
    return explain_stacks(parse_stacks(text))


def answers(found: Explanation) -> list[tuple[str, str]]:
    return [(finding.code, finding.confidence) for finding in found.findings]


def name(sample: Path) -> str:
    return sample.stem


def sample(stem: str) -> str:
    return (Path(__file__).parent / "stacks" / f"{stem}.txt").read_text()


def test_the_catalogue() -> None:
    assert [signature.id for signature in load_signatures()] == IDS
    general = {name for answer in answer_table().answer for name in answer.ids}
    for signature in load_signatures():
        assert signature.cases or signature.id in general
        assert signature.work or signature.cases
        assert signature.references
        assert set(signature.hides) <= set(IDS) - {signature.id}


@pytest.mark.parametrize("signature", [row.id for row in load_signatures() if row.cases])
def test_every_signature_has_a_sample(signature: str) -> None:
    assert any(path.stem.partition(".")[0] == signature for path in SAMPLES)


def test_an_engine_alone_that_schedules_is_no_livelock_yet() -> None:
    worker = re.compile(r"Process \d+: VLLM::Worker.*?(?=Process |\Z)", re.DOTALL)
    text = worker.sub("", sample("schedule-livelock"))
    text = re.sub(r"(?m)^.*throughput.*\n", "", text)
    found = answer(text)
    assert {finding.confidence for finding in found.findings} == {"possible"}
    assert any("no worker is here" in finding.confirmation for finding in found.findings)


@pytest.mark.parametrize("path", SAMPLES, ids=name)
def test_each_sample_yields_its_signature(path: Path) -> None:
    found = answer(path.read_text())
    signature = path.stem.partition(".")[0]
    if signature.startswith("healthy"):
        assert found.verdict in {"unknown", "maybe", "working"}
        assert all(finding.confidence == "possible" for finding in found.findings)
        assert all(finding.severity is Severity.INFO for finding in found.findings)
        return
    assert [finding.code for finding in found.findings] == [f"stack.{signature}"]
    assert found.verdict == ("idle" if signature == "idle-spin-normal" else "hang")
    finding = found.findings[0]
    assert finding.confidence in {"likely", "sure"}
    assert finding.lines
    assert (finding.confirmation == "") == (finding.confidence == "sure")


def test_an_engine_that_died_while_it_was_looked_at() -> None:
    (first,) = parse_stacks(sample("idle-spin-normal")).samples
    gone = StacksGap("stacks.gone", "pid 4120 is gone")
    processes = tuple(
        msgspec.structs.replace(process, threads=(), error=gone)
        if process.role == "engine"
        else process
        for process in first.processes
    )
    second = msgspec.structs.replace(first, processes=processes)
    found = explain_stacks(PastedStacks((first, second), complete=True))
    assert answers(found) == [("stack.engine-core-missing", "likely")]
    assert "EngineCore 4120: pid 4120 is gone" in found.findings[0].lines


def test_a_part_of_a_server_is_no_proof_that_the_engine_is_gone() -> None:
    text = sample("idle-spin-normal").partition("Process 4120")[0]
    assert answers(explain_stacks(parse_stacks(text))) == [
        ("stack.engine-core-missing", "possible")
    ]
    whole = PastedStacks(parse_stacks(text).samples, complete=True)
    assert answers(explain_stacks(whole)) == [("stack.engine-core-missing", "likely")]


def test_progress_refutes_a_hang_in_the_stacks() -> None:
    moving = {"progress": "moving", "running": "3", "waiting": "0"}
    for signature in ("gpu-kernel-stuck", "lost-broadcast", "worker-stuck-broadcast"):
        assert explain_stacks(parse_stacks(sample(signature)), moving).verdict == "working"


def test_single_metrics_log_line_does_not_confirm_a_deadlock() -> None:
    """A request may have come just before it."""
    first, second, stacks = sample("admission-deadlock").split("\n", 2)
    assert first == second
    assert answer(f"{first}\n{stacks}").verdict == "maybe"
    other = second.replace("Engine 000", "Engine 001")
    assert answer(f"{other}\n{second}\n{stacks}").verdict == "maybe"
    assert answer(f"{first}\n{other}\n{second}\n{stacks}").verdict == "hang"


@pytest.mark.parametrize("name", ["schedule-livelock", "lost-broadcast", "startup-capture"])
def test_single_dump_cannot_distinguish_livelock_from_work(name: str) -> None:
    pasted = parse_stacks(sample(name))
    found = explain_stacks(PastedStacks(pasted.samples[:1]))
    assert found.verdict == "maybe"
    assert f"stack.{name}" in [finding.code for finding in found.findings[:2]]
    for finding in found.findings:
        assert (finding.confidence, finding.severity) == ("possible", Severity.INFO)
        assert "one dump can't tell" in finding.confirmation


@pytest.mark.parametrize(
    ("name", "running"), [("schedule-livelock.cpu", "1"), ("admission-deadlock.cpu", "0")]
)
def test_spinning_engine_is_not_diagnosed_as_lost_broadcast(name: str, running: str) -> None:
    """Most of a livelock's time goes into the round trip of empty batches."""
    alone = PastedStacks(parse_stacks(sample(name)).samples, complete=True)
    assert explain_stacks(alone).verdict in {"unknown", "maybe"}
    known = {"running": running, "waiting": "2", "kv_usage": "0", "steps": "moving", "still": "6"}
    assert answers(explain_stacks(alone, known)) == [(f"stack.{name.partition('.')[0]}", "sure")]
    deferred = explain_stacks(alone, {**known, "deferred": "2"})
    assert deferred.verdict in {"unknown", "maybe"}, "a transfer, perhaps"


def test_eviction_spin_is_found_while_its_thread_waits_for_the_gil() -> None:
    """As it does while the agent's threads answer."""
    name = "mm-cache-eviction-spin.cpu"
    text = re.sub(r'\(active\S*\)(?=: "Thread-5)', "(idle)", sample(name), count=1)
    assert text != sample(name)
    assert answers(answer(text)) == answers(answer(sample(name)))


# What tells the one is a native frame, the other who holds the GIL.
LACKS = {"launch-queue-full": WITHOUT_NATIVE, "gil-held": WITHOUT_GIL}
# A crash of the engine's thread, a log with figures, several dumps, native frames, the GIL, work.
FEW = {
    "admission-deadlock",
    "gil-held",
    "healthy-busy.three-samples",
    "input-thread-dead",
    "launch-queue-full",
    "mm-cache-eviction-spin",
}
ALL = os.environ.get("VLLMOPS_TEST_ALL") == "1"
PASTED = [
    (path, form)
    for path in SAMPLES
    for form in FORMS
    if (ALL or path.stem in FEW) and form not in LACKS.get(path.stem, ())
]


def test_the_few_samples_exist() -> None:
    assert {path.stem for path in SAMPLES} > FEW


@pytest.mark.parametrize(("path", "form"), PASTED, ids=lambda value: getattr(value, "stem", value))
def test_the_same_answer_in_every_form(path: Path, form: str) -> None:
    text = path.read_text()
    if form in WITHOUT_LOG:
        text = text.removeprefix(parts(text)[0])
    assert answers(answer(FORMS[form](text))) == answers(answer(text))
