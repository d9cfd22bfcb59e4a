"""``vllmops serve``: start a vLLM server and supervise it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import typer

from .. import demo as demos
from ..agent.patches.registry import OFF, known
from ..diagnose import packages
from ..errors import VllmopsError
from ..files import check, not_written, read
from ..home import home
from ..host import cudacore, namesake
from ..host.shape import option, shown
from ..instances import launch, logs
from ..instances.control import STOP_TIMEOUT_S, Request, Session, start_supervisor
from ..instances.notify import Notifier
from ..instances.record import Failure, Folder, Record, State
from ..keys import admin_token as admin
from ..keys import file as keys
from ..keys.ring import Key, Status, fresh
from ..output import Command, Json, Progress, Result, Verbatim, command, say, show, span, typer_app
from ..protocol.packages import distributions
from ..store import settings
from ..store.store import ResponseStore
from . import serve_config
from . import serve_options as opts
from .options import duration, host_port

if TYPE_CHECKING:
    from rich.console import RenderableType

BEHIND = "vllmops.behind"
LOG_POLL_S = 0.2
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT)
STORE_TIMEOUT_S = 10.0


class PassThrough(Command):
    """Keeps the arguments after ``--``, which are vLLM's, away from this parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        behind = ctx.meta[BEHIND] = tuple(args[cut + 1 :])
        rest = super().parse_args(ctx, [*with_folder(args[:cut])])
        serve_config.command_line_wins(ctx, behind)
        return rest


def with_folder(args: Sequence[str]) -> Iterator[str]:
    """The arguments; ``--cuda-coredump`` without a directory gets one in the state directory."""
    for word, following in zip(args, (*args[1:], "-"), strict=False):
        alone = word == opts.CUDA and following.startswith("-")
        yield f"{opts.CUDA}={home() / 'cuda'}" if alone else word


app = typer_app()


@app.command(
    cls=PassThrough,
    epilog="Example: vllmops serve Qwen/Qwen3-0.6B --name qwen --detach -- --max-model-len 8192",
)
@command
def serve(
    ctx: typer.Context,
    model: opts.Model = None,
    detach: opts.Detach = False,
    name: opts.Name = None,
    host: opts.Host = None,
    port: opts.Port = None,
    config: opts.Config = None,
    dry_run: opts.DryRun = False,
    toml: opts.Toml = False,
    demo: opts.Demo = None,
    env: opts.Env = None,
    no_patch: opts.NoPatch = None,
    cuda_coredump: opts.CudaCoredump = None,
    quiet: opts.Quiet = False,
    store: opts.Store = None,
    store_max_size: opts.StoreMaxSize = None,
    store_max_per_key: opts.StoreMaxPerKey = None,
    store_ttl: opts.StoreTtl = None,
    keyring: opts.Keyring = None,
    carrier: opts.Carrier = None,
    carrier_ttl: opts.CarrierTtl = None,
    compaction_prompt: opts.CompactionPrompt = None,
    ws_max_message: opts.WsMaxMessage = None,
    ws_idle: opts.WsIdle = None,
    ws_max_requests: opts.WsMaxRequests = None,
    ws_max_connections: opts.WsMaxConnections = None,
    admin_token: opts.AdminToken = None,
    watch: opts.Watch = False,
    watch_exec: opts.WatchExec = None,
    watch_webhook: opts.WatchWebhook = None,
    watch_repair: opts.WatchRepair = False,
    watch_heal: opts.WatchHeal = False,
    watch_restart: opts.WatchRestart = False,
    watch_rerun: opts.WatchRerun = False,
    probe_port: opts.ProbePort = None,
    json_: Json = False,
) -> Result:
    """Launch a vLLM server and supervise all its processes.

    It stays in the foreground; when it ends, for whatever reason, the server ends too.
    With --detach the server keeps running, and `vllmops stop` ends it. Everything after -- goes to
    vLLM unchanged.
    """
    if toml and not dry_run:
        raise usage("--toml prints a file for --config: use it together with --dry-run")
    file = serve_config.loaded(ctx)
    given = [*file.env, *(env or [])]
    cuda = cudacore.armed(cuda_coredump.absolute()) if cuda_coredump else {}
    behind = (*file.arguments, *ctx.meta[BEHIND])
    limits = stored(store, store_max_size, store_max_per_key, store_ttl)
    env = variables(cuda)
    env += [*given, *unpatched(no_patch or []), *limits]
    env += [*sealing(keyring, env), *carried(carrier, carrier_ttl, env), *governed(admin_token)]
    env += summarized(compaction_prompt)
    env += variables(
        {
            settings.SOCKET_MESSAGE: ws_max_message,
            settings.SOCKET_IDLE: ws_idle and f"{duration(ws_idle):g}",
            settings.SOCKET_REQUESTS: ws_max_requests,
            settings.SOCKET_CONNECTIONS: ws_max_connections,
        }
    )
    order = place(model, demo, name, host, port, detach, env, behind)
    watcher = watching(
        watch,
        watch_exec,
        watch_webhook,
        probe_port,
        repair=watch_repair,
        heal=watch_heal,
        restart=watch_restart,
        rerun=watch_rerun,
    )
    if probe_port and host_port(probe_port)[1] == order.port:
        raise usage(f"--port and --probe-port are both {order.port}: give two ports")
    order = dataclasses.replace(order, watch=watcher)
    if demo:  # of a dry run, too, whose command must work
        build(demo, quiet=json_)
    if dry_run:
        settings.check({**os.environ, **order.environment})
        planned = launch.preview(order)
        if not toml:
            return Result(instance(planned), lambda: shell_lines(planned))
        text = serve_config.written(ctx, given, behind)
        return Result({**instance(planned), "config": text}, lambda: [Verbatim(text)])
    launch.check(order)
    if probe_port:
        launch.check_port(*host_port(probe_port))
    check_store(order)
    if line := namesake.warning():
        say(line, "yellow")
    launch.ready_home()
    if cuda_coredump:
        ready_folder(cuda_coredump)
    for row in packages.bad(distributions()):
        say(f"{row.package} {row.versions} is installed: {row.title}; {row.next}", "yellow")
    provide_key(order.environment, quiet=json_)
    reserved = launch.reserve(order)
    for line in claims(reserved):
        say(line, "yellow")
    request = Request(hold=not detach)
    control = start_supervisor(
        reserved.folder, reserved.lock, request, launch=True, port=reserved.port
    )
    session = Session(reserved.folder, control, request)
    record = stay(session, reserved.record, detach=detach, log=not quiet, quiet=json_)
    if detach and record.state is State.STOPPED:
        raise VllmopsError(
            "serve.stopped",
            f"{record.name} was stopped before it was ready",
            f"vllmops restart {record.name} starts it again",
        )
    return Result(instance(record), lambda: summary(record) if detach else ())


