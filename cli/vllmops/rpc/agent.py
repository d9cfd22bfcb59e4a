"""Asks the agents inside a server's processes, over their Unix sockets.

A process that is asked in another way is a `Distant` one.
"""

from __future__ import annotations

import errno
import http.client
import os
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..codes import ErrorCode
from ..errors import Exit, VllmopsError
from ..files import peer, read_private
from ..home import home, user
from ..host import proc, ptrace
from ..host.processes import Process
from ..protocol.caches import ProcessCaches, Silent
from ..protocol.compares import CompareRequest, Comparison
from ..protocol.engine import BEAT_BYTES, SCHEMA, Answer, Beat, EngineState, Hello, Traffic
from ..protocol.fatal import FatalMessages
from ..protocol.files import DAMAGE
from ..protocol.heal import Healing, HealRequest
from ..protocol.identity import Identity
from ..protocol.keys import ProcessKeys
from ..protocol.memory import AgentMemory
from ..protocol.packages import Packages
from ..protocol.patches import ProcessPatches
from ..protocol.place import named
from ..protocol.remote import Members
from ..protocol.repairs import ProcessRepair, RepairRequest
from ..protocol.requests import Abort, Aborted, ProcessRequests, Prompt, Reveal
from ..protocol.resets import ResetDone, ResetRequest
from ..protocol.socket import PATH_BYTES, sockets
from ..protocol.stacks import AgentStacks, ProcessStacks
from ..protocol.steps import StepsFile, StepsRecording, recording

TIMEOUT_S = 2.0
# Beats come every second; this many seconds without one mean that Python no longer runs.
BEAT_LATE_S = 5.0
ANCESTORS = 4
ANSWER_BYTES = 256 << 20  # the keys of some million cache entries

# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
DECODERS: dict[type[Answer], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        *(Aborted, AgentMemory, AgentStacks, Answer, Hello, EngineState, ProcessCaches),
        *(Comparison, FatalMessages, Healing, Members, Packages, ProcessKeys, ProcessPatches),
        *(ProcessRepair, ProcessRequests, Prompt, ResetDone, StepsFile, StepsRecording, Traffic),
    )
}
BEATS = msgspec.json.Decoder(Beat)

A = TypeVar("A", bound=Answer)
P = TypeVar("P")


