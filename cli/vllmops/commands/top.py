"""``vllmops top``: servers, their processes and requests, on one screen that stays up to date."""

from __future__ import annotations

import functools
import signal
import sys
import time
from importlib.util import find_spec
from typing import Annotated

import typer

from ..servers.discovery import is_pending, list_servers
from ..support.errors import ExitCode, VllmopsError
from ..support.output import Json, Result, make_typer_app
from ..top import server_followers, table_rows
from ..top.plain_screen import render_servers
from ..top.server_followers import ServerFollower
from .multi_target import allow_remote_target, expand_targets, make_repeatable
from .options import AnyTarget

app = make_typer_app()

ONCE_S = 6.0  # for servers that do not answer


@app.command(epilog="Example: vllmops top -t demo --once")
@functools.partial(allow_remote_target, target=make_repeatable)
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
    targets = list(expand_targets(target or ()))
    if once or json_:
        return make_screen_result(targets)
    require_full_screen()
    from ..top.full_screen import TopApp  # noqa: PLC0415 - needs Textual

    # Below nohup, a lost connection would leave it running without a terminal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    TopApp(server_followers.FollowedServers(targets)).run()
    return Result(None)


def make_screen_result(targets: list[str]) -> Result:
    """One screen; two looks make it, a second apart."""
    if targets:
        followers = [ServerFollower(name) for name in targets]
    else:
        running = [server for server in list_servers() if server.processes or is_pending(server)]
        followers = [ServerFollower(server.label, server) for server in running]
    server_followers.take_two_samples(followers, ONCE_S)
    now_s = time.monotonic()
    servers = [table_rows.make_server_row(each.target, each.samples, now_s) for each in followers]
    errors = tuple(filter(None, map(find_failure, followers)))
    return Result(
        {"servers": servers},
        lambda: list(render_servers(servers)),
        max((error.exit_code for error in errors), default=ExitCode.OK),
        errors,
    )


def find_failure(follower: server_followers.ServerFollower) -> VllmopsError | None:
    """Why nothing is known of a server; None where something is."""
    if follower.samples or follower.failure:
        return follower.failure
    return VllmopsError(
        "top.timeout",
        f"{follower.target} did not answer within {ONCE_S:g} s: the machine is busy, or it hangs",
        f"vllmops status -t {follower.target}",
    )


def require_full_screen() -> None:
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
