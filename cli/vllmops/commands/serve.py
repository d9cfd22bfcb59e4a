"""``vllmops serve``: start a vLLM server and keep hold of it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from typer.core import TyperCommand

from .. import demo as demos
from ..agent.patches.registry import OFF, known
from ..errors import Exit, VllmopsError
from ..host import namesake
from ..host.shape import option, shown
from ..instances import launch, logs
from ..instances.control import STOP_TIMEOUT_S, Request, Session, start_supervisor
from ..instances.record import Failure, Folder, Record, State
from ..keys import admin_token as admin
from ..keys import file as keys
from ..keys.ring import Key, Status, fresh
from ..numbers import MOST
from ..output import Json, Progress, Result, Verbatim, command, say, show, span, typer_app
from ..store import settings
from ..store.store import ResponseStore
from .options import AdminToken, count, duration, patch_ids, time_

if TYPE_CHECKING:
    from rich.console import RenderableType

BEHIND = "vllmops.behind"
LOG_POLL_S = 0.2
STORE_TIMEOUT_S = 10.0


class PassThrough(TyperCommand):
    """Keeps what stands behind ``--`` away from our own parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[BEHIND] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])


app = typer_app()


@app.command(
    cls=PassThrough,
    epilog="Example: vllmops serve Qwen/Qwen3-0.6B --name qwen --detach -- --max-model-len 8192",
)
@command
def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL [-- VLLM ARGUMENTS]", help="Directory of a model, or its hub id."
        ),
    ] = None,
    demo: Annotated[
        demos.Kind | None,
        typer.Option(
            metavar="KIND",
            help="Build a tiny random-weight model, of text, vision or audio, and serve it.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the instance; made from the model's otherwise.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[
        int | None,
        typer.Option(
            parser=count(1, 65535), help="Port to listen on; a free one from 8000 otherwise."
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it is ready; it goes on serving.")
    ] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Environment for vLLM; repeatable.")
    ] = None,
    no_patch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Leave a defect of vLLM's as it is, see `vllmops patches list`; repeatable.",
            autocompletion=patch_ids,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where responses are kept: memory://, sqlite:///FILE, postgresql://, redis://, or"
            " none [a file of the instance's].",
        ),
    ] = None,
    store_max_size: Annotated[
        int | None, typer.Option(parser=count(1, MOST), help="Responses that are kept [10000].")
    ] = None,
    store_max_per_key: Annotated[
        int | None,
        typer.Option(parser=count(1, MOST), help="Those that one API key keeps of them [all]."),
    ] = None,
    store_ttl: Annotated[
        str | None,
        typer.Option(
            parser=time_,
            metavar="TIME",
            help="How long one is kept after its last use, such as 12h [30d].",
        ),
    ] = None,
    keyring: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The keyring, or none [VLLMOPS_KEYRING, or keyring.json in VLLMOPS_HOME, which is"
            " made].",
            show_default=False,
        ),
    ] = None,
    carrier: Annotated[
        settings.Format | None,
        typer.Option(
            metavar="FORM",
            help="How conversations are sealed that clients keep: v2, encrypted and padded, or"
            " signed-v1, for all to read [v2].",
        ),
    ] = None,
    carrier_ttl: Annotated[
        str | None,
        typer.Option(
            parser=time_, metavar="TIME", help="For how long one is taken back, such as 12h [30d]."
        ),
    ] = None,
    admin_token: AdminToken = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command and environment only.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not follow the log in the foreground.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Run `vllmops watch` beside it; it writes to the log."),
    ] = False,
    watch_exec: Annotated[
        str | None, typer.Option(metavar="CMD", help="Watch it, with --exec CMD.")
    ] = None,
    watch_webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Watch it, with --webhook URL.")
    ] = None,
    watch_repair: Annotated[
        bool, typer.Option("--watch-repair", help="Watch it, with --repair.")
    ] = False,
    watch_restart: Annotated[
        bool, typer.Option("--watch-restart", help="Watch it, with --restart.")
    ] = False,
    json_: Json = False,
) -> Result:
    """Launch a vLLM server and keep hold of all its processes.

    It stays in the foreground; when it ends, in whatever way, nothing of the server survives.
    With --detach the server goes on, and `vllmops stop` ends it. Everything behind -- goes to
    vLLM untouched.
    """
    kept = stored(store, store_max_size, store_max_per_key, store_ttl)
    env = [*(env or []), *unpatched(no_patch or []), *kept]
    env += [*sealing(keyring, env), *carried(carrier, carrier_ttl, env), *governed(admin_token)]
    order = place(model, demo, name, host, port, detach, env, ctx.meta[BEHIND])
    beside = watching(watch, watch_exec, watch_webhook, watch_repair, watch_restart)
    order = dataclasses.replace(order, watch=beside)
    if dry_run:
        settings.check({**os.environ, **order.environment})
        planned = launch.preview(order)
        return Result(instance(planned), lambda: shell_lines(planned))
    launch.check(order)
    check_store(order)
    if line := namesake.warning():
        say(line, "yellow")
    launch.ready_home()
    provide_key(order.environment, quiet=json_)
    reserved = launch.reserve(order)
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


