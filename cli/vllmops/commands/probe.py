"""``vllmops probe``: whether a server lives, is ready, has started.

`quick_probe` answers the usual question without this module.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Annotated

import typer

from ..model.probe import WORDS, ProbeResult, judge_state
from ..observe import server_snapshot
from ..rules.progress import PATIENCE_S, find_stalls
from ..servers.discovery import resolve_server
from ..servers.quick_probe import read_verdict as of_instance
from ..servers.record import InstanceFolder, InstanceState
from ..support.errors import ExitCode, VllmopsError, make_usage_error
from ..support.output import Json, Result, make_typer_app, print_to_stderr
from ..support.streams import make_stop_event
from ..watch import liveness as verdicts
from ..watch.probe_server import PATHS, ProbeServer
from .multi_target import allow_remote_target
from .options import Target, normalize_host_port, parse_host_port

app = make_typer_app()

FRESH_S = 0.5  # several probes of one moment share a look
GONE = {"target.over", "target.unknown"}  # other errors say nothing of the server's life


@app.command(epilog="Example: vllmops probe --readiness -t demo")
@allow_remote_target
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
            parser=normalize_host_port,
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
        raise make_usage_error(
            "give one of --liveness, --readiness, --startup and --listen",
            "vllmops probe --readiness",
        )
    if listen:
        raise serve_probes(target, parse_host_port(listen))
    label, verdict = judge_server(target)
    (kind,) = kinds
    return Result(
        {"server": label, **verdict._asdict()},
        lambda: [f"{label} is {verdict.format_answer(kind)}"],
        ExitCode.OK if verdict.has_passed(kind) else ExitCode.FAILED,
    )


def judge_server(target: str | None) -> tuple[str, ProbeResult]:
    """A server's label, and the verdict on it now.

    Raises:
        VllmopsError: as `resolve_server` does, but for an instance that has ended.
    """
    try:
        server = resolve_server(target)
    except VllmopsError as error:
        if error.code != "target.over" or target is None:
            raise
        return target, judge_state(InstanceState.STOPPED)._replace(reason=error.message)
    if server.record and (verdict := of_instance(InstanceFolder(server.record.name).path)):
        return server.label, verdict
    seen = server_snapshot.observe_server(server, time.monotonic())
    over = not server.processes
    stall = verdicts.describe_likely_stall(find_stalls([seen], PATIENCE_S))
    return server.label, verdicts.judge_server(
        server, seen, is_over=over, stall=stall, note=server.describe_silent_nodes()
    )


def serve_probes(target: str | None, address: tuple[str, int]) -> VllmopsError:
    """Answer over HTTP until Ctrl-C or SIGTERM.

    Raises:
        VllmopsError: as `judge_server` and `ProbeServer` do.
    """
    label, first = judge_server(target)
    # By its name an instance is found when its pids are new. The label of a URL lacks what may be
    # secret.
    again = target if target and "://" in target else label
    lock, last = threading.Lock(), (0.0, first)
    lost_at: float | None = None  # since when a server on another machine can't be reached

    def judge_now() -> ProbeResult:
        nonlocal last, lost_at
        with lock:
            if time.monotonic() - last[0] > FRESH_S:
                try:
                    verdict, lost_at = judge_server(again)[1], None
                except VllmopsError as error:
                    at = time.monotonic()
                    lost_at = (lost_at or at) if error.code == "admin.unreachable" else None
                    lost = lost_at is not None and at - lost_at >= PATIENCE_S
                    known = (
                        judge_state(InstanceState.FAILED) if lost or error.code in GONE else last[1]
                    )
                    verdict = known._replace(ready=False, reason=error.message)
                last = time.monotonic(), verdict
            return last[1]

    ProbeServer(address, judge_now)
    print_to_stderr(f"{label}: {', '.join(PATHS)} at {address[0]}:{address[1]}")
    make_stop_event(signal.SIGINT, signal.SIGTERM).wait()
    return VllmopsError("interrupted", "interrupted")
