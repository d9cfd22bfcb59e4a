"""``vllmops serve``: start a vLLM server and supervise it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import typer

from .. import demo as demos
from ..collect.machine import cuda_core_dumps, name_collision
from ..collect.machine.server_address import find_option, format_url
from ..model.environment import (
    CHECKED,
    KeyringSource,
    locate_default_keyring,
    redact_environment,
)
from ..model.package_versions import read_package_versions
from ..rules import package_versions
from ..servers import logs
from ..servers.record import Failure, InstanceFolder, InstanceRecord, InstanceState
from ..servers.supervisor_client import (
    STOP_TIMEOUT_S,
    ControlRequest,
    ControlSession,
    start_supervisor,
)
from ..supervision import launch
from ..supervision.systemd_notify import SystemdNotifier
from ..support.errors import VllmopsError
from ..support.files import make_not_written_error, require_writable
from ..support.home import resolve_home
from ..support.output import (
    Json,
    OrderTrackingCommand,
    Progress,
    Result,
    VerbatimText,
    format_duration,
    make_typer_app,
    print_parts,
    print_result,
    print_to_stderr,
)
from . import serve_config, serve_options
from .options import parse_host_port
from .serve_environment import (
    find_serve_keyring,
    format_variables,
    make_admin_variables,
    make_carrier_variables,
    make_compaction_variables,
    make_keyring_variables,
    make_patch_variables,
    make_store_variables,
    make_usage_error,
    make_websocket_variables,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

BEHIND = "vllmops.behind"
LOG_POLL_S = 0.2
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT)


class PassThroughCommand(OrderTrackingCommand):
    """Keeps the arguments after ``--``, which are vLLM's, away from this parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        behind = ctx.meta[BEHIND] = tuple(args[cut + 1 :])
        rest = super().parse_args(ctx, [*fill_coredump_folder(args[:cut])])
        serve_config.drop_overridden_keys(ctx, behind)
        return rest


def fill_coredump_folder(args: Sequence[str]) -> Iterator[str]:
    """The arguments; ``--cuda-coredump`` without a directory gets one in the state directory."""
    for word, following in zip(args, (*args[1:], "-"), strict=False):
        alone = word == serve_options.CUDA and following.startswith("-")
        yield f"{serve_options.CUDA}={resolve_home() / 'cuda'}" if alone else word


app = make_typer_app()


