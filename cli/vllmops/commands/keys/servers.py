"""What running servers hold of a keyring."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ...instances import keys as client
from ...keys import rotation
from ...keys.ring import LONGEST_S, Ring, days
from ..options import duration


class Period(NamedTuple):
    """For how many seconds an old primary opens what it sealed, and why, in words."""

    seconds: float
    why: str


def period(overlap: str | None, path: Path) -> Period:
    """For how long an old primary of a ring opens what it sealed.

    Args:
        overlap: what was asked for.
        path: the ring.

    Raises:
        VllmopsError: ``usage``.
    """
    needed, whose = client.carriers_live(path)
    live = f"carriers{f' of {whose}' if whose else ''} live for {days(needed)}"
    if overlap is None:
        return Period(min(needed, LONGEST_S), live)
    seconds = duration(overlap)
    return Period(seconds, "--overlap" + (f", though {live}" if seconds < needed else ""))


def not_loaded(path: Path, kid: str) -> list[str]:
    """Who would refuse what a key seals, and why, in words; the servers look at the file first."""
    holdings = client.ask(ring=path, reload=True).of(path)
    lacking = rotation.lacking(kid, [each.keys for each in holdings.told])
    why = [
        f"{each.who} has not loaded it" + (f" ({each.keys.problem})" if each.keys.problem else "")
        for each in holdings.told
        if each.keys in lacking
    ]
    return why + [
        f"{server} {each.role} {each.pid} does not tell ({each.why})"
        for server, each in holdings.silent
    ]


def after(path: Path, ring: Ring) -> tuple[dict[str, Any], list[str]]:
    """What became of a change in the servers: for ``--json``, then lines for a person."""
    holdings = client.ask(ring=path, reload=True).of(path)
    taken = [each for each in holdings.told if rotation.up_to_date(each.keys, ring)]
    late = [each.who for each in holdings.told if each not in taken]
    late += [f"{server} {each.role} {each.pid}" for server, each in holdings.silent]
    notes = [f"loaded by {', '.join(each.who for each in taken)}"] if taken else []
    notes += [f"not loaded yet by {', '.join(late)}: vllmops keys status"] if late else []
    return {"loaded": [each.who for each in taken], "not_loaded": late}, notes
