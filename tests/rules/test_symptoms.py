"""The words of reports without stacks: what they say, and which reports say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.diagnosis import cases

from vllmops.collect.stacks import pasted_text
from vllmops.rules.stacks import prose
from vllmops.rules.stacks.explanation import explain_stacks
from vllmops.rules.stacks.prose import (
    HangPattern,
    ReportPattern,
    is_hang_report,
    load_report_tables,
    select_statements,
)
from vllmops.rules.stacks.signatures import load_signatures
from vllmops.rules.stacks.symptoms import match_sentences

FIELD = Path(__file__).parent / "field"


@pytest.mark.parametrize("sign", load_report_tables().sign, ids=lambda sign: sign.ids[0])
def test_each_hang_pattern_matches_its_example(sign: HangPattern) -> None:
    assert sign.ids[0] in {said.id for said in match_sentences(sign.example)}
    assert set(sign.ids) <= {signature.id for signature in load_signatures()}


@pytest.mark.parametrize("row", load_report_tables().stuck, ids=lambda row: row.example)
def test_each_stuck_pattern_matches_its_example(row: ReportPattern) -> None:
    assert is_hang_report(select_statements(row.example))


@pytest.mark.parametrize(
    "row", [*load_report_tables().text, *load_report_tables().sentence], ids=lambda row: row.example
)
def test_each_exclusion_pattern_drops_its_example(row: ReportPattern) -> None:
    assert select_statements(row.example) == ""


@pytest.mark.parametrize("path", sorted(FIELD.glob("quiet-*.txt")), ids=lambda path: path.stem)
def test_a_quiet_text_names_nothing(path: Path) -> None:
    found = explain_stacks(pasted_text.parse_stacks(path.read_text()))
    assert found.verdict not in {"hang", "maybe"}, found.findings


def test_words_alone_are_never_more_than_possible() -> None:
    shown = [case for case in cases(FIELD) if case.name.startswith(("prose-", "report-"))]
    assert len(shown) > 80
    assert {case.found.verdict for case in shown} == {"maybe"}
    assert not [case.name for case in shown if not case.is_within(1)]


@pytest.mark.parametrize(
    "text",
    [
        "Does an `all_reduce` hang when a rank dies?",
        "The grammar compiles in 3 ms and nothing hangs. No deadlock in NCCL either.",
        "[Feature]: show which rank is stuck in NCCL",
        "The nightly run with LMCache does not hang, and it isn't stuck in the KV transfer.",
    ],
)
def test_questions_and_denials_report_no_hang(text: str) -> None:
    assert match_sentences(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "Since I turned profiling on, all ranks hang in `all_gather`. The flame graph is empty.",
        "This PR made it worse: nothing else changed. Now all ranks hang in NCCL.",
        "It would be nice if somebody had a look. All ranks hang in an all_reduce.",
        "[Bug]: feature X hangs\n\nAll ranks are stuck in NCCL after the RFC was merged.",
    ],
)
def test_words_beside_a_report_do_not_silence_it(text: str) -> None:
    assert match_sentences(text)[0].id == "collective-stall"


@pytest.mark.parametrize(
    "text",
    [
        "It hangs at 100 % of the KV cache. ",
        "stuck 100% gpu ",
        "a_b(",
        "a",
        "a=b, ",
        "\n- a",
        "#",
        "- ",
    ],
)
def test_huge_report_is_truncated_and_matched_in_linear_time(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = text * (1_000_000 // len(text))
    assert len(select_statements(words)) <= 3 * prose.MOST_READ
    select_statements.cache_clear()
    # What takes longer than in proportion takes an hour then.
    monkeypatch.setattr(prose, "MOST_READ", len(words))
    match_sentences(words)