class Agent:
    """The agent of one process, verified by `reach`, which makes it.

    Every method raises VllmopsError: ``agent.timeout``, ``agent.stale``, ``agent.broken``,
    ``agent.older`` or ``agent.newer``.

    Args:
        process: whose agent.
        path: its socket.
        timeout_s: seconds for each question, connecting included.
        uid: who is to answer; None for the process's user.
    """

    def __init__(
        self, process: Process, path: Path, timeout_s: float = TIMEOUT_S, uid: int | None = None
    ) -> None:
        self.process = process
        self.path = path
        self.timeout_s = timeout_s
        self.uid = owner(process) if uid is None else uid
        self.kept: Connection | None = None

    def hello(self) -> Hello:
        """Who it is, as it knows itself."""
        return self.ask("GET", "/hello", Hello)

    def engine(self) -> EngineState:
        """How its engine is doing, with the place from the process tree."""
        answer = self.ask("GET", "/engine", EngineState)
        return msgspec.structs.replace(answer, **msgspec.structs.asdict(self.process.place))

    def caches(self, *, keys: bool = False) -> ProcessCaches:
        """Its caches.

        Args:
            keys: whether to list every key of LRU caches too.
        """
        return self.ask("GET", "/caches?keys=1" if keys else "/caches", ProcessCaches)

    def patches(self, *, verify: bool = False) -> ProcessPatches:
        """Its patches.

        Args:
            verify: whether to probe again.
        """
        return self.ask("GET", "/patches?verify=1" if verify else "/patches", ProcessPatches)

    def packages(self) -> Packages:
        """What is installed beside it."""
        return self.ask("GET", "/packages", Packages)

    def memory(self) -> AgentMemory:
        """What only the process itself knows of its memory."""
        return self.ask("GET", "/memory", AgentMemory)

    def messages(self) -> FatalMessages:
        """The messages that ended a thread of it."""
        return self.ask("GET", "/messages", FatalMessages)

    def keys(self, *, reload: bool = False) -> ProcessKeys:
        """Its keys, without their secrets.

        Args:
            reload: whether it is to read their file first.
        """
        return self.ask("GET", "/keys?reload=1" if reload else "/keys", ProcessKeys)

    def stacks(self) -> ProcessStacks:
        """Its own view of its threads."""
        stacks = self.ask("GET", "/stacks", AgentStacks).stacks
        return msgspec.structs.replace(stacks, **shown(self.process), pid=self.process.pid)

    def steps(self) -> StepsRecording:
        """The last steps of its engine."""
        answer = self.ask("GET", "/steps", StepsFile)
        recording_ = recording(answer.content, self.process.pid, self.process.role)
        return msgspec.structs.replace(recording_, **shown(self.process))

    def traffic(self) -> Traffic:
        """How many HTTP requests it has."""
        return self.ask("GET", "/traffic", Traffic)

    def requests(self) -> ProcessRequests:
        """The requests that it knows."""
        return self.ask("GET", "/requests", ProcessRequests)

    def prompt(self, request_id: str) -> Prompt:
        """The prompt of a request that it knows."""
        return self.ask("POST", "/prompt", Prompt, msgspec.json.encode(Reveal(id=request_id)))

    def abort(self, request: Abort) -> Aborted:
        """End requests."""
        return self.ask("POST", "/abort", Aborted, msgspec.json.encode(request))

    def drain(
        self, on: bool = True, *, cut: bool = False, rerun: bool = False, leave: bool = False
    ) -> Traffic:
        """Refuse new HTTP requests from now on, or take them again.

        Args:
            on: whether to refuse them.
            cut: whether to refuse those in flight, too.
            rerun: whether the next start runs again what now runs in the background.
            leave: whether to take no more connections.
        """
        body = msgspec.json.encode({"on": on, "cut": cut, "rerun": rerun, "leave": leave})
        return self.ask("POST", "/drain", Traffic, body)

    def repair(self, request: RepairRequest) -> ProcessRepair:
        """Repair its caches."""
        return self.ask("POST", "/repair", ProcessRepair, msgspec.json.encode(request))

    def heal(self, request: HealRequest) -> Healing:
        """Look for a state that can be healed, or heal it."""
        return self.ask("POST", "/heal", Healing, msgspec.json.encode(request))

    def reset(self, request: ResetRequest) -> ResetDone:
        """Empty the multimodal caches of an API server and its engine."""
        return self.ask("POST", "/reset", ResetDone, msgspec.json.encode(request))

    def compare(self, request: CompareRequest) -> Comparison:
        """Both sides of the caches of an API server and its engines, while they work."""
        return self.ask("POST", "/compare", Comparison, msgspec.json.encode(request))

    def ask(self, method: str, path: str, kind: type[A], body: bytes | None = None) -> A:
        """Ask one question and decode the answer."""
        status, content = self.exchange(method, path, body)
        if status != http.client.OK:
            raise broken(self.process, f"it answered {status} to {path}: {content[:200]!r}")
        answer = decode(f"the agent of {name(self.process)}", content, kind)
        # The process tree knows its role better, and in a container it has another pid for itself.
        known = {**shown(self.process), "pid": self.process.pid}
        own = () if kind is Hello else known.keys() & kind.__struct_fields__
        return msgspec.structs.replace(answer, **{field: known[field] for field in own})

    def exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Ask one question; the status and the content of the answer."""
        connection = Connection(self.path, self.timeout_s, self.uid)
        if method == "GET":
            # A connection costs the process a thread, so questions share one; what changes
            # something has its own, as it must not be sent twice.
            self.kept, connection = None, self.kept or connection
        try:
            status, content = connection.exchange(method, path, body)
        except (TimeoutError, BlockingIOError) as error:
            connection.close()
            raise silent(self.process, self.timeout_s) from error
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise unreachable(self.process, self.path, error) from error
        if method == "GET":
            self.kept = connection
        else:
            connection.close()
        return status, content


class Timely(socket.socket):
    """A socket whose answers end by a deadline, however slowly they arrive."""

    deadline = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.settimeout(self.left())
        return super().recv_into(*args, **options)

    def left(self) -> float:
        """Seconds until the deadline; raises TimeoutError after it."""
        if (left := self.deadline - time.monotonic()) > 0:
            return left
        raise TimeoutError


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket; the standard library's, because httpx takes 0.1 s to import.

    Args:
        path: of the socket.
        timeout_s: seconds for each exchange.
        uid: who is to answer.
    """

    def __init__(self, path: Path, timeout_s: float, uid: int) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.path = path
        self.timeout_s = timeout_s
        self.uid = uid

    def exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a request and read the answer: its status, its content.

        Raises:
            OSError: TimeoutError where it takes too long, PermissionError if somebody else
                answers.
            http.client.HTTPException: no proper answer, or one that is too long.
        """
        used = self.sock is not None
        if isinstance(self.sock, Timely):
            self.sock.deadline = time.monotonic() + self.timeout_s
        try:
            self.request(method, path, body)
            response = self.getresponse()
        except (ConnectionError, http.client.HTTPException):
            if not used:
                raise
            # The agent closes a connection that has been silent for a while.
            self.close()
            self.request(method, path, body)
            response = self.getresponse()
        content = response.read(ANSWER_BYTES + 1)
        if len(content) > ANSWER_BYTES:
            raise http.client.HTTPException(f"it has more than {ANSWER_BYTES >> 20} MiB")
        return response.status, content

    def connect(self) -> None:
        self.sock = made = Timely(socket.AF_UNIX)
        made.settimeout(self.timeout_s)
        made.deadline = time.monotonic() + self.timeout_s
        # By its folder: a path through another process's root may be too long for a socket.
        folder = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.knock(made, f"/proc/self/fd/{folder}/{self.path.name}")
        finally:
            os.close(folder)
        # Since the check of the path, another user may have put another socket there.
        if (uid := peer(made)) != self.uid:
            raise PermissionError(errno.EPERM, f"is answered by {user(uid)}")

    def knock(self, made: Timely, path: str) -> None:
        while True:
            try:
                made.connect(path)
                return
            except BlockingIOError:
                # The queue is full. A Unix socket says so instead of waiting.
                if time.monotonic() > made.deadline:
                    raise
                time.sleep(0.01)


class Distant(Process):
    """A process whose agent this machine can't ask over its Unix socket."""

    def agent(self, timeout_s: float) -> Agent:
        """What asks its agent.

        Args:
            timeout_s: seconds for each question.
        """
        raise NotImplementedError

    def pulse(self) -> Pulse | None:
        """Its last heartbeat; raises VllmopsError."""
        raise NotImplementedError


