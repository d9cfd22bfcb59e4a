"""All checks together: each once, the cause first, and nothing that stacks contradict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.docs import load_pages
from vllmops.model.findings import Severity
from vllmops.model.server_snapshot import Gap, ServerSnapshot
from vllmops.model.stacks import StacksSnapshot
from vllmops.rules import diagnosis
from vllmops.rules.diagnosis import diagnose_snapshot, list_checks
from vllmops.rules.stacks.signatures import load_signatures

from .sample_servers import (
    PIDS,
    healthy,
    make_healthy_sample,
    make_sample_series,
    metrics,
    process,
    pulse,
)
from .test_cache_comparison import engine, front, make_comparison

SAMPLES = Path(__file__).with_name("stacks")


def stacks(name: str) -> tuple[StacksSnapshot, ...]:
    """Three samples of what a file of ours shows, as a live server's."""
    (sample, *_) = parse_stacks((SAMPLES / name).read_text()).samples
    return (sample,) * 3


def diagnose_codes(snapshot: ServerSnapshot) -> list[str]:
    return [finding.code for finding in diagnose_snapshot(snapshot).findings]


STILL = {"running": 1, "waiting": 2, "still_s": 30.0}
NO_AGENTS: dict[str, Any] = {"heartbeats": (), "metrics": metrics(running=1)}


def test_codes_are_listed_once_and_none_is_missing() -> None:
    codes = [check.code for check in list_checks()]
    assert len(codes) == len(set(codes))
    for code in ("mm-cache.ghost-keys", "stack.mm-cache-eviction-spin", "memory.rss-growing"):
        assert code in codes
    for code in ("engine.no-progress", "process.stopped", "security.no-api-key"):
        assert code in codes
    assert "stack.idle-spin-normal" not in codes


def test_a_healthy_server_has_no_findings() -> None:
    shown = diagnose_snapshot(healthy(stacks=stacks("idle-spin-normal.txt")))
    assert (shown.findings, shown.stalls) == ((), ())
    assert shown.explanation
    assert shown.explanation.verdict == "idle"


def test_drift_of_a_server_at_work() -> None:
    """Its caches alone don't tell it while requests are in flight."""
    same = make_comparison(front("abc", 7), front("abc", 7), engine("abc"))
    drifted = make_comparison(front("abc", 7), front("abc", 7), engine("ab"))
    assert diagnose_codes(healthy(comparisons=(same,))) == []
    # Several API servers may tell of the same engine.
    assert diagnose_codes(healthy(comparisons=(drifted, drifted))) == ["mm-cache.front-only"]


def test_stack_findings_come_before_their_symptoms() -> None:
    snapshot = healthy(
        samples=make_sample_series({}, {"heartbeats": (pulse("engine", **STILL),)}),
        stacks=stacks("mm-cache-eviction-spin.txt"),
    )
    assert diagnose_codes(snapshot) == ["stack.mm-cache-eviction-spin", "engine.no-progress"]


def test_metrics_that_stand_still_while_all_is_idle_are_stale() -> None:
    # The gauge of running requests keeps its value when the last one is aborted.
    shown = make_sample_series(*[NO_AGENTS] * 40)
    assert diagnose_codes(healthy(samples=shown)) == ["engine.no-progress"]
    assert diagnose_codes(healthy(samples=shown, stacks=stacks("idle-spin-normal.txt"))) == []


def test_steps_without_tokens_are_told_to_the_stacks() -> None:
    def paces(step: int, **fields: float) -> dict[str, str]:
        seen = [
            make_healthy_sample(
                at_s, heartbeats=(pulse("engine", current_step=at, waiting=1, **fields),)
            )
            for at_s, at in ((0.0, 5), (4.0, step))
        ]
        known = diagnosis.collect_facts(seen, 10.0)
        return {name: known[name] for name in ("steps", "still") if name in known}

    assert paces(900, still_s=8.2) == {"steps": "moving", "still": "8"}
    assert paces(5, still_s=8.2) == {"steps": "frozen", "still": "8"}
    assert paces(900, still_s=8.2, age_s=20.0) == {}, "a late heartbeat says nothing of now"


def test_a_stopped_process_hides_what_it_causes() -> None:
    halted = tuple(process(role, "T" if role == "worker" else "S") for role in PIDS)
    unseen = Gap("agent of worker 30", "agent.timeout", "no answer")
    snapshot = healthy(
        samples=make_sample_series(
            *[{"processes": halted, "heartbeats": (pulse("worker", age_s=20),)}] * 2
        ),
        gaps=(unseen,),
    )
    assert diagnose_codes(snapshot) == ["process.stopped"]


def test_the_worst_comes_first() -> None:
    snapshot = healthy(
        vllmops="2.0",
        samples=make_sample_series({}, {"heartbeats": (pulse("engine", **STILL),)}),
        vllm_version="0.20.0",
        reports=(),
    )
    severities = [finding.severity for finding in diagnose_snapshot(snapshot).findings]
    assert severities == sorted(severities, key=lambda item: -item.rank)
    assert severities[0] == Severity.ERROR


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("*.txt")), ids=lambda file: file.stem)
def test_a_server_that_gets_on_is_never_told_to_hang_by_a_possibility(file: Path) -> None:
    sample = parse_stacks(file.read_text()).samples[:1]
    for finding in diagnose_snapshot(healthy(stacks=tuple(sample))).findings:
        assert getattr(finding, "confidence", "sure") != "possible"


def test_a_snapshot_says_the_same_once_it_was_saved() -> None:
    snapshot = healthy(
        samples=make_sample_series({}, {"heartbeats": (pulse("engine", **STILL),)}),
        stacks=stacks("mm-cache-eviction-spin.txt"),
    )
    again = msgspec.json.decode(msgspec.json.encode(snapshot), type=ServerSnapshot)
    assert diagnosis.diagnose_snapshot(again) == diagnosis.diagnose_snapshot(snapshot)


def test_every_check_has_its_page_and_every_page_its_check() -> None:
    found = {page.name: page for page in load_pages().values() if page.kind == "finding"}
    titles = {check.code: f"{check.code}: {check.title}" for check in list_checks()}
    # An idle server is shown by `stacks explain`, and no check of the doctor's.
    idle = {signature.code for signature in load_signatures() if not signature.hang}
    assert found.keys() - idle == titles.keys()
    different = {
        code: (found[code].title, title)
        for code, title in titles.items()
        if found[code].title.lower() != title.lower()
    }
    assert not different


def test_every_page_says_what_it_means_how_vllmops_knows_and_what_to_do() -> None:
    for page in load_pages().values():
        if page.kind == "finding":
            headings = [line for line in page.text.splitlines() if line.startswith("#")]
            assert headings[1:4] == [
                "## What it means",
                "## How vllmops knows",
                "## What to do",
            ], page.name
            assert headings[4:] in ([], ["## Where it was reported"]), page.name


def test_every_code_that_orders_or_hides_findings_is_one_of_a_check() -> None:
    codes = {check.code for check in list_checks()}
    hidden = set().union(*diagnosis.HIDES.values())
    assert diagnosis.SYMPTOMS.keys() | diagnosis.HIDES.keys() | hidden <= codes


def test_a_finding_names_its_page() -> None:
    (finding,) = diagnose_snapshot(healthy(state="failed")).findings
    assert finding.page == finding.code == "server.failed"
    assert list(msgspec.to_builtins(finding)) == [
        "code", "severity", "subject", "title", "evidence", "next", "page", "reference",
    ]  # fmt: skip
