"""``vllmops keys status``: which server holds which keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ... import output
from ...errors import VllmopsError
from ...instances import keys as client
from ...instances.keys import Holdings
from ...keys import file, rotation
from ...keys.ring import Ring
from ...keys.rotation import Stage
from ...output import Result, command, table
from .keyring import Keyring, listing, ring_path

if TYPE_CHECKING:
    from rich.console import RenderableType

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