def reach(process: Process, *, timeout_s: float = TIMEOUT_S) -> Agent:
    """The agent of a process, after checking that it is this process's own.

    Args:
        process: as discovery found it.
        timeout_s: seconds for each question.

    Raises:
        VllmopsError: ``agent.gone``, ``agent.absent``, ``agent.other-user``, ``agent.unsafe``,
            ``agent.stale``, ``agent.path-too-long``, ``agent.mismatch``, ``agent.timeout``,
            ``agent.broken``, ``agent.older`` or ``agent.newer``.
    """
    if isinstance(process, Distant):
        distant = process.agent(timeout_s)
        distant.hello()  # the server has made sure that it is the process's own
        return distant
    uid = owner(process)
    if os.geteuid() not in (0, uid):
        raise VllmopsError(
            "agent.other-user",
            f"{name(process)} belongs to {user(uid)}; its agent answers only {user(uid)} and root",
            f"sudo -u {user(uid)} vllmops …, or sudo vllmops …",
        )
    path = socket_path(process)
    for part in (path.parent, path):
        safe(process, part, uid)
    agent = Agent(process, path, timeout_s, uid)
    hello = agent.hello()
    if hello.identity != own_identity(process):
        raise VllmopsError(
            "agent.mismatch",
            f"{path} answers for pid {hello.pid} that started {hello.start_ticks} ticks after boot,"
            f" not for {name(process)} that started after {process.start_ticks}",
            "vllmops ps",
        )
    return agent


def side_by_side(
    processes: Iterable[Process], ask: Callable[[Process], P]
) -> tuple[list[P], list[Silent]]:
    """Ask about every process at the same time.

    Returns:
        The answers, and the processes for which `ask` raised VllmopsError; each in the order
        of `processes`.
    """

    def one(process: Process) -> tuple[list[P], list[Silent]]:
        try:
            return [ask(process)], []
        except VllmopsError as error:
            return [], [untold(process, error)]

    processes = list(processes)
    with ThreadPoolExecutor(max(len(processes), 1)) as pool:
        answers = list(pool.map(one, processes))
    return [answer for parts, _ in answers for answer in parts], [
        process for _, silent in answers for process in silent
    ]


def untold(process: Process, error: VllmopsError) -> Silent:
    """A process that did not answer, with the age of its heartbeat."""
    try:
        pulse = beat(process)
    except VllmopsError:
        pulse = None
    return Silent(
        **shown(process),
        pid=process.pid,
        code=error.code,
        why=error.message,
        hint=error.hint,
        exit_code=error.exit_code,
        beat_age_s=pulse.age_s if pulse else None,
    )


def nobody(code: ErrorCode, what: str, silent: Sequence[Silent]) -> VllmopsError:
    """One error for all processes that did not answer, if none did.

    Args:
        code: as in `VllmopsError`.
        what: what can't be done.
        silent: the processes that did not answer; at least one.
    """
    return VllmopsError(
        code,
        f"{what}: {'; '.join(dict.fromkeys(process.why for process in silent))}",
        silent[0].hint,
        exit_code=Exit(silent[0].exit_code),
        data={"silent": msgspec.to_builtins(silent)},
    )


