"""``vllmops logs``: a server's log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Annotated

import typer

from ..errors import VllmopsError, usage
from ..host.roles import Role
from ..instances.control import followed, over
from ..instances.logs import WATCH, Tail, parse, role_of
from ..instances.record import Folder
from ..instances.servers import find, resolve
from ..output import Json, Result, Verbatim, command, show, typer_app, until_interrupted
from .options import Target, TargetArgument, count

app = typer_app()

POLL_S = 0.2


class Part(StrEnum):
    API = "api"
    ENGINE = "engine"
    WORKER = "worker"
    WATCH = "watch"


@app.command(epilog="Example: vllmops logs demo -f --process engine")
@command
def logs(
    name: TargetArgument = None,
    target: Target = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines.")] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", parser=count(0), help="Show only the last N lines."),
    ] = None,
    part: Annotated[
        Part | None, typer.Option("--process", help="Show only lines of one kind of process.")
    ] = None,
    json_: Json = False,
) -> Result:
    """Show a server's log, also after it has ended.

    Rotated parts of the log are included.
    """
    if json_ and follow:
        raise usage("--json prints one envelope: do not use it with --follow", "leave one out")
    folder = Folder(instance_name(name or target))
    tail = Tail(folder.log)
    # One line at least, so that the tail is at the end.
    most = None if lines is None else max(lines, 1)
    chosen = list(islice(select(tail.before(ended=over(folder)), part), most))[:lines][::-1]
    if follow:
        with until_interrupted():
            show(*map(Verbatim, chosen))
            while running(folder):
                time.sleep(POLL_S)
                show(*map(Verbatim, select(tail.lines(), part)))
        show(*map(Verbatim, select(tail.lines(ended=True), part)))
        chosen = []
    data = {"name": folder.name, "file": str(folder.log), "lines": chosen}
    return Result(data, lambda: list(map(Verbatim, chosen)))


def instance_name(target: str | None) -> str:
    """The name of an instance, even if it has ended.

    Raises:
        VllmopsError: ``logs.none`` for a server that vllmops did not start.
    """
    if target and any(server.name == target for server in find()):
        return target
    server = resolve(target)
    if server.name is None:
        raise VllmopsError(
            "logs.none",
            f"vllmops did not start {server.label}, so it does not have its output",
            f"see where pid {server.pid} writes: ls -l /proc/{server.pid}/fd/1",
        )
    return server.name


def select(lines: Iterable[str], part: Part | None) -> Iterator[str]:
    return (line for line in lines if part is None or belongs(line, part))


def belongs(line: str, part: Part) -> bool:
    if part is Part.WATCH:
        return parse(line).process == WATCH
    return role_of(line) is Role(part)


def running(folder: Folder) -> bool:
    record = followed(folder)
    return record is not None and not record.state.over
