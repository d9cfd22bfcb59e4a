"""``vllmops keys status``: which server holds which keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from vllmops.commands.multi_target import run_per_target
from vllmops.commands.options import AnyTarget
from vllmops.model.ranks import format_process
from vllmops.servers.discovery import resolve_server
from vllmops.support import output
from vllmops.support.errors import VllmopsError
from vllmops.support.output import Result, make_table

from ...keys import keyring_file, rotation
from ...keys.keyring import KeyRing
from ...keys.rotation import RotationStage
from . import loaded_keys
from .keyring_options import Keyring, find_keyring_path, render_keyring
from .loaded_keys import KeyringUsers

if TYPE_CHECKING:
    from rich.console import RenderableType

NEXT = {
    RotationStage.EMPTY: "no primary key: run vllmops keys rotate",
    RotationStage.SPREADING: "servers are loading the next key: vllmops keys rotate continues",
    RotationStage.READY: "each server has the next key: vllmops keys rotate promotes it",
    RotationStage.LAGGING: (
        "a server has not loaded the current file yet; servers check it every second"
    ),
    RotationStage.OVERLAP: "an old key is verify-only; the next rotation removes it",
    RotationStage.OVER: (
        "the time of a key is over: remove it with vllmops keys rotate or keys retire"
    ),
    RotationStage.STEADY: "",
}


@run_per_target
def status(
    *, target: AnyTarget = None, keyring: Keyring = None, json_: output.Json = False
) -> Result:
    """Show which server holds which keys, and the state of a rotation."""
    path = find_keyring_path(keyring)
    if target:
        # Its keyring may be a copy of this one, below another name, and this machine have none.
        holdings = own = loaded_keys.collect_keyring_users([resolve_server(target)])
        if keyring is None and not path.exists():
            data = {
                "keyring": None,
                "stage": None,
                "keys": [],
                **build_holders_data(holdings, None),
            }
            return Result(data, lambda: list(render_servers(holdings)))
    else:
        holdings = loaded_keys.collect_keyring_users(keyring_path=path)
        own = holdings.select_by_keyring(path)
    try:
        ring = keyring_file.load_keyring(path)
    except VllmopsError as error:
        error.data = {
            "keyring": str(path),
            "stage": None,
            "keys": [],
            **build_holders_data(holdings, None),
        }
        if not json_:
            output.print_parts(*render_servers(holdings))
        raise
    stage = rotation.find_stage(ring, [process.keys for process in own.users], time.time())
    data = {
        "keyring": str(path),
        "stage": stage,
        "next": NEXT[stage],
        "keys": [key.without_secret() for key in ring.keys],
        **build_holders_data(holdings, ring),
    }
    return Result(
        data,
        lambda: [
            *render_keyring(ring, str(path)),
            "",
            *render_servers(holdings),
            *render_stage(stage),
        ],
    )


def render_stage(stage: RotationStage) -> Iterator[RenderableType]:
    yield stage + (f": {NEXT[stage]}" if NEXT[stage] else "")


def build_holders_data(keyring_users: KeyringUsers, keyring: KeyRing | None) -> dict[str, Any]:
    """The processes and what they hold, for ``--json``."""
    return {
        "servers": [
            {
                "server": process.server,
                "up_to_date": keyring is not None and rotation.is_up_to_date(process.keys, keyring),
                **msgspec.to_builtins(process.keys),
            }
            for process in keyring_users.users
        ],
        "silent": [
            {"server": server, **msgspec.to_builtins(process)}
            for server, process in keyring_users.gaps
        ],
    }


def render_servers(keyring_users: KeyringUsers) -> Iterator[RenderableType]:
    """Human-readable output."""
    if not keyring_users.users and not keyring_users.gaps:
        yield "no running server uses keys"
        return
    shown = make_table("server", "process", "keys", "from")
    for process in keyring_users.users:
        keys = ", ".join(f"{key.kid} ({key.status})" for key in process.keys.keys) or "none"
        where = process.keys.keyring or "its environment"
        shown.add_row(process.server, format_process(process.keys), keys, where)
    for server, silent in keyring_users.gaps:
        shown.add_row(server, format_process(silent), "no answer", "")
    yield shown
    for process in keyring_users.users:
        if process.keys.problem:
            yield output.style_text(f"{process.display_name}: {process.keys.problem}", "yellow")
    for server, silent in keyring_users.gaps:
        yield output.style_text(f"{server} {format_process(silent)}: {silent.reason}", "yellow")