def watching(
    watch: bool, command: str | None, webhook: str | None, repair: bool, restart: bool
) -> tuple[str, ...] | None:
    """What `vllmops watch` is to be given, None where it is not to run.

    Raises:
        VllmopsError: as `Hook` and `Webhook` do.
    """
    words: list[str] = []
    if command or webhook:
        from ..watch.messenger import Hook, Webhook  # noqa: PLC0415 - slow, and seldom needed

        if command:
            Hook(command)
            words += ["--exec", command]
        if webhook:
            Webhook(webhook)
            words += ["--webhook", webhook]
    words += ["--repair"] if repair else []
    words += ["--restart"] if restart else []
    return tuple(words) if watch or words else None


def unpatched(ids: Sequence[str]) -> list[str]:
    """What ``--no-patch`` adds to the environment.

    Raises:
        VllmopsError: ``patch.unknown``.
    """
    for patch in ids:
        known(patch)
    return [f"{OFF}={','.join(ids)}"] if ids else []


def sealing(keyring: Path | None, env: Sequence[str]) -> list[str]:
    """What the keys add to the environment: where they are, never what they are.

    Raises:
        VllmopsError: ``usage``, or whatever is wrong with the keyring or the key in use.
    """
    if any(word.startswith(f"{keys.SIGNING_KEY}=") for word in env):
        raise usage(
            f"--env {keys.SIGNING_KEY} would show the key to whoever sees the command: "
            "export it before, or name a --keyring"
        )
    source = keys.source({**os.environ, **added_by(env)}, keyring)
    if source.path is None or source.path != keys.default_path() or source.path.exists():
        source.load()
    return [] if source.text else [f"{keys.PLACE}={source}"]


def provide_key(environment: Mapping[str, str], *, quiet: bool) -> None:
    """Make the keyring of this home, with one key, where a server is to have it and there is none.

    What clients carry works at once then, and all servers of this home open each other's.

    Args:
        environment: of the server.
        quiet: whether to say nothing of it.

    Raises:
        VllmopsError: as `keys.change`.
    """
    path = keys.default_path()
    if environment.get(keys.PLACE) != str(path) or path.exists():
        return
    key = Key.of(fresh(), Status.PRIMARY, time.time())
    # Another serve may have come first.
    ring = keys.change(path, lambda ring: ring if ring.keys else ring.add(key), create=True)
    if not quiet and ring.find(key.kid):
        what = "it protects client-held conversation state; to have none: --keyring none"
        say(f"made a key, {key.kid}, in {path}: {what}")


def governed(admin_token: Path | None) -> list[str]:
    """What the admin token adds to the environment: where it is, never what it is.

    Raises:
        VllmopsError: as `admin.token` does.
    """
    if admin_token is None:
        return []
    admin.token(admin_token)
    return [f"{admin.PLACE}={admin_token.absolute()}"]


