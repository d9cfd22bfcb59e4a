"""``vllmops watch``: report when a server stalls, and keep the evidence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..model.watch_events import WatchEvent
from ..rules.progress import PATIENCE_S
from ..rules.stall_detector import CHECKS, INTERVAL_S
from ..servers.discovery import Server, resolve_server
from ..servers.logs import WATCH
from ..servers.record import InstanceFolder
from ..support import output
from ..support.errors import ExitCode, VllmopsError
from ..support.home import require_safe_folder, resolve_home
from ..support.output import Json, OrderTrackingCommand, Result, format_duration, make_typer_app
from ..support.streams import make_stop_event
from ..watch import opentelemetry
from ..watch.event_delivery import CommandHook, Messenger, Webhook
from ..watch.probe_server import ProbeBoard, ProbeServer
from ..watch.watch_loop import EventHistory, Watch, WatchPlan
from ..watch.watch_target import WatchedServer, make_foreign_error
from .multi_target import allow_remote_target
from .options import (
    YEAR_S,
    Target,
    make_count_parser,
    make_seconds_parser,
    normalize_host_port,
    parse_host_port,
)

SUPERVISED = "--supervised"


class WatchCommand(OrderTrackingCommand):
    """A watch beside a server: after ``--supervised NAME``, its options are those of the record.

    Everybody on the machine sees the arguments of a process, and the URL of a webhook is a secret.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == [SUPERVISED] and len(args) == 2:
            record = InstanceFolder(args[1]).load_record()
            args = [SUPERVISED, "--target", args[1], *((record and record.watch) or ())]
        return super().parse_args(ctx, args)


app = make_typer_app()


@app.command(cls=WatchCommand, epilog="Example: vllmops watch -t demo --exec 'mail -s vllmops ops'")
@allow_remote_target
def watch(
    *,
    target: Target = None,
    interval: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(0.1),
            help="Seconds between checks.",
            rich_help_panel="Stalls",
        ),
    ] = INTERVAL_S,
    checks: Annotated[
        int,
        typer.Option(
            parser=make_count_parser(),
            help="Number of checks in a row without progress.",
            rich_help_panel="Stalls",
        ),
    ] = CHECKS,
    patience: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(1),
            help="Seconds without a token before it is a stall.",
            rich_help_panel="Stalls",
        ),
    ] = PATIENCE_S,
    once: Annotated[
        bool, typer.Option("--once", help="End with the first stall, with exit code 1.")
    ] = False,
    for_: Annotated[
        float | None,
        typer.Option(
            "--for", parser=make_seconds_parser(maximum=YEAR_S), help="End after this many seconds."
        ),
    ] = None,
    exec_: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="CMD",
            help="Run this with each event: VLLMOPS_EVENT, VLLMOPS_TEXT, VLLMOPS_BUNDLE and "
            "more in its environment, JSON on its input.",
            rich_help_panel="Actions",
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Post each event to this URL as JSON.",
            rich_help_panel="Actions",
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Repair a cache that is proven to be broken.",
            rich_help_panel="Actions",
        ),
    ] = False,
    heal: Annotated[
        bool,
        typer.Option(
            "--heal",
            help="Heal what is proven to be stuck, as vllmops heal does; at most 3 times a stall.",
            rich_help_panel="Actions",
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Restart a stalled instance, after its evidence is kept.",
            rich_help_panel="Actions",
        ),
    ] = False,
    rerun: Annotated[
        bool,
        typer.Option(
            "--rerun",
            help="With --restart: run background responses again that it ends, each once.",
            rich_help_panel="Actions",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            readable=False,
            help="Folder for the evidence [bundles/ in VLLMOPS_HOME].",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            parser=normalize_host_port,
            help="Answer /livez, /readyz and /startupz there, for probes.",
        ),
    ] = None,
    supervised: Annotated[bool, typer.Option(SUPERVISED, hidden=True)] = False,
    json_: Json = False,
) -> Result:
    """Report when a server stalls, and keep the evidence.

    A server stalls if requests are pending but no tokens are produced.

    On a stall it first keeps the evidence, a bundle with three samples of all
    stacks, caches, metrics, heartbeats and the log. Then it reports what is
    stuck, and later when the server goes on. An idle, paused, sleeping, loading
    or compiling server does not stall. While all is well, it reads a few files.

    Events are stalled, recovered, repaired, healed, restarting, failed, ended,
    away, ready and trouble. Exit code 1 if there was a stall or a failure.
    """
    receivers: list[Callable[[WatchEvent], None]] = []
    if exec_:
        receivers.append(CommandHook(exec_))
    if webhook:
        receivers.append(Webhook(webhook))
    server = resolve_server(target)
    if restart and server.record is None:
        raise make_foreign_error(server)
    plan = WatchPlan(
        folder=out.absolute() if out else require_safe_folder(resolve_home() / "bundles"),
        interval_s=interval,
        checks=checks,
        patience_s=patience,
        once=once,
        for_s=for_,
        repair=repair,
        heal=heal,
        restart=restart,
    )
    # Not an exception: evidence that is being written must get to the disk.
    stop = make_stop_event(signal.SIGINT)
    log = LogWriter(InstanceFolder(server.label)) if supervised else ScreenWriter()
    try:
        if send := opentelemetry.make_otlp_sender(os.environ):
            receivers.append(send)
    except VllmopsError as error:  # other programs may need those variables
        log.write(
            [error.message, f"  hint: {error.hint}"] if error.hint else [error.message], "WARNING"
        )
    messenger = Messenger(receivers, lambda text: log.write([text], "WARNING"))

    def report_event(event: WatchEvent) -> None:
        messenger.send(event)
        log.write(
            list(render_event(event)), "WARNING" if event.event in opentelemetry.LOUD else "INFO"
        )

    board = ProbeBoard(
        InstanceFolder(server.name) if server.name and server.record else None, interval
    )
    if listen:
        ProbeServer(parse_host_port(listen), board.get_current_result)
    began = time.monotonic()
    log.write([describe_watch(server, plan)], "INFO")
    pinned = bool(target and target.isdigit() and not server.record)
    subject = WatchedServer(server, follow=not (supervised or pinned), rerun=rerun)
    watching = Watch(
        subject, plan, report_event, stop=stop, flush=messenger.flush, publish=board.publish
    )
    diary = watching.run()
    messenger.flush()
    lasted_s = time.monotonic() - began
    data = {
        "server": server.label,
        "seconds": round(lasted_s, 3),
        "stalls": diary.counts["stalled"],
        "failures": diary.counts["failed"],
        "events": list(diary.events),
    }
    if stop.is_set() and not (once and diary.incident_count):
        raise VllmopsError(
            "interrupted",
            f"interrupted: {format_summary(diary, lasted_s)}",
            data=msgspec.to_builtins(data),
        )
    return Result(
        data,
        lambda: [format_summary(diary, lasted_s)],
        ExitCode.FAILED if diary.incident_count else ExitCode.OK,
    )