@app.command(
    cls=PassThroughCommand,
    epilog="Example: vllmops serve Qwen/Qwen3-0.6B --name qwen --detach -- --max-model-len 8192",
)
@print_result
def serve(
    ctx: typer.Context,
    model: serve_options.Model = None,
    detach: serve_options.Detach = False,
    name: serve_options.Name = None,
    host: serve_options.Host = None,
    port: serve_options.Port = None,
    config: serve_options.Config = None,
    dry_run: serve_options.DryRun = False,
    toml: serve_options.Toml = False,
    demo: serve_options.Demo = None,
    env: serve_options.Env = None,
    no_patch: serve_options.NoPatch = None,
    cuda_coredump: serve_options.CudaCoredump = None,
    quiet: serve_options.Quiet = False,
    store: serve_options.Store = None,
    store_max_size: serve_options.StoreMaxSize = None,
    store_max_per_key: serve_options.StoreMaxPerKey = None,
    store_ttl: serve_options.StoreTtl = None,
    keyring: serve_options.Keyring = None,
    carrier: serve_options.Carrier = None,
    carrier_ttl: serve_options.CarrierTtl = None,
    compaction_prompt: serve_options.CompactionPrompt = None,
    ws_max_message: serve_options.WsMaxMessage = None,
    ws_idle: serve_options.WsIdle = None,
    ws_max_requests: serve_options.WsMaxRequests = None,
    ws_max_connections: serve_options.WsMaxConnections = None,
    admin_token: serve_options.AdminToken = None,
    watch: serve_options.Watch = False,
    watch_exec: serve_options.WatchExec = None,
    watch_webhook: serve_options.WatchWebhook = None,
    watch_repair: serve_options.WatchRepair = False,
    watch_heal: serve_options.WatchHeal = False,
    watch_restart: serve_options.WatchRestart = False,
    watch_rerun: serve_options.WatchRerun = False,
    probe_port: serve_options.ProbePort = None,
    json_: Json = False,
) -> Result:
    """Launch a vLLM server and supervise all its processes.

    It stays in the foreground; when it ends, for whatever reason, the server ends too.
    With --detach the server keeps running, and `vllmops stop` ends it. Everything after -- goes to
    vLLM unchanged.
    """
    if toml and not dry_run:
        raise make_usage_error("--toml prints a file for --config: use it together with --dry-run")
    file = serve_config.get_config(ctx)
    given = [*file.env, *(env or [])]
    cuda = (
        cuda_core_dumps.build_coredump_environment(cuda_coredump.absolute())
        if cuda_coredump
        else {}
    )
    behind = (*file.arguments, *ctx.meta[BEHIND])
    env = [
        *format_variables(cuda),
        *given,
        *make_patch_variables(no_patch or []),
        *make_store_variables(store, store_max_size, store_max_per_key, store_ttl),
    ]
    keys = find_serve_keyring(keyring, env)
    require_usable_keyring(keys)
    env += [
        *make_keyring_variables(keys),
        *make_carrier_variables(carrier, carrier_ttl, env),
        *make_admin_variables(admin_token),
        *make_compaction_variables(compaction_prompt),
        *make_websocket_variables(ws_max_message, ws_idle, ws_max_requests, ws_max_connections),
    ]
    order = build_order(model, demo, name, host, port, detach, env, behind)
    watcher = make_watch_arguments(
        watch,
        watch_exec,
        watch_webhook,
        probe_port,
        repair=watch_repair,
        heal=watch_heal,
        restart=watch_restart,
        rerun=watch_rerun,
    )
    if probe_port and parse_host_port(probe_port)[1] == order.port:
        raise make_usage_error(f"--port and --probe-port are both {order.port}: give two ports")
    order = dataclasses.replace(order, watch=watcher)
    if demo:  # of a dry run, too, whose command must work
        build_demo_model(demo, quiet=json_)
    environment = {**os.environ, **order.environment}
    if dry_run:
        require_valid_settings(environment)
        planned = launch.preview_record(order)
        if not toml:
            return Result(build_instance_data(planned), lambda: render_shell_command(planned))
        text = serve_config.format_config(ctx, given, behind)
        return Result(
            {**build_instance_data(planned), "config": text}, lambda: [VerbatimText(text)]
        )
    from vllmops_responses import serve_settings  # noqa: PLC0415 - slow, and a dry run opens no store

    launch.validate_options(order)
    if probe_port:
        launch.require_usable_port(*parse_host_port(probe_port))
    serve_settings.validate_store(environment, order.arguments)
    if line := name_collision.describe_namesakes():
        print_to_stderr(line, "yellow")
    launch.prepare_home()
    if cuda_coredump:
        create_coredump_folder(cuda_coredump)
    for row in package_versions.find_bad_versions(read_package_versions()):
        print_to_stderr(
            f"{row.package} {row.versions} is installed: {row.title}; {row.next_step}", "yellow"
        )
    serve_settings.create_default_keyring(order.environment, quiet=json_)
    reserved = launch.reserve_instance(order)
    for line in describe_port_claims(reserved):
        print_to_stderr(line, "yellow")
    request = ControlRequest(hold=not detach)
    control = start_supervisor(
        reserved.folder, reserved.lock, request, launch=True, port=reserved.port
    )
    session = ControlSession(reserved.folder, control, request)
    record = follow_instance(session, reserved.record, detach=detach, log=not quiet, quiet=json_)
    if detach and record.state is InstanceState.STOPPED:
        raise VllmopsError(
            "serve.stopped",
            f"{record.name} was stopped before it was ready",
            f"vllmops restart {record.name} starts it again",
        )
    return Result(build_instance_data(record), lambda: render_summary(record) if detach else ())


def require_usable_keyring(keys: KeyringSource) -> None:
    """Refuse a keyring or a key that can't be loaded; the default keyring may be missing.

    Args:
        keys: where the server will find its keys.

    Raises:
        VllmopsError: as `serve_settings.load_keys`.
    """
    if keys.path is None or keys.path != locate_default_keyring() or keys.path.exists():
        from vllmops_responses import serve_settings  # noqa: PLC0415 - slow

        serve_settings.load_keys(keys)


