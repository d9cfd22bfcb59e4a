"""``vllmops top``: servers, their processes and requests, on one screen that stays up to date."""

from __future__ import annotations

import functools
import signal
import sys
import time
from importlib.util import find_spec
from typing import Annotated

import typer

from ..errors import Exit, VllmopsError
from ..instances.servers import find, pending
from ..output import Json, Result, typer_app
from ..top import look, rows
from ..top.look import Follower
from ..top.screen import screen
from .options import AnyTarget
from .several import expanded, remote, repeated

app = typer_app()

ONCE_S = 6.0  # for servers that do not answer


@app.command(epilog="Example: vllmops top -t demo --once")
@functools.partial(remote, target=repeated)
def top(
    *,
    target: AnyTarget = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen, which needs no Textual.")
    ] = False,
    json_: Json = False,
) -> Result:
    """Show servers on a full screen that stays up to date.

    Without -t it shows every server of this machine. It shows nodes and
    ranks with their state, tokens per second, requests, caches, and findings
    as they come. It reads heartbeats each second, and asks a server only
    every few seconds. Keys run other commands, after a confirmation. --once
    prints one screen; so does --json, as JSON.
    """
    targets = list(expanded(target or ()))
    if once or json_:
        return at_once(targets)
    check()
    from ..top.app import Top  # noqa: PLC0415 - needs Textual

    # Below nohup, a lost connection would leave it running without a terminal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    Top(look.Board(targets)).run()
    return Result(None)


def at_once(targets: list[str]) -> Result:
    """One screen; two looks make it, a second apart."""
    if targets:
        followers = [Follower(name) for name in targets]
    else:
        running = [server for server in find() if server.processes or pending(server)]
        followers = [Follower(server.label, server) for server in running]
    look.once(followers, ONCE_S)
    now_s = time.monotonic()
    servers = [rows.server(each.target, each.looks, now_s) for each in followers]
    errors = tuple(filter(None, map(trouble, followers)))
    return Result(
        {"servers": servers},
        lambda: list(screen(servers)),
        max((error.exit_code for error in errors), default=Exit.OK),
        errors,
    )


def trouble(follower: look.Follower) -> VllmopsError | None:
    """Why nothing is known of a server; None where something is."""
    if follower.looks or follower.failure:
        return follower.failure
    return VllmopsError(
        "top.timeout",
        f"{follower.target} did not answer within {ONCE_S:g} s: the machine is busy, or it hangs",
        f"vllmops status -t {follower.target}",
    )


def check() -> None:
    """Raise if the full screen can't be shown.

    Raises:
        VllmopsError: ``top.no-textual`` or ``top.no-terminal``.
    """
    if not find_spec("textual"):
        raise VllmopsError(
            "top.no-textual",
            "the full screen needs Textual, which is not installed",
            "pip install 'vllmops-cli[top]'; vllmops top --once works without it",
        )
    # Textual writes to standard error.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise VllmopsError(
            "top.no-terminal",
            "the full screen needs a terminal, and standard input, output or error is none",
            "vllmops top --once",
        )
