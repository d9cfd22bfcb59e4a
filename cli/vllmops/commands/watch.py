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

from .. import output
from ..diagnose.progress import PATIENCE_S
from ..diagnose.vigil import CHECKS, INTERVAL_S
from ..errors import Exit, VllmopsError
from ..home import home, own
from ..instances.logs import WATCH
from ..instances.record import Folder
from ..instances.servers import Server, resolve
from ..output import Command, Json, Result, span, typer_app
from ..protocol.watch import Event
from ..streams import stopped_by
from ..watch import otlp
from ..watch.board import Board, Listener
from ..watch.messenger import Hook, Messenger, Webhook
from ..watch.watch import Diary, Plan, Watch
from ..watch.watched import Watched, stranger
from .options import YEAR_S, Target, count, host_port, listening, seconds
from .several import remote

SUPERVISED = "--supervised"


class Beside(Command):
    """A watch beside a server: after ``--supervised NAME``, its options are those of the record.

    Everybody on the machine sees the arguments of a process, and the URL of a webhook is a secret.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == [SUPERVISED] and len(args) == 2:
            record = Folder(args[1]).read()
            args = [SUPERVISED, "--target", args[1], *((record and record.watch) or ())]
        return super().parse_args(ctx, args)


app = typer_app()


@app.command(cls=Beside, epilog="Example: vllmops watch -t demo --exec 'mail -s vllmops ops'")
@remote
def watch(
    *,
    target: Target = None,
    interval: Annotated[
        float,
        typer.Option(parser=seconds(0.1), help="Seconds between checks.", rich_help_panel="Stalls"),
    ] = INTERVAL_S,
    checks: Annotated[
        int,
        typer.Option(
            parser=count(),
            help="Number of checks in a row without progress.",
            rich_help_panel="Stalls",
        ),
    ] = CHECKS,
    patience: Annotated[
        float,
        typer.Option(
            parser=seconds(1),
            help="Seconds without a token before it is a stall.",
            rich_help_panel="Stalls",
        ),
    ] = PATIENCE_S,
    once: Annotated[
        bool, typer.Option("--once", help="End with the first stall, with exit code 1.")
    ] = False,
    for_: Annotated[
        float | None,
        typer.Option("--for", parser=seconds(most=YEAR_S), help="End after this many seconds."),
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
            parser=listening, help="Answer /livez, /readyz and /startupz there, for probes."
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
    receivers: list[Callable[[Event], None]] = []
    if exec_:
        receivers.append(Hook(exec_))
    if webhook:
        receivers.append(Webhook(webhook))
    server = resolve(target)
    if restart and server.record is None:
        raise stranger(server)
    plan = Plan(
        folder=out.absolute() if out else own(home() / "bundles"),
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
    stop = stopped_by(signal.SIGINT)
    log = Log(Folder(server.label)) if supervised else Screen()
    try:
        if send := otlp.collector(os.environ):
            receivers.append(send)
    except VllmopsError as error:  # other programs may need those variables
        log.write(
            [error.message, f"  hint: {error.hint}"] if error.hint else [error.message], "WARNING"
        )
    messenger = Messenger(receivers, lambda text: log.write([text], "WARNING"))

    def tell(event: Event) -> None:
        messenger.send(event)
        log.write(list(lines(event)), "WARNING" if event.event in otlp.LOUD else "INFO")

    board = Board(Folder(server.name) if server.name and server.record else None, interval)
    if listen:
        Listener(host_port(listen), board.last)
    began = time.monotonic()
    log.write([beginning(server, plan)], "INFO")
    pinned = bool(target and target.isdigit() and not server.record)
    subject = Watched(server, follow=not (supervised or pinned), rerun=rerun)
    watching = Watch(subject, plan, tell, stop=stop, flush=messenger.flush, publish=board.show)
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
    if stop.is_set() and not (once and diary.bad):
        raise VllmopsError(
            "interrupted",
            f"interrupted: {summary(diary, lasted_s)}",
            data=msgspec.to_builtins(data),
        )
    return Result(
        data,
        lambda: [summary(diary, lasted_s)],
        Exit.FAILED if diary.bad else Exit.OK,
    )


class Screen:
    """Standard error, with the time before each event."""

    def write(self, texts: list[str], level: str) -> None:
        now = time.strftime("%H:%M:%S")
        for number, line in enumerate(texts):
            output.say(f"{now if not number else ' ' * len(now)}  {line}", STYLES[level])


STYLES = {"INFO": "", "WARNING": "bold yellow"}


class Log:
    """The server's log, so that a stall appears among the server's own lines.

    Opened each time: the supervisor renames it when the server is started anew.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def write(self, texts: list[str], level: str) -> None:
        head = f"({WATCH} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [watch]"
        text = "".join(f"{head} {line}\n" for line in texts)
        with suppress(OSError), self.folder.log.open("a", errors="backslashreplace") as file:
            file.write(text)


def beginning(server: Server, plan: Plan) -> str:
    return (
        f"watching {server.label} every {plan.interval_s:g} s; a stall is {plan.patience_s:g} s "
        f"without a token while requests are pending, seen {plan.checks} times in a row"
    )


def lines(event: Event) -> Iterator[str]:
    """An event for a person."""
    yield event.text
    if event.victims:
        yield f"  waiting for it: {', '.join(event.victims)}"
    if event.evidence:
        yield f"  seen: {event.evidence}"
    if event.next:
        yield f"  next: {event.next}"
    if event.reference:
        yield f"  see: {event.reference}"
    if event.bundle:
        yield f"  evidence: {event.bundle}"


def summary(diary: Diary, seconds: float) -> str:
    counts = [f"{diary.counts[kind]} {kind}" for kind in ("stalled", "recovered", "failed")]
    return f"watched for {span(seconds)}: {', '.join(counts)}"