@dataclass(frozen=True)
class Pulse:
    """A heartbeat as read from outside.

    Args:
        beat: its content.
        age_s: seconds since it was written.
    """

    beat: Beat
    age_s: float

    @property
    def late(self) -> bool:
        """Whether the process seems to run no Python any more."""
        return self.age_s > BEAT_LATE_S


def beat(process: Process) -> Pulse | None:
    """The last heartbeat of a process, read from its file without asking the process.

    Returns:
        None if there is none that is readable, of this process, and of a known schema.
    """
    if isinstance(process, Distant):
        return process.pulse()
    path, uid = socket_path(process).with_suffix(".beat"), owner(process)
    for _ in range(3):
        try:
            beat_ = BEATS.decode(read_private(path, uid, BEAT_BYTES))
        except OSError:
            return None
        except DAMAGE:
            time.sleep(0.005)  # caught in the middle of a write
            continue
        own = beat_.schema == SCHEMA and beat_.identity == own_identity(process)
        return Pulse(beat_, max(time.monotonic() - beat_.monotonic, 0.0)) if own else None
    return None


def own_identity(process: Process) -> Identity:
    """The identity of a process as it knows itself; raises ``agent.gone``."""
    try:
        return process.identity._replace(pid=proc.own_pid(process.pid))
    except OSError as error:
        raise gone(process) from error


def listed(place: Path) -> set[int]:
    """The pids of the processes whose agents are, or were, in a state directory."""
    try:
        names = os.listdir(sockets(place))
    except OSError:
        return set()
    stems = (name.removesuffix(".beat") for name in names if name.endswith(".beat"))
    return {int(stem) for stem in stems if stem.isdecimal()}


def socket_path(process: Process) -> Path:
    """Where the process's agent listens, by the process's own environment, as seen from here."""
    path = sockets(state_home(process)) / f"{own_identity(process).pid}.sock"
    try:
        return proc.seen(process.pid, str(path))
    except OSError:
        return path


def state_home(process: Process) -> Path:
    """The state directory that the process's agent uses, by the process's own environment.

    Raises:
        VllmopsError: ``agent.gone``.
    """
    if process.home:
        return Path(process.home)
    uid, pid = owner(process), process.pid
    for _ in range(ANCESTORS):
        environment = proc.environment(pid)
        if environment.keys() & {"VLLMOPS_HOME", "HOME", "PATH"}:
            break
        # setproctitle writes over the environment that the kernel shows: ask the parent, whose
        # environment vLLM handed down.
        pid = proc.parent(pid)
    else:
        return home()
    if chosen := environment.get("VLLMOPS_HOME"):
        # What may be read of a process need not include where it is.
        return Path(chosen if os.path.isabs(chosen) else os.path.join(proc.directory(pid), chosen))
    state = environment.get("XDG_STATE_HOME")
    return (
        Path(state or Path(environment.get("HOME") or proc.home_of(uid)) / ".local/state")
        / "vllmops"
    )


def owner(process: Process) -> int:
    """The uid that the process runs as."""
    try:
        # The effective one, as the agent has it.
        return proc.effective_uid(process.pid)
    except OSError as error:
        raise gone(process) from error


def gone(process: Process) -> VllmopsError:
    return VllmopsError("agent.gone", f"{name(process)} is gone", "vllmops ps")


def safe(process: Process, path: Path, uid: int) -> None:
    """Check that only the process's user can use a socket or its directory.

    Raises:
        VllmopsError: ``agent.absent`` or ``agent.unsafe``.
    """
    try:
        at = path.lstat()
    except OSError as error:
        raise absent(process, path) from error
    wanted = stat.S_ISSOCK if path.suffix == ".sock" else stat.S_ISDIR
    wrong, hint = None, "restart the server with a VLLMOPS_HOME that belongs to the server's user"
    if not wanted(at.st_mode):
        wrong = f"is not a {'socket' if path.suffix == '.sock' else 'directory'}"
    elif at.st_uid != uid:
        wrong = f"belongs to {user(at.st_uid)}, not to {user(uid)}"
    elif stat.S_IMODE(at.st_mode) & 0o077:
        wrong = f"is open to others (mode {stat.S_IMODE(at.st_mode):o})"
        directory = stat.S_ISDIR(at.st_mode)
        hint = f"chmod {'700' if directory else '600'} {shlex.quote(str(path))}; if the server"
        hint += " then still has no agent, restart it"
    if wrong:
        raise unsafe(process, path, wrong, hint)