def build(demo: demos.Kind, *, quiet: bool) -> None:
    """Build a demo model if it is not there; raises VllmopsError as `demos.model_dir` does."""
    with Progress(time.time(), quiet=quiet) as progress:
        if not demos.built(demos.folder(demo)):
            progress.update(f"building the {demo} demo model")
        demos.model_dir(demo)


def claims(reserved: launch.Reserved) -> Iterator[str]:
    """What to know of ports that other users have claimed: a line for each of these users."""
    using = reserved.record.port
    if (user := reserved.strangers.get(using or 0)) is not None:
        yield (
            f"port {using} is claimed by {user}, and used all the same: until this server listens,"
            " another instance may be given the same port"
        )
        return
    for user in sorted(set(reserved.strangers.values())):
        passed = [port for port, whose in reserved.strangers.items() if whose == user]
        which = f"port {passed[0]} is"
        if len(passed) > 1:
            which = f"{len(passed)} ports from {passed[0]} to {passed[-1]} are"
        yield f"{which} claimed by {user}; using {using}"


def watching(
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
        VllmopsError: as `Hook` and `Webhook` do.
    """
    words: list[str] = []
    if command or webhook:
        from ..watch.messenger import Hook, Webhook  # noqa: PLC0415 - slow, and rarely needed

        if command:
            Hook(command)
            words += ["--exec", command]
        if webhook:
            Webhook(webhook)
            words += ["--webhook", webhook]
    if listen:
        words += ["--listen", listen]
    words += [f"--{name}" for name, wanted in acts.items() if wanted]
    return tuple(words) if watch or words else None


def ready_folder(folder: Path) -> None:
    """Make the directory for core dumps of GPUs; nobody else may read it.

    Raises:
        VllmopsError: ``file.not-written``.
    """
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        check(folder / "core")
    except OSError as error:
        raise not_written(
            folder, error, hint=f"choose another directory with {opts.CUDA}"
        ) from error


def unpatched(ids: Sequence[str]) -> list[str]:
    """The environment variables for ``--no-patch``.

    Raises:
        VllmopsError: ``patch.unknown``.
    """
    for patch in ids:
        known(patch)
    return [f"{OFF}={','.join(ids)}"] if ids else []


def sealing(keyring: Path | None, env: Sequence[str]) -> list[str]:
    """The environment variables for keys: where they are, never the keys themselves.

    Raises:
        VllmopsError: ``usage``, or whatever is wrong with the keyring or the key in use.
    """
    if any(word.startswith(f"{keys.SIGNING_KEY}=") for word in env):
        raise usage(
            f"--env {keys.SIGNING_KEY} would show the key to everybody who sees the command: "
            "export it before, or use --keyring"
        )
    source = keys.source({**os.environ, **added_by(env)}, keyring)
    if source.path is None or source.path != keys.default_path() or source.path.exists():
        source.load()
    return [] if source.text else [f"{keys.PLACE}={source}"]


def provide_key(environment: Mapping[str, str], *, quiet: bool) -> None:
    """Create the default keyring, with one key, if the server uses it and it does not exist.

    So client-held conversation state works at once, and is valid on all servers of this home.

    Args:
        environment: of the server.
        quiet: whether to print nothing.

    Raises:
        VllmopsError: as `keys.change`.
    """
    path = keys.default_path()
    if environment.get(keys.PLACE) != str(path) or path.exists():
        return
    key = Key.of(fresh(), Status.PRIMARY, time.time())
    # Another serve may have created it meanwhile.
    ring = keys.change(path, lambda ring: ring if ring.keys else ring.add(key), create=True)
    if not quiet and ring.find(key.kid):
        what = "it protects client-held conversation state; to have none: --keyring none"
        say(f"made a key, {key.kid}, in {path}: {what}")


def governed(admin_token: Path | None) -> list[str]:
    """The environment variable for the admin token: where it is, never the token itself.

    Raises:
        VllmopsError: as `admin.token` does.
    """
    if admin_token is None:
        return []
    admin.token(admin_token)
    return [f"{admin.PLACE}={admin_token.absolute()}"]


def carried(form: settings.Format | None, ttl: str | None, env: Sequence[str]) -> list[str]:
    """The environment variables for carriers.

    The lifetime is included even if it comes from this environment: `vllmops keys rotate` reads it
    from the record.

    Raises:
        VllmopsError: ``usage``.
    """
    given = {**os.environ, **added_by(env)}
    seconds = f"{duration(ttl):g}" if ttl else given.get(settings.CARRIER_TTL)
    return variables({settings.CARRIER: form, settings.CARRIER_TTL: seconds})


def variables(given: Mapping[str, object]) -> list[str]:
    """Environment variables as ``--env`` takes them, without those that have no value."""
    return [f"{name}={value}" for name, value in given.items() if value is not None]


def summarized(prompt: Path | None) -> list[str]:
    """The environment variable for the prompt of compactions.

    Raises:
        VllmopsError: ``file.unreadable`` or ``file.too-large``; ``usage`` if it has no prompt.
    """
    if prompt is None:
        return []
    try:
        text = read(prompt, settings.MOST_PROMPT).decode()
    except UnicodeError as error:
        raise usage(f"--compaction-prompt {prompt} is not UTF-8") from error
    if not text.strip():
        raise usage(f"--compaction-prompt {prompt} is empty")
    return [f"{settings.COMPACTION_PROMPT}={prompt.absolute()}"]


def added_by(env: Sequence[str]) -> dict[str, str]:
    """The variables that ``--env`` sets; malformed ones are left out."""
    return dict(word.split("=", 1) for word in env if "=" in word)


def stored(
    url: str | None, max_size: int | None, max_per_key: int | None, ttl: str | None
) -> list[str]:
    """The environment variables for the store.

    Raises:
        VllmopsError: ``usage``.
    """
    if url == "":
        raise usage("--store must not be empty; --store none stores no responses")
    return variables(
        {
            settings.STORE: url,
            settings.MAX_SIZE: max_size,
            settings.MAX_PER_KEY: max_per_key,
            settings.TTL: ttl and f"{duration(ttl):g}",
        }
    )


def check_store(order: launch.Order) -> None:
    """Refuse wrong settings of store or carriers; a store that is only down may come up later.

    Raises:
        VllmopsError: ``usage``, ``store.driver`` or ``store.schema``.
    """
    environment = {**os.environ, **order.environment}
    settings.check(environment)
    if not settings.wanted(environment):
        return
    backend = settings.backend(environment)
    several = option(order.arguments, "--api-server-count") not in {None, "1"}
    if several and backend.url.startswith("memory:"):
        raise usage(
            "memory:// works for one process only: with several API servers use another --store"
        )
    asyncio.run(try_store(ResponseStore(backend, deadline_s=STORE_TIMEOUT_S)))


async def try_store(store: ResponseStore) -> None:
    """Open a store, and print how it could lose responses that it has acknowledged, or is away."""
    async with store:
        if not store.opened:
            say(f"warning: {store.problem}; until it is back, what must be stored gets 503")
        else:
            with suppress(*store.backend.unavailable, TimeoutError):
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    for caveat in await store.backend.caveats():
                        say(f"the store: {caveat}")


def place(
    model: str | None,
    demo: demos.Kind | None,
    name: str | None,
    host: str | None,
    port: int | None,
    detach: bool,
    env: Sequence[str],
    behind: tuple[str, ...],
) -> launch.Order:
    """Turn the command line into an order.

    Raises:
        VllmopsError: ``usage``.
    """
    for word in filter(None, (model, name, host, *env, *behind)):
        if not_utf8(word):
            raise usage(f"{word!r} is not UTF-8: the record of the instance can't contain it")
    if (model is None) == (demo is None) or model == "":
        raise usage("give either a MODEL or --demo text|moe|vision|audio")
    if port is not None and not 1 <= port <= 65535:
        raise usage(f"--port {port}: ports go from 1 to 65535")
    for word in env:
        if not word.partition("=")[0] or "=" not in word:
            raise usage(f"--env {word}: write it as K=V")
    environment = dict(word.split("=", 1) for word in env)
    arguments = behind
    if demo:
        model = str(demos.folder(demo))
        arguments = (*demos.serve_arguments(demo), *behind)
        environment = {**demos.serve_environment(), **environment}
    assert model
    # vLLM takes the last value, so arguments after -- win; two different values are a mistake.
    behind_host, behind_port = option(behind, "--host"), option(behind, "--port")
    if behind_host and host and behind_host != host:
        raise usage(f"--host {host} and, after --, --host {behind_host}: give one")
    if behind_port and port and behind_port != str(port):
        raise usage(f"--port {port} and, after --, --port {behind_port}: give one")
    if behind_port and behind_port.isdigit():
        port = int(behind_port)
    return launch.Order(
        model=model,
        arguments=arguments,
        name=name,
        host=behind_host or host or "127.0.0.1",
        port=port,
        environment=environment,
        detached=detach,
        default_name="demo" if demo else "",
    )


def not_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return True
    return False


def usage(message: str) -> VllmopsError:
    return VllmopsError("usage", message, "vllmops serve --help")


def stay(
    session: Session, before: Record, *, detach: bool, log: bool, quiet: bool = False
) -> Record:
    """Show how an instance starts, and wait until it ends, or, with `detach`, until it is ready.

    Args:
        session: of the instance.
        before: its record before this start.
        detach: whether to leave the instance once it is ready.
        log: whether to show its log; otherwise only the lines of its watch.
        quiet: whether to show nothing.

    Returns:
        The last record.

    Raises:
        VllmopsError: ``serve.failed``, or ``interrupted`` after Ctrl-C.
    """
    record = before
    follower = None
    if not detach and not quiet and (log or before.watch is not None):
        follower = LogFollower(session.folder, all_lines=log)
    notifier = Notifier(session.folder, {} if detach else os.environ)
    with (
        contextlib.closing(notifier),
        Display(follower, quiet=quiet) as display,
        Signals(session, notifier.stopping) as signals,
    ):
        for record in session.records():
            notifier.follow(record)
            started = record.started_at != before.started_at
            if started:
                display.started()
            if started and record.state is State.READY:
                if detach and not signals.count:
                    session.close()
                    return record
                display.ready(record)
            elif record.state in {State.STARTING, State.STOPPING}:
                display.update(record)
    if record.state is State.FAILED:
        raise failed(record, session.folder)
    if signals.interrupted:
        message = f"{record.name} has stopped" + (f" ({record.note})" if record.note else "")
        raise VllmopsError("interrupted", message)
    return record


class Display:
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

    def started(self) -> None:
        """The supervisor has begun this start: a service gets the log from its first line."""
        if self.follower and not self.terminal:
            self.follower.start()

    def update(self, record: Record) -> None:
        """Show how far a start or a stop is."""
        state = record.state if record.state is State.STOPPING else record.stage
        self.progress.update(f"{record.name}: {record.note or state}")

    def ready(self, record: Record) -> None:
        """Replace the progress, if any is shown, by a summary, and begin with the log."""
        if not self.progress.text:
            return
        self.progress.stop()
        show(*summary(record), stderr=True)
        if self.follower:
            self.progress.plain = True
            self.follower.start()


class Signals:
    """Turns Ctrl-C and SIGTERM into a stop with a drain, and a second one into an immediate stop.

    So is SIGABRT, which systemd's watchdog sends to what hangs.

    A closed terminal (SIGHUP) is not caught: the supervisor sees that the holder has gone.
    """

    def __init__(self, session: Session, tell: Callable[[], None]) -> None:
        self.session = session
        self.tell = tell
        self.count = 0
        self.interrupted = False

    def __enter__(self) -> Self:
        self.before = {n: signal.signal(n, self.on) for n in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on(self, number: int, _: FrameType | None) -> None:
        self.interrupted |= number == signal.SIGINT
        at_once = self.count or number == signal.SIGABRT
        self.tell()
        self.session.send(Request(stop=0.0 if at_once else STOP_TIMEOUT_S))
        self.count += 1


class LogFollower:
    """Copies new lines of a server's log to stdout.

    Args:
        folder: of the instance.
        all_lines: whether to copy every line; otherwise only those of its watch.
    """

    def __init__(self, folder: Folder, *, all_lines: bool) -> None:
        self.all_lines = all_lines
        self.name = folder.name
        self.tail = logs.Tail(folder.log)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        """Start once: from new lines in a terminal, from the first line in a pipe."""
        if self.thread.ident is None:
            if sys.stdout.isatty():
                self.tail.lines()
            self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def run(self) -> None:
        last = False
        while not last:
            last = self.ended.wait(LOG_POLL_S)
            try:
                show(*map(Verbatim, filter(self.shows, self.tail.lines(ended=last))))
            except OSError:
                return
            except Exception as error:
                say(f"the log can't be shown any more: {type(error).__name__}: {error}")
                say(f"  vllmops logs -f {self.name}")
                return

    def shows(self, line: str) -> bool:
        return self.all_lines or logs.parse(line).process == logs.WATCH


def instance(record: Record) -> dict[str, Any]:
    """An instance for ``--json``: without secrets, since such output is often stored in logs."""
    from ..bundle.redact import Redactor  # noqa: PLC0415 - few commands need it

    hidden = Redactor()
    return {
        "name": record.name,
        "state": record.state,
        "url": record.url,
        "model": record.model,
        "detached": record.detached,
        "pid": record.session,
        "log": str(Folder(record.name).log),
        "command": hidden.words(record.command),
        "environment": hidden.assigned(settings.shown(record.environment)),
        "directory": record.directory,
        "watch": record.watch and hidden.words(record.watch),
        "failure": record.failure,
        "note": record.note,
    }


def summary(record: Record) -> list[RenderableType]:
    """What a person needs to know about a server that has just become ready."""
    from rich.text import Text  # noqa: PLC0415

    took = f" after {span(record.ready_s)}" if record.ready_s is not None else ""
    where = (" at ", (shown(record.url), "bold")) if record.url else ()
    watch = [f"  watch:       vllmops logs --process watch {record.name}"]
    return [
        Text.assemble((record.name, "bold"), " is ready", *where, took),
        *(["  headless: its API server is on another node"] if record.headless else []),
        f"  log:         vllmops logs -f {record.name}",
        *(watch if record.watch is not None else ()),
        f"  look inside: vllmops cache inspect -t {record.name}",
        f"  stop:        vllmops stop {record.name}" + ("" if record.detached else ", or Ctrl-C"),
    ]


def failed(record: Record, folder: Folder) -> VllmopsError:
    """Why an instance failed: the cause first, then where to read more."""
    why = record.failure or Failure("unknown")
    who = f"{why.process}, " if why.process else ""
    return VllmopsError(
        "serve.failed",
        f"{why.cause}\n  ({record.name}: {who}at stage {record.stage!r})\n  log: {folder.log}",
        why.hint or f"vllmops logs {record.name}",
        data=instance(record),
    )


def shell_lines(record: Record) -> list[Verbatim]:
    """The command to paste into a shell; secrets are redacted and must be filled in."""
    from ..bundle.redact import Redactor  # noqa: PLC0415 - few commands need it

    hidden = Redactor()
    environment = hidden.assigned(settings.shown(record.environment))
    assignments = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    words = shlex.join(hidden.words(record.command))
    return [Verbatim(" \\\n  ".join(["env " + " ".join(assignments), words]))]
