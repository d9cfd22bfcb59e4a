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
from ...instances.servers import resolve
from ...keys import file, rotation
from ...keys.ring import Ring
from ...keys.rotation import Stage
from ...output import Result, table
from ...protocol.place import who
from ..options import AnyTarget
from ..several import per_target
from .keyring import Keyring, listing, ring_path

if TYPE_CHECKING:
    from rich.console import RenderableType

NEXT = {
    Stage.EMPTY: "no primary key: run vllmops keys rotate",
    Stage.SPREADING: "servers are loading the next key: vllmops keys rotate continues",
    Stage.READY: "each server has the next key: vllmops keys rotate promotes it",
    Stage.LAGGING: "a server has not loaded the current file yet; servers check it every second",
    Stage.OVERLAP: "an old key is verify-only; the next rotation removes it",
    Stage.OVER: "the time of a key is over: remove it with vllmops keys rotate or keys retire",
    Stage.STEADY: "",
}


@per_target
def status(
    *, target: AnyTarget = None, keyring: Keyring = None, json_: output.Json = False
) -> Result:
    """Show which server holds which keys, and the state of a rotation."""
    path = ring_path(keyring)
    if target:
        # Its keyring may be a copy of this one, below another name, and this machine have none.
        holdings = own = client.ask([resolve(target)])
        if keyring is None and not path.exists():
            data = {"keyring": None, "stage": None, "keys": [], **holders(holdings, None)}
            return Result(data, lambda: list(render_servers(holdings)))
    else:
        holdings = client.ask(ring=path)
        own = holdings.of(path)
    try:
        ring = file.load(path)
    except VllmopsError as error:
        error.data = {"keyring": str(path), "stage": None, "keys": [], **holders(holdings, None)}
        if not json_:
            output.show(*render_servers(holdings))
        raise
    stage = rotation.stage(ring, [process.keys for process in own.reported], time.time())
    data = {
        "keyring": str(path),
        "stage": stage,
        "next": NEXT[stage],
        "keys": [key.public() for key in ring.keys],
        **holders(holdings, ring),
    }
    return Result(
        data, lambda: [*listing(ring, str(path)), "", *render_servers(holdings), *next_step(stage)]
    )


def next_step(stage: Stage) -> Iterator[RenderableType]:
    yield stage + (f": {NEXT[stage]}" if NEXT[stage] else "")


def holders(holdings: Holdings, ring: Ring | None) -> dict[str, Any]:
    """The processes and what they hold, for ``--json``."""
    return {
        "servers": [
            {
                "server": process.server,
                "up_to_date": ring is not None and rotation.up_to_date(process.keys, ring),
                **msgspec.to_builtins(process.keys),
            }
            for process in holdings.reported
        ],
        "silent": [
            {"server": server, **msgspec.to_builtins(process)}
            for server, process in holdings.silent
        ],
    }


def render_servers(holdings: Holdings) -> Iterator[RenderableType]:
    """Human-readable output."""
    if not holdings.reported and not holdings.silent:
        yield "no running server uses keys"
        return
    shown = table("server", "process", "keys", "from")
    for process in holdings.reported:
        keys = ", ".join(f"{key.kid} ({key.status})" for key in process.keys.keys) or "none"
        where = process.keys.keyring or "its environment"
        shown.add_row(process.server, who(process.keys), keys, where)
    for server, silent in holdings.silent:
        shown.add_row(server, who(silent), "no answer", "")
    yield shown
    for process in holdings.reported:
        if process.keys.problem:
            yield output.styled(f"{process.who}: {process.keys.problem}", "yellow")
    for server, silent in holdings.silent:
        yield output.styled(f"{server} {who(silent)}: {silent.why}", "yellow")
