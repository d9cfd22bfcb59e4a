"""Findings as they come and go: a pure function of rows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..model.findings import Finding
from .table_rows import ServerRow

KEPT = 50  # events that are over


class FindingEvent(msgspec.Struct, frozen=True):
    """A finding over time.

    Args:
        target: the server, as ``--target`` takes it.
        finding: as it was seen last.
        began: when it was first seen, in seconds since the epoch.
        ended_at: when it was seen no more; None while it lasts.
    """

    target: str
    finding: Finding
    began: float
    ended_at: float | None = msgspec.field(default=None, name="ended")

    @property
    def finding_key(self) -> tuple[str, str, str]:
        """What stays the same while a finding is the same one."""
        return self.target, self.finding.code, self.finding.subject


def update_events(
    events: Sequence[FindingEvent], rows: Sequence[ServerRow], now: float
) -> tuple[FindingEvent, ...]:
    """The events after one more look.

    Args:
        events: those before.
        rows: what was seen.
        now: seconds since the epoch.

    Returns:
        Those that last, worst first, then those that are over, the last one first.
    """
    lasting = {event.finding_key: event for event in events if event.ended_at is None}
    present = [FindingEvent(row.target, found, now) for row in rows for found in row.findings]
    present = [
        msgspec.structs.replace(event, began=lasting[event.finding_key].began)
        if event.finding_key in lasting
        else event
        for event in present
    ]
    keys = {event.finding_key for event in present}
    over = [
        msgspec.structs.replace(event, ended_at=now)
        for event in lasting.values()
        if event.finding_key not in keys
    ]
    over += [event for event in events if event.ended_at is not None]
    return (*sorted(present, key=lambda event: -event.finding.severity.rank), *over[:KEPT])
