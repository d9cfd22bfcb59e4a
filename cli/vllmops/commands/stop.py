"""``vllmops stop`` and ``vllmops restart``."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Annotated
from uuid import uuid4

import typer

from ..collect.agents import agent_files
from ..collect.machine.processes import format_process_name, is_alive
from ..servers.discovery import Server, list_servers, resolve_server
from ..servers.record import FAILED, InstanceFolder, InstanceRecord, InstanceState
from ..servers.supervisor_client import (
    NOTHING,
    STOP_TIMEOUT_S,
    ControlRequest,
    ControlSession,
    connect_supervisor,
    start_supervisor,
)
from ..supervision import launch
from ..supervision.handover import make_hand_over_error
from ..supervision.shutdown import END_S, drain_server, take_down
from ..support.errors import ExitCode, VllmopsError, make_usage_error
from ..support.home import format_user, require_safe_folder, resolve_home
from ..support.output import Json, Progress, Result, make_typer_app, print_result, print_to_stderr
from .options import Target, TargetArgument, make_seconds_parser
from .serve import build_instance_data, follow_instance, make_failure_error, render_summary

stop_app = make_typer_app()
restart_app = make_typer_app()

Timeout = Annotated[
    float,
    typer.Option(parser=make_seconds_parser(), help="Seconds for requests in flight to finish."),
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
@print_result
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
    server = resolve_server(name or target, allow_foreign=False)
    wait_s = 0.0 if force else timeout
    with Progress(time.time(), quiet=json_) as progress:
        if server.record is None:
            note = stop_unsupervised(server, wait_s, progress)
            data = {"name": None, "pid": server.pid, "state": "stopped", "note": note}
            return Result(data, lambda: [format_stopped(server.label, note)])
        session = ControlSession(
            InstanceFolder(server.record.name),
            connect_supervisor(InstanceFolder(server.record.name)),
        )
        session.send_request(ControlRequest(stop=wait_s))
        record = server.record
        for record in session.follow_records(time.monotonic() + wait_s + END_S):
            if record.state is InstanceState.STOPPING:
                progress.update(f"{record.name}: {record.note or record.state}")
    if record.state is InstanceState.FAILED:
        raise make_failure_error(record, InstanceFolder(record.name))
    return Result(build_instance_data(record), lambda: [format_stopped(record.name, record.note)])


def stop_unsupervised(server: Server, wait_s: float, progress: Progress) -> str:
    """Stop a server that has no supervisor; returns what happened to its requests.

    Raises:
        VllmopsError: ``target.other-user`` (exit code 4), or ``agent.gone``.
    """
    root = server.processes[0]  # others come and go
    if os.geteuid() not in {0, uid := agent_files.read_process_uid(root)}:
        raise VllmopsError(
            "target.other-user",
            f"{format_process_name(root)} belongs to {format_user(uid)}, and you are "
            f"{format_user(os.geteuid())}",
            f"sudo vllmops stop {server.pid}",
            exit_code=ExitCode.NOT_AUTHORISED,
        )
    progress.update(f"{server.label}: stopping")

    def show_progress(text: str) -> None:
        progress.update(f"{server.label}: {text}")

    note = drain_server(server.processes, server.url, wait_s, show_progress)
    remains = take_down(server.processes)
    return ", ".join(filter(None, (note, str(remains))))


def format_stopped(name: str, note: str) -> str:
    return f"{name} has stopped" + (f" ({note})" if note else "")


@restart_app.command(epilog="Example: vllmops restart demo")
@print_result
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
    record = find_record(name or target)
    folder = InstanceFolder(record.name)
    launch.prepare_home()  # on a full disk a server that works would end, and none would start
    if hand_over:
        if force or rerun:
            raise make_usage_error(
                "--hand-over ends no request, and the other two options do: give one way",
                f"vllmops restart {record.name} --hand-over",
            )
        return run_hand_over(folder, record, timeout, quiet=json_)
    if kept := not no_evidence and save_hang_evidence(record, quiet=json_):
        print_to_stderr(f"evidence: {kept}")
    if record.state is InstanceState.STOPPING:
        record = wait_until_down(folder, record, quiet=json_)
    fresh = start_instance(folder, record, rerun=rerun)
    session = fresh or ControlSession(folder, connect_supervisor(folder))
    if fresh is None:
        session.send_request(ControlRequest(restart=0.0 if force else timeout, rerun=rerun))
    before = record.started_at
    try:
        record = follow_instance(session, record, detach=True, log=False, quiet=json_)
    except VllmopsError as error:
        # The server died just before the request; its supervisor has cleaned up.
        over = folder.load_record()
        if fresh or error.code != "serve.failed" or over is None or over.started_at != before:
            raise
        fresh = start_instance(folder, over, rerun=rerun)
        if fresh is None:
            raise
        record = follow_instance(fresh, over, detach=True, log=False, quiet=json_)
    if record.state is InstanceState.STOPPED:
        raise VllmopsError("restart.stopped", f"{record.name} was stopped while it started")
    return Result(
        {**build_instance_data(record), "evidence": kept or None}, lambda: render_summary(record)
    )


def run_hand_over(
    folder: InstanceFolder, previous_record: InstanceRecord, timeout: float, *, quiet: bool
) -> Result:
    """Have a second server take over; raises VllmopsError: ``restart.no-hand-over``."""
    if previous_record.state is not InstanceState.READY:
        raise VllmopsError(
            "restart.no-hand-over",
            f"{previous_record.name} is {previous_record.state}: only a server that is ready hands "
            "over",
            f"vllmops restart {previous_record.name}",
        )
    session = ControlSession(folder, connect_supervisor(folder))
    record, run = previous_record, uuid4().hex
    session.send_request(ControlRequest(hand_over=timeout, run=run))
    with Progress(time.time(), quiet=quiet) as progress:
        for record in session.follow_records():
            if record.hand_over_run != run:  # somebody else's, which comes first
                continue
            if record.hand_over.startswith(FAILED):
                session.close()
                raise make_hand_over_error(record.name, record.hand_over.removeprefix(FAILED))
            if not record.hand_over:
                session.close()
                break
            progress.update(f"{record.name}: {record.hand_over}")
    if record.state.is_over:
        raise VllmopsError("restart.stopped", f"{record.name} was stopped while it started")
    note = [f"  first server: {record.note}"] if record.note else []
    return Result(
        {**build_instance_data(record), "evidence": None}, lambda: [*render_summary(record), *note]
    )


def save_hang_evidence(record: InstanceRecord, *, quiet: bool) -> str:
    """Write a bundle of a server that hangs; returns where it is, nothing of one that does not."""
    if record.state is not InstanceState.READY:
        return ""
    # Slow to import, and rarely needed.
    from ..actions.unhealable_stalls import collect_samples  # noqa: PLC0415
    from ..rules import progress  # noqa: PLC0415
    from ..watch.watch_target import WatchedServer  # noqa: PLC0415

    try:
        server = resolve_server(record.name)
    except VllmopsError:  # it died together with its supervisor, as when a machine boots anew
        return ""
    looks = collect_samples(server)
    if not progress.find_stalls(looks):
        return ""
    subject = WatchedServer(server, follow=False)
    with Progress(time.time(), quiet=quiet) as progress_:
        progress_.update(f"{record.name} hangs: keeping the evidence")
        subject.take_snapshot(
            looks, progress.PATIENCE_S, threading.Event(), needs_all_evidence=True
        )
        try:
            return str(subject.save_evidence(require_safe_folder(resolve_home() / "bundles")))
        except VllmopsError as error:
            progress_.update(f"no evidence: {error.message}")
            return ""


def wait_until_down(
    folder: InstanceFolder, record: InstanceRecord, *, quiet: bool
) -> InstanceRecord:
    """Wait until an instance is taken down; returns its record."""
    with Progress(time.time(), quiet=quiet) as progress, suppress(VllmopsError):
        session = ControlSession(folder, connect_supervisor(folder))
        for now in session.follow_records(time.monotonic() + END_S):
            if now.state not in {
                InstanceState.STOPPING,
                InstanceState.STOPPED,
                InstanceState.FAILED,
            }:
                break
            progress.update(f"{now.name}: {now.note or now.state}")
        session.close()
    return folder.load_record() or record


def start_instance(
    folder: InstanceFolder, record: InstanceRecord, *, rerun: bool
) -> ControlSession | None:
    """Start an instance that has no process; None if it has one, or if another command holds it.

    Raises:
        VllmopsError: as `launch.require_usable_port` and `launch.claim_requested_port` do, or
            ``home.full``.
    """
    lock = folder.take_lock()
    if lock is None:
        return None
    if not record.state.is_over and any(map(is_alive, record.processes)):
        os.close(lock)
        return None
    held = [lock]
    port = None
    try:
        if record.port is not None:
            launch.require_usable_port(record.host, record.port)
            port = launch.claim_requested_port(record.host, record.port)
            held.append(port)
        elif record.uds:
            launch.require_usable_socket(record.uds)
        folder.save_record(launch.make_restart_record(record, rerun=rerun))
    except (VllmopsError, OSError) as error:
        for descriptor in held:
            os.close(descriptor)
        raise launch.make_home_full_error(error) if isinstance(error, OSError) else error from None
    return ControlSession(folder, start_supervisor(folder, lock, NOTHING, launch=True, port=port))


def find_record(target: str | None) -> InstanceRecord:
    """The record of an instance, even if it has ended.

    Raises:
        VllmopsError: ``restart.stranger``, or what `resolve_server` raises.
    """
    target = target or os.environ.get("VLLMOPS_TARGET")
    for server in list_servers():
        if server.record and server.name == target:
            return server.record
    server = resolve_server(target)
    if server.record is None:
        raise VllmopsError(
            "restart.stranger",
            f"vllmops did not start {server.label}, so it does not know the command to start it",
            f"vllmops stop {server.label}, then vllmops serve {server.model or 'MODEL'}",
        )
    return server.record
