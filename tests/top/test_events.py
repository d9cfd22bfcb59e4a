from __future__ import annotations

from vllmops.diagnose.progress import RULES
from vllmops.top.events import KEPT, follow
from vllmops.top.rows import ServerRow

FIRST, SECOND = RULES[:2]


def row(*found: object, target: str = "demo") -> ServerRow:
    return ServerRow(target=target, state="up", findings=found)  # type: ignore[arg-type]


def test_a_finding_keeps_its_beginning_and_its_evidence_is_the_last() -> None:
    events = follow((), [row(FIRST.at("engine 1", "for 10 s"))], 100.0)
    events = follow(events, [row(FIRST.at("engine 1", "for 11 s"))], 101.0)
    (event,) = events
    assert (event.began, event.ended, event.finding.evidence) == (100.0, None, "for 11 s")


def test_one_that_is_over_stays_and_may_come_again() -> None:
    events = follow((), [row(FIRST.at("engine 1", ""))], 100.0)
    events = follow(events, [row()], 105.0)
    assert [(event.began, event.ended) for event in events] == [(100.0, 105.0)]
    events = follow(events, [row(FIRST.at("engine 1", ""))], 110.0)
    assert [(event.began, event.ended) for event in events] == [(110.0, None), (100.0, 105.0)]


def test_servers_and_subjects_are_told_apart() -> None:
    rows = [row(FIRST.at("engine 1", ""), SECOND.at("engine 1", "")), row(target="other")]
    events = follow((), rows, 1.0)
    events = follow(events, [row(SECOND.at("engine 1", "")), row(FIRST.at("x", ""))], 2.0)
    assert [event.finding.code for event in events if event.ended is not None] == [FIRST.code]


def test_only_the_last_ones_are_kept() -> None:
    events = follow((), [], 0.0)
    for number in range(KEPT + 5):
        events = follow(events, [row(FIRST.at(f"engine {number}", ""))], number)
    assert len(events) == KEPT + 1