def unsafe(
    process: Process, path: Path, wrong: str, hint: str = "vllmops ps shows what runs"
) -> VllmopsError:
    return VllmopsError(
        "agent.unsafe",
        f"{path} {wrong}: another program may answer there in place of {name(process)}",
        hint,
    )


def decode(who: str, content: bytes, kind: type[A]) -> A:
    """Decode an answer, telling an older or newer agent apart from a broken one.

    Args:
        who: how messages name who answered.
        content: the answer.
        kind: its type.

    Raises:
        VllmopsError: ``agent.broken``, ``agent.older`` or ``agent.newer``.
    """
    try:
        schema = DECODERS[Answer].decode(content).schema
        if schema == SCHEMA:
            answer: A = DECODERS[kind].decode(content)
            return answer
    except DAMAGE as error:
        raise invalid(who, f"its answer can't be read: {error}") from error
    schemas = f"(its schema is {schema}, this one's is {SCHEMA})"
    if schema < SCHEMA:
        raise VllmopsError(
            "agent.older",
            f"{who} is older than this vllmops {schemas}",
            "restart the server, so that it loads this vllmops",
        )
    raise VllmopsError(
        "agent.newer",
        f"{who} is newer than this vllmops {schemas}",
        "use the vllmops version of the server",
    )


def silent(process: Process, timeout_s: float | None = None) -> VllmopsError:
    """No answer in time: the heartbeat shows whether the process still runs Python.

    Args:
        process: whose agent.
        timeout_s: for how many seconds it was waited for; None where it was not asked.
    """
    pulse = beat(process)
    did = "can't answer" if timeout_s is None else f"did not answer within {timeout_s:g} s"
    what = f"the agent of {name(process)} {did}"
    if pulse is None:
        what += ", and it has no heartbeat"
    elif pulse.late:
        what += f"; its last heartbeat is {pulse.age_s:.0f} s old: stopped, or stuck in native code"
    else:
        what += f"; its last heartbeat is {pulse.age_s:.0f} s old"
    return VllmopsError(
        "agent.timeout",
        what,
        f"vllmops stacks dump -t {process.pid}",
        data={"beat_age_s": pulse.age_s if pulse else None},
    )


def unreachable(process: Process, path: Path, error: Exception) -> VllmopsError:
    """Nobody listens, or the connection broke."""
    if isinstance(error, PermissionError) and error.errno == errno.EPERM:
        return unsafe(process, path, error.strerror or str(error))
    if isinstance(error, FileNotFoundError):
        return absent(process, path)
    if isinstance(error, ConnectionRefusedError):
        return VllmopsError(
            "agent.stale",
            f"no process listens on {path}: the file is a leftover, {name(process)} has no agent",
            f"vllmops attach -t {process.pid}",
        )
    return broken(process, f"{type(error).__name__}: {error}")


def absent(process: Process, path: Path) -> VllmopsError:
    try:
        proc.elsewhere(process.pid)
    except PermissionError:
        why = ptrace.refusal(process.pid, ptrace.rights(process.pid), "status")
        return VllmopsError(
            "agent.unreadable",
            f"the agent of {name(process)} can't be found: {why.message}",
            why.hint,
        )
    except OSError:
        return gone(process)
    own = sockets(state_home(process)) / path.name
    if len(os.fsencode(own)) > PATH_BYTES:
        return VllmopsError(
            "agent.path-too-long",
            f"the agent of {name(process)} is off: the path of a Unix socket has at most "
            f"{PATH_BYTES} bytes, and {own} has {len(os.fsencode(own))}",
            "start the server with a shorter VLLMOPS_HOME",
        )
    return VllmopsError(
        "agent.absent",
        f"{name(process)} has no agent (there is no {path})",
        f"vllmops attach -t {process.pid} loads it now; a server has it from its start where "
        "vllmops-cli is installed beside vLLM, unless VLLMOPS_DISABLE or VLLM_PLUGINS turn it off",
    )


def broken(process: Process, why: str) -> VllmopsError:
    return invalid(f"the agent of {name(process)}", why)


def invalid(who: str, why: str) -> VllmopsError:
    return VllmopsError(
        "agent.broken",
        f"{who} gave an invalid answer: {why}",
        "vllmops logs shows the errors of the agent",
    )


def shown(process: Process) -> dict[str, Any]:
    """Role and place of a process, as fields of a row about it."""
    return {"role": process.role.value, **msgspec.structs.asdict(process.place)}


def name(process: Process) -> str:
    """How messages name a process."""
    return f"{named(process.role, process.place)} {process.pid}"