def carried(form: settings.Format | None, ttl: str | None, env: Sequence[str]) -> list[str]:
    """What the options of carriers add to the environment.

    Their time also where it comes from ours: `vllmops keys rotate` reads it in the record.

    Raises:
        VllmopsError: ``usage``.
    """
    given = {**os.environ, **added_by(env)}
    seconds = f"{duration(ttl):g}" if ttl else given.get(settings.CARRIER_TTL)
    added = {settings.CARRIER: form, settings.CARRIER_TTL: seconds}
    return [f"{name}={value}" for name, value in added.items() if value is not None]


def added_by(env: Sequence[str]) -> dict[str, str]:
    """What ``--env`` adds, as far as it is in order."""
    return dict(word.split("=", 1) for word in env if "=" in word)


def stored(
    url: str | None, max_size: int | None, max_per_key: int | None, ttl: str | None
) -> list[str]:
    """What the options of the store add to the environment.

    Raises:
        VllmopsError: ``usage``.
    """
    if url == "":
        raise usage("--store '' is no store; --store none keeps no responses")
    added = {
        settings.STORE: url,
        settings.MAX_SIZE: max_size,
        settings.MAX_PER_KEY: max_per_key,
        settings.TTL: ttl and f"{duration(ttl):g}",
    }
    return [f"{name}={value}" for name, value in added.items() if value is not None]


def check_store(order: launch.Order) -> None:
    """Refuse a store, or carriers, that can't be; a store that is merely down may come up later.

    Raises:
        VllmopsError: ``usage``, ``store.driver`` or ``store.schema``.
    """
    environment = {**os.environ, **order.environment}
    settings.check(environment)
    if not settings.wanted(environment):
        return
    found = settings.backend(environment)
    several = option(order.arguments, "--api-server-count") not in {None, "1"}
    if several and found.url.startswith("memory:"):
        raise usage("memory:// is of one process: with several API servers take another --store")
    asyncio.run(tried(ResponseStore(found, deadline_s=STORE_TIMEOUT_S)))


async def tried(store: ResponseStore) -> None:
    """Open it, and say how it could lose what it has acknowledged."""
    async with store:
        if store.opened:
            with suppress(*store.backend.unavailable, TimeoutError):
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    for each in await store.backend.caveats():
                        say(f"the store: {each}")


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
            raise usage(f"{word!r} is not UTF-8: the instance's record could not keep it")
    if (model is None) == (demo is None) or model == "":
        raise usage("give either a MODEL or --demo text|vision|audio")
    if port is not None and not 1 <= port <= 65535:
        raise usage(f"--port {port}: ports go from 1 to 65535")
    for word in env:
        if not word.partition("=")[0] or "=" not in word:
            raise usage(f"--env {word}: write it as K=V")
    environment = dict(word.split("=", 1) for word in env)
    arguments = behind
    if demo:
        model = str(demos.model_dir(demo))
        arguments = (*demos.serve_arguments(demo), *behind)
        environment = {**demos.serve_environment(), **environment}
    assert model
    # vLLM takes the last one, so what stands behind -- counts; two that differ are a slip.
    behind_host, behind_port = option(behind, "--host"), option(behind, "--port")
    if behind_host and host and behind_host != host:
        raise usage(f"--host {host} and, behind --, --host {behind_host}: give one")
    if behind_port and port and behind_port != str(port):
        raise usage(f"--port {port} and, behind --, --port {behind_port}: give one")
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
    return VllmopsError("usage", message, "vllmops serve --help", exit_code=Exit.USAGE)


