"""``vllmops keys rotate`` and ``status``: another key, without an outage, and how far that is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from .. import output
from ..errors import Exit, VllmopsError
from ..instances import keys as client
from ..instances.keys import Holdings
from ..keys import file, rotation
from ..keys.ring import LONGEST_S, Key, Ring, Status, days, fresh, in_seconds
from ..keys.rotation import Stage
from ..output import Progress, Result, command, table
from .keyring import Keyring, Overlap, listing, result, ring_path, when
from .options import duration, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

POLL_S = 0.3
NEXT = {
    Stage.EMPTY: "no key seals: vllmops keys rotate",
    Stage.SPREADING: "a rotation waits for servers: vllmops keys rotate goes on with it",
    Stage.READY: "every server has the next key: vllmops keys rotate promotes it",
    Stage.LAGGING: "a server holds something else than the file says; it looks every second",
    Stage.OVERLAP: "an old key opens what it sealed; the next rotation takes it out",
    Stage.OVER: "an old key's time is over: vllmops keys rotate takes it out, or keys retire",
    Stage.STEADY: "",
}


@command
def rotate(
    *,
    overlap: Overlap = None,
    timeout: Annotated[
        float,
        typer.Option(parser=seconds(), help="Seconds to wait until every server has the new key."),
    ] = 30.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Replace the primary by a fresh key, and break no conversation.

    It adds a key, waits until every running server that follows the
    keyring has loaded it, promotes it, and leaves the old one to open what
    it sealed until the overlap is over; older ones that are over go. Where
    it was cut off it goes on, and two at once are one.
    """
    from rich.text import Text  # noqa: PLC0415

    in_seconds("--timeout", timeout)
    path = ring_path(keyring)
    kept = period(overlap, path)
    spare = Key.of(fresh(), Status.NEXT, time.time())
    if dry_run:
        steps = plan(path, spare, kept)
        return Result(
            {"keyring": str(path), "overlap_s": kept.seconds, "steps": steps},
            lambda: [Text(f"{n}. {step}") for n, step in enumerate(steps, 1)],
        )
    ring = file.change(path, lambda ring: rotation.begin(ring, spare, time.time()), create=True)
    assert ring.next
    kid = ring.next.kid
    with Progress(time.time(), quiet=json_) as progress:
        wait(path, kid, timeout, progress)
    ring = file.change(path, lambda ring: rotation.finish(ring, kid, time.time(), kept.seconds))
    more, notes = after(path, ring)
    return result(ring, str(path), {"kid": kid, **more}, notes)


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


def plan(path: Path, spare: Key, kept: Period) -> list[str]:
    """The steps of a rotation, in words."""
    now = time.time()
    ring = file.load(path) if path.exists() else Ring()
    begun = rotation.begin(ring, spare, now)
    holdings = client.ask(ring=path).of(path)
    steps = [f"take out {key.kid}, which is over" for key in ring.keys if not begun.find(key.kid)]
    steps.append(
        f"go on with {ring.next.kid}, which is next" if ring.next else "add a fresh key as next"
    )
    if not holdings.told and not holdings.silent:
        steps.append("wait for nobody: no running server follows this keyring")
    else:
        waited = [each.who for each in holdings.told]
        waited += [f"{server} {each.role} {each.pid}" for server, each in holdings.silent]
        steps.append(f"wait until these have loaded it: {', '.join(waited)}")
    steps.append("promote it")
    if ring.primary:
        until = when(now + kept.seconds)
        steps.append(f"keep {ring.primary.kid} to open what it sealed until {until}: {kept.why}")
    return steps


def wait(path: Path, kid: str, timeout_s: float, progress: Progress) -> None:
    """Wait until every server that follows a ring holds a key.

    Raises:
        VllmopsError: ``keys.not-loaded`` (exit code 3); the key stays next.
    """
    deadline = time.monotonic() + timeout_s
    while why := not_loaded(path, kid):
        if time.monotonic() > deadline:
            raise VllmopsError(
                "keys.not-loaded",
                f"{kid} was not loaded by all within {timeout_s:g} s, and stays next: "
                + "; ".join(why),
                "once that is mended, vllmops keys rotate goes on",
                exit_code=Exit.TIMED_OUT,
            )
        progress.update(f"waiting for {len(why)} to load {kid}: {why[0]}")
        time.sleep(POLL_S)


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


@command
def status(*, keyring: Keyring = None, json_: output.Json = False) -> Result:
    """Show which server holds which keys, and how far a rotation is."""
    path = ring_path(keyring)
    every = client.ask(ring=path)
    own = every.of(path)
    try:
        ring = file.load(path)
    except VllmopsError as error:
        error.data = {"keyring": str(path), "stage": None, "keys": [], **holders(every, None)}
        if not json_:
            output.show(*held(every))
        raise
    stage = rotation.stage(ring, [each.keys for each in own.told], time.time())
    data = {
        "keyring": str(path),
        "stage": stage,
        "next": NEXT[stage],
        "keys": [key.told() for key in ring.keys],
        **holders(every, ring),
    }
    return Result(data, lambda: [*listing(ring, str(path)), "", *held(every), *next_step(stage)])


def next_step(stage: Stage) -> Iterator[RenderableType]:
    from rich.text import Text  # noqa: PLC0415

    yield Text(f"{stage}" + (f": {NEXT[stage]}" if NEXT[stage] else ""))


def holders(every: Holdings, ring: Ring | None) -> dict[str, Any]:
    """The processes and what they hold, for ``--json``."""
    return {
        "servers": [
            {
                "server": each.server,
                "up_to_date": ring is not None and rotation.up_to_date(each.keys, ring),
                **msgspec.to_builtins(each.keys),
            }
            for each in every.told
        ],
        "silent": [
            {"server": server, **msgspec.to_builtins(each)} for server, each in every.silent
        ],
    }


def held(every: Holdings) -> Iterator[RenderableType]:
    """The same for a person."""
    from rich.text import Text  # noqa: PLC0415

    if not every.told and not every.silent:
        yield Text("no running server holds keys")
        return
    shown = table("server", "process", "holds", "of")
    for each in every.told:
        keys = ", ".join(f"{key.kid} ({key.status})" for key in each.keys.keys) or "none"
        where = each.keys.keyring or "its environment"
        shown.add_row(each.server, f"{each.keys.role} {each.keys.pid}", keys, where)
    for server, silent in every.silent:
        shown.add_row(server, f"{silent.role} {silent.pid}", "does not tell", "")
    yield shown
    for each in every.told:
        if each.keys.problem:
            yield Text(f"{each.who}: {each.keys.problem}", "yellow")
    for server, silent in every.silent:
        yield Text(f"{server} {silent.role} {silent.pid}: {silent.why}", "yellow")
