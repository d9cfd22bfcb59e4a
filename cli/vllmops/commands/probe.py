"""``vllmops probe``: whether a server lives, is ready, has started.

`quick_probe` answers the usual question without this module.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Annotated

import typer

from ..diagnose.progress import PATIENCE_S, stalls
from ..doctor import examine
from ..errors import Exit, VllmopsError, usage
from ..instances.record import Folder, State
from ..instances.servers import resolve
from ..output import Json, Result, say, typer_app
from ..protocol.probe import WORDS, Verdict, judge
from ..quick_probe import verdict as of_instance
from ..streams import stopped_by
from ..watch import verdict as verdicts
from ..watch.board import PATHS, Listener
from .options import Target, host_port, listening
from .several import remote

app = typer_app()

FRESH_S = 0.5  # several probes of one moment share a look
GONE = {"target.over", "target.unknown"}  # other errors say nothing of the server's life


@app.command(epilog="Example: vllmops probe --readiness -t demo")
@remote
def probe(
    target: Target = None,
    liveness: Annotated[
        bool, typer.Option("--liveness", help="Whether it lives; if not, only a restart helps.")
    ] = False,
    readiness: Annotated[
        bool, typer.Option("--readiness", help="Whether to send new requests.")
    ] = False,
    startup: Annotated[bool, typer.Option("--startup", help="Whether it has come up.")] = False,
    listen: Annotated[
        str | None,
        typer.Option(
            parser=listening,
            help="Answer /livez, /readyz and /startupz there over HTTP, until Ctrl-C.",
        ),
    ] = None,
    json_: Json = False,
) -> Result:
    """Say whether a server lives, is ready, or has started.

    Exit code 0 for yes, 1 for no. Requests and tokens decide, not /health. It
    does not live if it has ended, or if `vllmops watch` is sure of a stall and
    has kept the evidence; so --liveness needs a watch, as `serve --probe-port`
    starts it. It is not ready while it starts, drains, is paused or asleep, or
    seems to stall.
    """
    kinds = [
        kind for kind, asked in zip(WORDS, (liveness, readiness, startup), strict=True) if asked
    ]
    if len(kinds) + bool(listen) != 1:
        raise usage(
            "give one of --liveness, --readiness, --startup and --listen",
            "vllmops probe --readiness",
        )
    if listen:
        raise serving(target, host_port(listen))
    label, verdict = look(target)
    (kind,) = kinds
    return Result(
        {"server": label, **verdict._asdict()},
        lambda: [f"{label} is {verdict.line(kind)}"],
        Exit.OK if verdict.says(kind) else Exit.FAILED,
    )


def look(target: str | None) -> tuple[str, Verdict]:
    """A server's label, and the verdict on it now.

    Raises:
        VllmopsError: as `resolve` does, but for an instance that has ended.
    """
    try:
        server = resolve(target)
    except VllmopsError as error:
        if error.code != "target.over" or target is None:
            raise
        return target, judge(State.STOPPED)._replace(reason=error.message)
    if server.record and (verdict := of_instance(Folder(server.record.name).path)):
        return server.label, verdict
    seen = examine.look(server, time.monotonic())
    over = not server.processes
    stall = verdicts.likely(stalls([seen], PATIENCE_S))
    return server.label, verdicts.verdict(server, seen, over=over, stall=stall, note=server.note())


def serving(target: str | None, place: tuple[str, int]) -> VllmopsError:
    """Answer over HTTP until Ctrl-C or SIGTERM.

    Raises:
        VllmopsError: as `look` and `Listener` do.
    """
    label, first = look(target)
    # By its name an instance is found when its pids are new. The label of a URL lacks what may be
    # secret.
    again = target if target and "://" in target else label
    lock, last = threading.Lock(), (0.0, first)
    lost_at: float | None = None  # since when a server on another machine can't be reached

    def now() -> Verdict:
        nonlocal last, lost_at
        with lock:
            if time.monotonic() - last[0] > FRESH_S:
                try:
                    verdict, lost_at = look(again)[1], None
                except VllmopsError as error:
                    at = time.monotonic()
                    lost_at = (lost_at or at) if error.code == "admin.unreachable" else None
                    lost = lost_at is not None and at - lost_at >= PATIENCE_S
                    known = judge(State.FAILED) if lost or error.code in GONE else last[1]
                    verdict = known._replace(ready=False, reason=error.message)
                last = time.monotonic(), verdict
            return last[1]

    Listener(place, now)
    say(f"{label}: {', '.join(PATHS)} at {place[0]}:{place[1]}")
    stopped_by(signal.SIGINT, signal.SIGTERM).wait()
    return VllmopsError("interrupted", "interrupted")
