"""What running servers hold of a keyring."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vllmops.commands.options import parse_duration
from vllmops.model.ranks import format_process
from vllmops.support.durations import format_lifetime
from vllmops.support.numbers import CENTURY_S

from ...keys import rotation
from ...keys.keyring import KeyRing
from . import loaded_keys


class OverlapPeriod(NamedTuple):
    """How many seconds an old primary stays verify-only, and why, in words."""

    seconds: float
    reason: str


def choose_overlap_period(overlap: str | None, path: Path) -> OverlapPeriod:
    """How long an old primary of a ring stays verify-only.

    Args:
        overlap: the value of --overlap.
        path: the ring.

    Raises:
        VllmopsError: ``usage``.
    """
    needed, whose = loaded_keys.find_longest_carrier_ttl(path)
    live = f"carriers{f' of {whose}' if whose else ''} live for {format_lifetime(needed)}"
    if overlap is None:
        return OverlapPeriod(min(needed, CENTURY_S), live)
    seconds = parse_duration(overlap)
    return OverlapPeriod(seconds, "--overlap" + (f", but {live}" if seconds < needed else ""))


def describe_not_loaded(path: Path, kid: str) -> list[str]:
    """Which processes have not loaded a key, and why; the servers reload the file first."""
    holdings = loaded_keys.collect_keyring_users(keyring_path=path, reload=True).select_by_keyring(
        path
    )
    lacking = rotation.find_processes_without_key(kid, [process.keys for process in holdings.users])
    why = [
        f"{process.display_name} has not loaded it"
        + (f" ({process.keys.problem})" if process.keys.problem else "")
        for process in holdings.users
        if process.keys in lacking
    ]
    return why + [
        f"{server} {format_process(process)} does not answer ({process.reason})"
        for server, process in holdings.gaps
    ]


def collect_load_status(path: Path, keyring: KeyRing) -> tuple[dict[str, Any], list[str]]:
    """Which servers have loaded a change: fields for ``--json``, and lines for a person."""
    holdings = loaded_keys.collect_keyring_users(keyring_path=path, reload=True).select_by_keyring(
        path
    )
    taken = [process for process in holdings.users if rotation.is_up_to_date(process.keys, keyring)]
    late = [process.display_name for process in holdings.users if process not in taken]
    late += [f"{server} {format_process(process)}" for server, process in holdings.gaps]
    notes = [f"loaded by {', '.join(process.display_name for process in taken)}"] if taken else []
    notes += [f"not loaded yet by {', '.join(late)}: vllmops keys status"] if late else []
    return {"loaded": [process.display_name for process in taken], "not_loaded": late}, notes