def stay(
    session: Session, record: Record, *, detach: bool, log: bool, quiet: bool = False
) -> Record:
    """Show how an instance comes up, and stay with it to its end, or, detached, until ready.

    Args:
        session: the instance's.
        record: as it was before this start.
        detach: whether to leave it once it is ready.
        log: whether to follow its log; else only what a watch says in it.
        quiet: whether to show nothing at all.

    Raises:
        VllmopsError: ``serve.failed``, or ``interrupted`` after Ctrl-C.
    """
    folder, before = session.folder, record.started_at
    told = not (detach or quiet) and (log or record.watch is not None)
    follower = LogFollower(folder, whole=log) if told else None
    terminal = sys.stderr.isatty()
    with Signals(session) as signals, Progress(time.time(), quiet=quiet) as progress:
        for seen in session.records():
            record = seen
            fresh = record.started_at != before
            if follower and fresh and not terminal:  # a service's log is wanted whole
                follower.start()
            if record.state is State.READY and fresh and detach and not signals.count:
                session.close()
                return record
            if record.state is State.READY and fresh and progress.text:
                progress.stop()
                if not quiet:
                    show(*summary(record), stderr=True)
                if follower:
                    progress.plain = True
                    follower.start()
            elif record.state in {State.STARTING, State.STOPPING}:
                stopping = record.state is State.STOPPING
                progress.update(
                    f"{record.name}: {record.note or (record.state if stopping else record.stage)}"
                )
    if follower:
        follower.stop()
    if record.state is State.FAILED:
        raise failed(record, folder)
    if signals.interrupted:
        message = f"{record.name} has stopped" + (f" ({record.note})" if record.note else "")
        raise VllmopsError("interrupted", message, exit_code=Exit.INTERRUPTED)
    return record


class Signals:
    """Turns Ctrl-C and SIGTERM into a drained stop, and a second one into a stop at once.

    A closed terminal (SIGHUP) is not caught: the supervisor sees that the holder has gone.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.count = 0
        self.interrupted = False

    def __enter__(self) -> Self:
        self.before = {n: signal.signal(n, self.on) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on(self, number: int, _: FrameType | None) -> None:
        self.interrupted |= number == signal.SIGINT
        self.session.send(Request(stop=0.0 if self.count else STOP_TIMEOUT_S))
        self.count += 1


class LogFollower:
    """Copies a server's log to stdout as it grows; where not whole, what a watch says in it."""

    def __init__(self, folder: Folder, *, whole: bool) -> None:
        self.whole = whole
        self.name = folder.name
        self.tail = logs.Tail(folder.log)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        """Begin, once, with what comes from now on in a terminal, with all of it in a pipe."""
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
                show(*map(Verbatim, filter(self.wanted, self.tail.lines())))
            except OSError:
                return
            except Exception as error:
                say(f"the log is shown no further: {type(error).__name__}: {error}")
                say(f"  vllmops logs -f {self.name}")
                return

    def wanted(self, line: str) -> bool:
        return self.whole or logs.parse(line).process == logs.WATCH


def instance(record: Record) -> dict[str, Any]:
    """An instance for ``--json``, which is kept in logs: without secrets."""
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
    """What a person wants to know of a server that has just come up."""
    from rich.text import Text  # noqa: PLC0415

    took = f" after {span(record.ready_s)}" if record.ready_s is not None else ""
    where = (" at ", (shown(record.url), "bold")) if record.url else ()
    watch = [f"  watch:       vllmops logs --process watch {record.name}"]
    return [
        Text.assemble((record.name, "bold"), " is ready", *where, took),
        *(["  headless: its API server is another one's"] if record.headless else []),
        f"  log:         vllmops logs -f {record.name}",
        *(watch if record.watch is not None else ()),
        f"  look inside: vllmops cache inspect -t {record.name}",
        f"  stop:        vllmops stop {record.name}" + ("" if record.detached else ", or Ctrl-C"),
    ]


def failed(record: Record, folder: Folder) -> VllmopsError:
    """Why it failed: the cause first, then where to read on."""
    why = record.failure or Failure("unknown")
    who = f"{why.process}, " if why.process else ""
    return VllmopsError(
        "serve.failed",
        f"{why.cause}\n  ({record.name}: {who}at stage {record.stage!r})\n  log: {folder.log}",
        why.hint or f"vllmops logs {record.name}",
        data=instance(record),
    )


def shell_lines(record: Record) -> list[Verbatim]:
    """The command as one would paste it into a shell; what is secret in it is to be put in."""
    from ..bundle.redact import Redactor  # noqa: PLC0415 - few commands need it

    hidden = Redactor()
    environment = hidden.assigned(settings.shown(record.environment))
    assignments = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    words = shlex.join(hidden.words(record.command))
    return [Verbatim(" \\\n  ".join(["env " + " ".join(assignments), words]))]
