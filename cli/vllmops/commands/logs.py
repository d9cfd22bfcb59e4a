"""``vllmops logs``: a server's log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Annotated

import typer

from ..model.roles import Role
from ..servers.discovery import list_servers, resolve_server
from ..servers.logs import WATCH, LogTail, parse_line, parse_line_role
from ..servers.record import InstanceFolder
from ..servers.supervisor_client import is_over, read_supervised_record
from ..support.errors import VllmopsError, make_usage_error
from ..support.output import (
    Json,
    Result,
    VerbatimText,
    exit_on_interrupt,
    make_typer_app,
    print_parts,
    print_result,
)
from .options import Target, TargetArgument, make_count_parser

app = make_typer_app()

POLL_S = 0.2


class LogSource(StrEnum):
    API = "api"
    ENGINE = "engine"
    WORKER = "worker"
    WATCH = "watch"


@app.command(epilog="Example: vllmops logs demo -f --process engine")
@print_result
def logs(
    name: TargetArgument = None,
    target: Target = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines.")] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", parser=make_count_parser(0), help="Show only the last N lines."
        ),
    ] = None,
    part: Annotated[
        LogSource | None, typer.Option("--process", help="Show only lines of one kind of process.")
    ] = None,
    json_: Json = False,
) -> Result:
    """Show a server's log, also after it has ended.

    Rotated parts of the log are included.
    """
    if json_ and follow:
        raise make_usage_error(
            "--json prints one envelope: do not use it with --follow", "leave one out"
        )
    folder = InstanceFolder(find_instance_name(name or target))
    tail = LogTail(folder.server_log)
    # One line at least, so that the tail is at the end.
    most = None if lines is None else max(lines, 1)
    chosen = list(islice(filter_lines(tail.read_backwards(ended=is_over(folder)), part), most))[
        :lines
    ][::-1]
    if follow:
        with exit_on_interrupt():
            print_parts(*map(VerbatimText, chosen))
            while is_running(folder):
                time.sleep(POLL_S)
                print_parts(*map(VerbatimText, filter_lines(tail.read_new_lines(), part)))
        print_parts(*map(VerbatimText, filter_lines(tail.read_new_lines(ended=True), part)))
        chosen = []
    data = {"name": folder.name, "file": str(folder.server_log), "lines": chosen}
    return Result(data, lambda: list(map(VerbatimText, chosen)))


def find_instance_name(target: str | None) -> str:
    """The name of an instance, even if it has ended.

    Raises:
        VllmopsError: ``logs.none`` for a server that vllmops did not start.
    """
    if target and any(server.name == target for server in list_servers()):
        return target
    server = resolve_server(target)
    if server.name is None:
        raise VllmopsError(
            "logs.none",
            f"vllmops did not start {server.label}, so it does not have its output",
            f"see where pid {server.pid} writes: ls -l /proc/{server.pid}/fd/1",
        )
    return server.name


def filter_lines(lines: Iterable[str], part: LogSource | None) -> Iterator[str]:
    return (line for line in lines if part is None or is_line_from(line, part))


def is_line_from(line: str, part: LogSource) -> bool:
    if part is LogSource.WATCH:
        return parse_line(line).process == WATCH
    return parse_line_role(line) is Role(part)


def is_running(folder: InstanceFolder) -> bool:
    record = read_supervised_record(folder)
    return record is not None and not record.state.is_over
