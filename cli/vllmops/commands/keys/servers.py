"""What running servers hold of a keyring."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ...instances import keys as client
from ...keys import rotation
from ...keys.ring import LONGEST_S, Ring, days
from ...protocol.place import who
from ..options import duration


class Period(NamedTuple):
    """How many seconds an old primary stays verify-only, and why, in words."""

    seconds: float
    why: str


def period(overlap: str | None, path: Path) -> Period:
    """How long an old primary of a ring stays verify-only.

    Args:
        overlap: the value of --overlap.
        path: the ring.

    Raises:
        VllmopsError: ``usage``.
    """
    needed, whose = client.carriers_live(path)
    live = f"carriers{f' of {whose}' if whose else ''} live for {days(needed)}"
    if overlap is None:
        return Period(min(needed, LONGEST_S), live)
    seconds = duration(overlap)
    return Period(seconds, "--overlap" + (f", but {live}" if seconds < needed else ""))


def not_loaded(path: Path, kid: str) -> list[str]:
    """Which processes have not loaded a key, and why; the servers reload the file first."""
    holdings = client.ask(ring=path, reload=True).of(path)
    lacking = rotation.lacking(kid, [process.keys for process in holdings.reported])
    why = [
        f"{process.who} has not loaded it"
        + (f" ({process.keys.problem})" if process.keys.problem else "")
        for process in holdings.reported
        if process.keys in lacking
    ]
    return why + [
        f"{server} {who(process)} does not answer ({process.why})"
        for server, process in holdings.silent
    ]


def after(path: Path, ring: Ring) -> tuple[dict[str, Any], list[str]]:
    """Which servers have loaded a change: fields for ``--json``, and lines for a person."""
    holdings = client.ask(ring=path, reload=True).of(path)
    taken = [process for process in holdings.reported if rotation.up_to_date(process.keys, ring)]
    late = [process.who for process in holdings.reported if process not in taken]
    late += [f"{server} {who(process)}" for server, process in holdings.silent]
    notes = [f"loaded by {', '.join(process.who for process in taken)}"] if taken else []
    notes += [f"not loaded yet by {', '.join(late)}: vllmops keys status"] if late else []
    return {"loaded": [process.who for process in taken], "not_loaded": late}, notes
