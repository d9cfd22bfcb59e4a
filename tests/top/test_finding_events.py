from __future__ import annotations

from vllmops.rules.progress import RULES
from vllmops.top.finding_events import KEPT, update_events
from vllmops.top.table_rows import ServerRow

FIRST, SECOND = RULES[:2]


def row(*found: object, target: str = "demo") -> ServerRow:
    return ServerRow(target=target, state="up", findings=found)  # type: ignore[arg-type]


def test_a_finding_keeps_its_beginning_and_its_evidence_is_the_last() -> None:
    events = update_events((), [row(FIRST.make_finding("engine 1", "for 10 s"))], 100.0)
    events = update_events(events, [row(FIRST.make_finding("engine 1", "for 11 s"))], 101.0)
    (event,) = events
    assert (event.began, event.ended_at, event.finding.evidence) == (100.0, None, "for 11 s")


def test_an_ended_event_stays_and_its_return_is_a_new_event() -> None:
    events = update_events((), [row(FIRST.make_finding("engine 1", ""))], 100.0)
    events = update_events(events, [row()], 105.0)
    assert [(event.began, event.ended_at) for event in events] == [(100.0, 105.0)]
    events = update_events(events, [row(FIRST.make_finding("engine 1", ""))], 110.0)
    assert [(event.began, event.ended_at) for event in events] == [(110.0, None), (100.0, 105.0)]


def test_servers_and_subjects_are_told_apart() -> None:
    rows = [
        row(FIRST.make_finding("engine 1", ""), SECOND.make_finding("engine 1", "")),
        row(target="other"),
    ]
    events = update_events((), rows, 1.0)
    events = update_events(
        events, [row(SECOND.make_finding("engine 1", "")), row(FIRST.make_finding("x", ""))], 2.0
    )
    assert [event.finding.code for event in events if event.ended_at is not None] == [FIRST.code]


def test_old_ended_events_are_dropped() -> None:
    events = update_events((), [], 0.0)
    for number in range(KEPT + 5):
        events = update_events(events, [row(FIRST.make_finding(f"engine {number}", ""))], number)
    assert len(events) == KEPT + 1