def require_valid_settings(environment: Mapping[str, str]) -> None:
    """Refuse settings of stored responses that can't be; raises VllmopsError (``usage``).

    Args:
        environment: of the server.
    """
    if CHECKED & environment.keys():
        from vllmops_responses import serve_settings  # noqa: PLC0415 - slow

        serve_settings.validate_settings(environment)


def build_demo_model(demo: demos.DemoKind, *, quiet: bool) -> None:
    """Build a demo model if it is missing; raises as `demo.build_missing_model` does."""
    with Progress(time.time(), quiet=quiet) as progress:
        if not demos.is_model_built(demos.locate_model(demo)):
            progress.update(f"building the {demo} demo model")
        demos.build_missing_model(demo)


def describe_port_claims(reservation: launch.Reservation) -> Iterator[str]:
    """What to know of ports that other users have claimed: a line for each of these users."""
    using = reservation.record.port
    if (user := reservation.claimant_by_port.get(using or 0)) is not None:
        yield (
            f"port {using} is claimed by {user}, and used all the same: until this server listens,"
            " another instance may be given the same port"
        )
        return
    for user in sorted(set(reservation.claimant_by_port.values())):
        passed = [port for port, whose in reservation.claimant_by_port.items() if whose == user]
        which = f"port {passed[0]} is"
        if len(passed) > 1:
            which = f"{len(passed)} ports from {passed[0]} to {passed[-1]} are"
        yield f"{which} claimed by {user}; using {using}"


def make_watch_arguments(
    watch: bool,
    command: str | None,
    webhook: str | None,
    listen: str | None = None,
    **acts: bool,
) -> tuple[str, ...] | None:
    """The arguments of `vllmops watch`, None if it is not to run.

    Args:
        watch: whether it is to run in any case.
        command: of ``--exec``.
        webhook: its URL.
        listen: of ``--listen``.
        acts: its options without a value, by name.

    Raises:
        VllmopsError: as `CommandHook` and `Webhook` do.
    """
    words: list[str] = []
    if command or webhook:
        from ..watch.event_delivery import CommandHook, Webhook  # noqa: PLC0415 - slow, and rarely needed

        if command:
            CommandHook(command)
            words += ["--exec", command]
        if webhook:
            Webhook(webhook)
            words += ["--webhook", webhook]
    if listen:
        words += ["--listen", listen]
    words += [f"--{name}" for name, wanted in acts.items() if wanted]
    return tuple(words) if watch or words else None


def create_coredump_folder(folder: Path) -> None:
    """Make the directory for core dumps of GPUs; nobody else may read it.

    Raises:
        VllmopsError: ``file.not-written``.
    """
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        require_writable(folder / "core")
    except OSError as error:
        raise make_not_written_error(
            folder, error, hint=f"choose another directory with {serve_options.CUDA}"
        ) from error


def build_order(
    model: str | None,
    demo: demos.DemoKind | None,
    name: str | None,
    host: str | None,
    port: int | None,
    detach: bool,
    env: Sequence[str],
    vllm_arguments: tuple[str, ...],
) -> launch.LaunchOptions:
    """Turn the command line into an order.

    Raises:
        VllmopsError: ``usage``.
    """
    for word in filter(None, (model, name, host, *env, *vllm_arguments)):
        if has_invalid_utf8(word):
            raise make_usage_error(
                f"{word!r} is not UTF-8: the record of the instance can't contain it"
            )
    if (model is None) == (demo is None) or model == "":
        raise make_usage_error("give either a MODEL or --demo text|moe|vision|audio")
    if port is not None and not 1 <= port <= 65535:
        raise make_usage_error(f"--port {port}: ports go from 1 to 65535")
    for word in env:
        if not word.partition("=")[0] or "=" not in word:
            raise make_usage_error(f"--env {word}: write it as K=V")
    environment = dict(word.split("=", 1) for word in env)
    arguments = vllm_arguments
    if demo:
        model = str(demos.locate_model(demo))
        arguments = (*demos.make_serve_arguments(demo), *vllm_arguments)
        environment = {**demos.make_serve_environment(), **environment}
    assert model
    # vLLM takes the last value, so arguments after -- win; two different values are a mistake.
    behind_host, behind_port = (
        find_option(vllm_arguments, "--host"),
        find_option(vllm_arguments, "--port"),
    )
    if behind_host and host and behind_host != host:
        raise make_usage_error(f"--host {host} and, after --, --host {behind_host}: give one")
    if behind_port and port and behind_port != str(port):
        raise make_usage_error(f"--port {port} and, after --, --port {behind_port}: give one")
    if behind_port and behind_port.isdigit():
        port = int(behind_port)
    return launch.LaunchOptions(
        model=model,
        arguments=arguments,
        name=name,
        host=behind_host or host or "127.0.0.1",
        port=port,
        environment=environment,
        detached=detach,
        default_name="demo" if demo else "",
    )