class ScreenWriter:
    """Standard error, with the time before each event."""

    def write(self, texts: list[str], level: str) -> None:
        now = time.strftime("%H:%M:%S")
        for number, line in enumerate(texts):
            output.print_to_stderr(
                f"{now if not number else ' ' * len(now)}  {line}", STYLES[level]
            )


STYLES = {"INFO": "", "WARNING": "bold yellow"}


class LogWriter:
    """The server's log, so that a stall appears among the server's own lines.

    Opened each time: the supervisor renames it when the server is started anew.
    """

    def __init__(self, folder: InstanceFolder) -> None:
        self.folder = folder

    def write(self, texts: list[str], level: str) -> None:
        head = f"({WATCH} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [watch]"
        text = "".join(f"{head} {line}\n" for line in texts)
        with suppress(OSError), self.folder.server_log.open("a", errors="backslashreplace") as file:
            file.write(text)


def describe_watch(server: Server, plan: WatchPlan) -> str:
    return (
        f"watching {server.label} every {plan.interval_s:g} s; a stall is {plan.patience_s:g} s "
        f"without a token while requests are pending, seen {plan.checks} times in a row"
    )


def render_event(event: WatchEvent) -> Iterator[str]:
    """An event for a person."""
    yield event.text
    if event.victims:
        yield f"  waiting for it: {', '.join(event.victims)}"
    if event.evidence:
        yield f"  seen: {event.evidence}"
    if event.next_step:
        yield f"  next: {event.next_step}"
    if event.reference:
        yield f"  see: {event.reference}"
    if event.bundle:
        yield f"  evidence: {event.bundle}"


def format_summary(diary: EventHistory, seconds: float) -> str:
    counts = [f"{diary.counts[kind]} {kind}" for kind in ("stalled", "recovered", "failed")]
    return f"watched for {format_duration(seconds)}: {', '.join(counts)}"
