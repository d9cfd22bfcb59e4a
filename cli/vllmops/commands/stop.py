"""``vllmops stop`` and ``vllmops restart``."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Annotated
from uuid import uuid4

import typer

from ..errors import Exit, VllmopsError, usage
from ..home import home, own, user
from ..host.processes import alive
from ..instances import launch
from ..instances.control import NOTHING, STOP_TIMEOUT_S, Request, Session, connect, start_supervisor
from ..instances.handover import refusal
from ..instances.record import FAILED, Folder, Record, State
from ..instances.servers import Server, find, resolve
from ..instances.takedown import END_S, drain, take_down
from ..output import Json, Progress, Result, command, say, typer_app
from ..rpc import agent
from .options import Target, TargetArgument, seconds
from .serve import failed, instance, stay, summary

stop_app = typer_app()
restart_app = typer_app()

Timeout = Annotated[
    float,
    typer.Option(parser=seconds(), help="Seconds for requests in flight to finish."),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Do not wait for requests in flight.")]
Rerun = Annotated[
    bool, typer.Option("--rerun", help="Run background responses again that the restart ends.")
]
HandOver = Annotated[
    bool,
    typer.Option("--hand-over", help="Start the second server first; no request is lost."),
]
NoEvidence = Annotated[
    bool, typer.Option("--no-evidence", help="Do not keep the evidence of a server that hangs.")
]


@stop_app.command(epilog="Example: vllmops stop demo --timeout 120")
@command
def stop(
    name: TargetArgument = None,
    target: Target = None,
    timeout: Timeout = STOP_TIMEOUT_S,
    force: Force = False,
    json_: Json = False,
) -> Result:
    """Drain a server, then stop it.

    New requests get 503. Requests in flight have --timeout seconds to finish; then every process
    is stopped, and the port and the shared memory are freed. It also works on a server that
    vllmops did not start.
    """
    server = resolve(name or target, strangers=False)
    wait_s = 0.0 if force else timeout
    with Progress(time.time(), quiet=json_) as progress:
        if server.record is None:
            note = stop_stranger(server, wait_s, progress)
            data = {"name": None, "pid": server.pid, "state": "stopped", "note": note}
            return Result(data, lambda: [stopped(server.label, note)])
        session = Session(Folder(server.record.name), connect(Folder(server.record.name)))
        session.send(Request(stop=wait_s))
        record = server.record
        for record in session.records(time.monotonic() + wait_s + END_S):
            if record.state is State.STOPPING:
                progress.update(f"{record.name}: {record.note or record.state}")
    if record.state is State.FAILED:
        raise failed(record, Folder(record.name))
    return Result(instance(record), lambda: [stopped(record.name, record.note)])


def stop_stranger(server: Server, wait_s: float, progress: Progress) -> str:
    """Stop a server that has no supervisor; returns what happened to its requests.

    Raises:
        VllmopsError: ``target.other-user`` (exit code 4), or ``agent.gone``.
    """
    root = server.processes[0]  # others come and go
    if os.geteuid() not in {0, uid := agent.owner(root)}:
        raise VllmopsError(
            "target.other-user",
            f"{agent.name(root)} belongs to {user(uid)}, and you are {user(os.geteuid())}",
            f"sudo vllmops stop {server.pid}",
            exit_code=Exit.NOT_AUTHORISED,
        )
    progress.update(f"{server.label}: stopping")

    def tell(text: str) -> None:
        progress.update(f"{server.label}: {text}")

    note = drain(server.processes, server.url, wait_s, tell)
    remains = take_down(server.processes)
    return ", ".join(filter(None, (note, str(remains))))


def stopped(name: str, note: str) -> str:
    return f"{name} has stopped" + (f" ({note})" if note else "")


@restart_app.command(epilog="Example: vllmops restart demo")
@command
def restart(
    name: TargetArgument = None,
    target: Target = None,
    timeout: Timeout = STOP_TIMEOUT_S,
    force: Force = False,
    rerun: Rerun = False,
    hand_over: HandOver = False,
    no_evidence: NoEvidence = False,
    json_: Json = False,
) -> Result:
    """Stop a server and start it again with the same command.

    It stops the server as `stop` does, and uses the recorded command. An instance that has
    stopped or failed is also started again, detached. If a server hangs, a bundle with the
    evidence is written first. With --rerun, a background response that ran when the server went
    is run again from its stored input, once.

    With --hand-over a second server is started first, where there is memory for both. Once it is
    ready, it takes over the port, and the first one finishes its requests. If the second one
    fails, the first one serves on.
    """
    record = recorded(name or target)
    folder = Folder(record.name)
    launch.ready_home()  # on a full disk a server that works would end, and none would start
    if hand_over:
        if force or rerun:
            raise usage(
                "--hand-over ends no request, and the other two options do: give one way",
                f"vllmops restart {record.name} --hand-over",
            )
        return handed_over(folder, record, timeout, quiet=json_)
    if kept := not no_evidence and kept_of(record, quiet=json_):
        say(f"evidence: {kept}")
    if record.state is State.STOPPING:
        record = settled(folder, record, quiet=json_)
    fresh = started(folder, record, rerun=rerun)
    session = fresh or Session(folder, connect(folder))
    if fresh is None:
        session.send(Request(restart=0.0 if force else timeout, rerun=rerun))
    before = record.started_at
    try:
        record = stay(session, record, detach=True, log=False, quiet=json_)
    except VllmopsError as error:
        # The server died just before the request; its supervisor has cleaned up.
        over = folder.read()
        if fresh or error.code != "serve.failed" or over is None or over.started_at != before:
            raise
        fresh = started(folder, over, rerun=rerun)
        if fresh is None:
            raise
        record = stay(fresh, over, detach=True, log=False, quiet=json_)
    if record.state is State.STOPPED:
        raise VllmopsError("restart.stopped", f"{record.name} was stopped while it started")
    return Result({**instance(record), "evidence": kept or None}, lambda: summary(record))


def handed_over(folder: Folder, before: Record, timeout: float, *, quiet: bool) -> Result:
    """Have a second server take over; raises VllmopsError: ``restart.no-hand-over``."""
    if before.state is not State.READY:
        raise VllmopsError(
            "restart.no-hand-over",
            f"{before.name} is {before.state}: only a server that is ready hands over",
            f"vllmops restart {before.name}",
        )
    session = Session(folder, connect(folder))
    record, run = before, uuid4().hex
    session.send(Request(hand_over=timeout, run=run))
    with Progress(time.time(), quiet=quiet) as progress:
        for record in session.records():
            if record.hand_over_run != run:  # somebody else's, which comes first
                continue
            if record.hand_over.startswith(FAILED):
                session.close()
                raise refusal(record.name, record.hand_over.removeprefix(FAILED))
            if not record.hand_over:
                session.close()
                break
            progress.update(f"{record.name}: {record.hand_over}")
    if record.state.over:
        raise VllmopsError("restart.stopped", f"{record.name} was stopped while it started")
    note = [f"  first server: {record.note}"] if record.note else []
    return Result({**instance(record), "evidence": None}, lambda: [*summary(record), *note])


def kept_of(record: Record, *, quiet: bool) -> str:
    """Write a bundle of a server that hangs; returns where it is, nothing of one that does not."""
    if record.state is not State.READY:
        return ""
    # Slow to import, and rarely needed.
    from ..diagnose import progress  # noqa: PLC0415
    from ..heal.beyond import looked  # noqa: PLC0415
    from ..watch.watched import Watched  # noqa: PLC0415

    try:
        server = resolve(record.name)
    except VllmopsError:  # it died together with its supervisor, as when a machine boots anew
        return ""
    looks = looked(server)
    if not progress.stalls(looks):
        return ""
    subject = Watched(server, follow=False)
    with Progress(time.time(), quiet=quiet) as progress_:
        progress_.update(f"{record.name} hangs: keeping the evidence")
        subject.capture(looks, progress.PATIENCE_S, threading.Event(), sure=True)
        try:
            return str(subject.save(own(home() / "bundles")))
        except VllmopsError as error:
            progress_.update(f"no evidence: {error.message}")
            return ""


def settled(folder: Folder, record: Record, *, quiet: bool) -> Record:
    """Wait until an instance is taken down; returns its record."""
    with Progress(time.time(), quiet=quiet) as progress, suppress(VllmopsError):
        session = Session(folder, connect(folder))
        for now in session.records(time.monotonic() + END_S):
            if now.state not in {State.STOPPING, State.STOPPED, State.FAILED}:
                break
            progress.update(f"{now.name}: {now.note or now.state}")
        session.close()
    return folder.read() or record


def started(folder: Folder, record: Record, *, rerun: bool) -> Session | None:
    """Start an instance that has no process; None if it has one, or if another command holds it.

    Raises:
        VllmopsError: as `launch.check_port` and `launch.claimed` do, or ``home.full``.
    """
    lock = folder.lock()
    if lock is None:
        return None
    if not record.state.over and any(map(alive, record.processes)):
        os.close(lock)
        return None
    held = [lock]
    port = None
    try:
        if record.port is not None:
            launch.check_port(record.host, record.port)
            port = launch.claimed(record.host, record.port)
            held.append(port)
        elif record.uds:
            launch.check_socket(record.uds)
        folder.write(launch.again(record, rerun=rerun))
    except (VllmopsError, OSError) as error:
        for descriptor in held:
            os.close(descriptor)
        raise launch.full(error) if isinstance(error, OSError) else error from None
    return Session(folder, start_supervisor(folder, lock, NOTHING, launch=True, port=port))


def recorded(target: str | None) -> Record:
    """The record of an instance, even if it has ended.

    Raises:
        VllmopsError: ``restart.stranger``, or what `resolve` raises.
    """
    target = target or os.environ.get("VLLMOPS_TARGET")
    for server in find():
        if server.record and server.name == target:
            return server.record
    server = resolve(target)
    if server.record is None:
        raise VllmopsError(
            "restart.stranger",
            f"vllmops did not start {server.label}, so it does not know the command to start it",
            f"vllmops stop {server.label}, then vllmops serve {server.model or 'MODEL'}",
        )
    return server.record