def has_invalid_utf8(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return True
    return False


def follow_instance(
    session: ControlSession,
    previous_record: InstanceRecord,
    *,
    detach: bool,
    log: bool,
    quiet: bool = False,
) -> InstanceRecord:
    """Show how an instance starts, and wait until it ends, or, with `detach`, until it is ready.

    Args:
        session: of the instance.
        previous_record: its record before this start.
        detach: whether to leave the instance once it is ready.
        log: whether to show its log; otherwise only the lines of its watch.
        quiet: whether to show nothing.

    Returns:
        The last record.

    Raises:
        VllmopsError: ``serve.failed``, or ``interrupted`` after Ctrl-C.
    """
    record = previous_record
    follower = None
    if not detach and not quiet and (log or previous_record.watch is not None):
        follower = LogFollower(session.folder, all_lines=log)
    notifier = SystemdNotifier(session.folder, {} if detach else os.environ)
    with (
        contextlib.closing(notifier),
        InstanceDisplay(follower, quiet=quiet) as display,
        StopSignals(session, notifier.send_stopping) as signals,
    ):
        for record in session.follow_records():
            notifier.send_progress(record)
            started = record.started_at != previous_record.started_at
            if started:
                display.show_start()
            if started and record.state is InstanceState.READY:
                if detach and not signals.count:
                    session.close()
                    return record
                display.show_ready(record)
            elif record.state in {InstanceState.STARTING, InstanceState.STOPPING}:
                display.update(record)
    if record.state is InstanceState.FAILED:
        raise make_failure_error(record, session.folder)
    if signals.interrupted:
        message = f"{record.name} has stopped" + (f" ({record.note})" if record.note else "")
        raise VllmopsError("interrupted", message)
    return record


class InstanceDisplay:
    """What a person sees of an instance: its progress, then a summary, then its log.

    Args:
        follower: shows the log; None to show none.
        quiet: whether to show nothing.
    """

    def __init__(self, follower: LogFollower | None, *, quiet: bool) -> None:
        self.follower = follower
        self.progress = Progress(time.time(), quiet=quiet)
        self.terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.follower:
            self.follower.stop()

    def show_start(self) -> None:
        """The supervisor has begun this start: a service gets the log from its first line."""
        if self.follower and not self.terminal:
            self.follower.start()

    def update(self, record: InstanceRecord) -> None:
        """Show how far a start or a stop is."""
        state = record.state if record.state is InstanceState.STOPPING else record.stage
        self.progress.update(f"{record.name}: {record.note or state}")

    def show_ready(self, record: InstanceRecord) -> None:
        """Replace the progress, if any is shown, by a summary, and begin with the log."""
        if not self.progress.text:
            return
        self.progress.stop()
        print_parts(*render_summary(record), stderr=True)
        if self.follower:
            self.progress.plain = True
            self.follower.start()


class StopSignals:
    """Turns Ctrl-C and SIGTERM into a stop with a drain, and a second one into an immediate stop.

    So is SIGABRT, which systemd's watchdog sends to what hangs.

    A closed terminal (SIGHUP) is not caught: the supervisor sees that the holder has gone.
    """

    def __init__(self, session: ControlSession, notify_stopping: Callable[[], None]) -> None:
        self.session = session
        self.notify_stopping = notify_stopping
        self.count = 0
        self.interrupted = False

    def __enter__(self) -> Self:
        self.previous_handlers = {n: signal.signal(n, self.handle_signal) for n in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def handle_signal(self, number: int, _: FrameType | None) -> None:
        self.interrupted |= number == signal.SIGINT
        at_once = self.count or number == signal.SIGABRT
        self.notify_stopping()
        self.session.send_request(ControlRequest(stop=0.0 if at_once else STOP_TIMEOUT_S))
        self.count += 1


class LogFollower:
    """Copies new lines of a server's log to stdout.

    Args:
        folder: of the instance.
        all_lines: whether to copy every line; otherwise only those of its watch.
    """

    def __init__(self, folder: InstanceFolder, *, all_lines: bool) -> None:
        self.all_lines = all_lines
        self.name = folder.name
        self.tail = logs.LogTail(folder.server_log)
        self.stop_requested = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        """Start once: from new lines in a terminal, from the first line in a pipe."""
        if self.thread.ident is None:
            if sys.stdout.isatty():
                self.tail.read_new_lines()
            self.thread.start()

    def stop(self) -> None:
        self.stop_requested.set()
        if self.thread.is_alive():
            self.thread.join()

    def run(self) -> None:
        last = False
        while not last:
            last = self.stop_requested.wait(LOG_POLL_S)
            try:
                print_parts(
                    *map(
                        VerbatimText, filter(self.should_show, self.tail.read_new_lines(ended=last))
                    )
                )
            except OSError:
                return
            except Exception as error:
                print_to_stderr(f"the log can't be shown any more: {type(error).__name__}: {error}")
                print_to_stderr(f"  vllmops logs -f {self.name}")
                return

    def should_show(self, line: str) -> bool:
        return self.all_lines or logs.parse_line(line).process == logs.WATCH


def build_instance_data(record: InstanceRecord) -> dict[str, Any]:
    """An instance for ``--json``: without secrets, since such output is often stored in logs."""
    from ..redaction.redactor import Redactor  # noqa: PLC0415 - few commands need it

    hidden = Redactor()
    return {
        "name": record.name,
        "state": record.state,
        "url": record.url,
        "model": record.model,
        "detached": record.detached,
        "pid": record.session,
        "log": str(InstanceFolder(record.name).server_log),
        "command": hidden.redact_command_line(record.command),
        "environment": hidden.redact_secret_variables(redact_environment(record.environment)),
        "directory": record.directory,
        "watch": record.watch and hidden.redact_command_line(record.watch),
        "failure": record.failure,
        "note": record.note,
    }


def render_summary(record: InstanceRecord) -> list[RenderableType]:
    """What a person needs to know about a server that has just become ready."""
    from rich.text import Text  # noqa: PLC0415

    took = f" after {format_duration(record.ready_s)}" if record.ready_s is not None else ""
    where = (" at ", (format_url(record.url), "bold")) if record.url else ()
    watch = [f"  watch:       vllmops logs --process watch {record.name}"]
    return [
        Text.assemble((record.name, "bold"), " is ready", *where, took),
        *(["  headless: its API server is on another node"] if record.headless else []),
        f"  log:         vllmops logs -f {record.name}",
        *(watch if record.watch is not None else ()),
        f"  look inside: vllmops cache inspect -t {record.name}",
        f"  stop:        vllmops stop {record.name}" + ("" if record.detached else ", or Ctrl-C"),
    ]


def make_failure_error(record: InstanceRecord, folder: InstanceFolder) -> VllmopsError:
    """Why an instance failed: the cause first, then where to read more."""
    why = record.failure or Failure("unknown")
    who = f"{why.process}, " if why.process else ""
    return VllmopsError(
        "serve.failed",
        f"{why.cause}\n  ({record.name}: {who}at stage {record.stage!r})\n  log: "
        f"{folder.server_log}",
        why.hint or f"vllmops logs {record.name}",
        data=build_instance_data(record),
    )


def render_shell_command(record: InstanceRecord) -> list[VerbatimText]:
    """The command to paste into a shell; secrets are redacted and must be filled in."""
    from ..redaction.redactor import Redactor  # noqa: PLC0415 - few commands need it

    hidden = Redactor()
    environment = hidden.redact_secret_variables(redact_environment(record.environment))
    assignments = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    words = shlex.join(hidden.redact_command_line(record.command))
    return [VerbatimText(" \\\n  ".join(["env " + " ".join(assignments), words]))]
