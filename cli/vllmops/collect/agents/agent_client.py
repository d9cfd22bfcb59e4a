"""Asks the agents inside a server's processes, over their Unix sockets.

A process that is asked in another way is a `ProxiedProcess` one.
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
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...model.admin_api import ServerProcesses
from ...model.agent_socket import PATH_BYTES, get_socket_directory
from ...model.agent_state import (
    SCHEMA,
    AgentAnswer,
    EngineState,
    Hello,
    Traffic,
)
from ...model.cache_comparison import CacheComparison, CompareRequest
from ...model.cache_repairs import ProcessRepair, RepairRequest
from ...model.cache_resets import ResetAnswer, ResetRequest
from ...model.caches import ProcessCaches, ProcessGap
from ...model.fatal_messages import FatalMessages
from ...model.healing import HealAnswer, HealRequest
from ...model.keys import ProcessKeys
from ...model.memory import AgentMemory
from ...model.package_versions import InstalledPackages
from ...model.patches import ProcessPatches
from ...model.requests import (
    AbortAnswer,
    AbortRequest,
    ProcessRequests,
    PromptAnswer,
    PromptRequest,
)
from ...model.snapshot_files import DAMAGE
from ...model.stacks import AgentStacks, ProcessStacks
from ...model.step_recording import StepsFile, StepsRecording, parse_recording
from ...support.error_codes import ErrorCode
from ...support.errors import ExitCode, VllmopsError
from ...support.files import read_peer_uid
from ...support.home import format_user
from ..machine import proc, ptrace_permission
from ..machine.processes import Process, format_process_name
from . import agent_files

TIMEOUT_S = 2.0
ANSWER_BYTES = 256 << 20  # the keys of some million cache entries

# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
DECODERS: dict[type[AgentAnswer], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        *(AbortAnswer, AgentMemory, AgentStacks, AgentAnswer, Hello, EngineState, ProcessCaches),
        *(
            CacheComparison,
            FatalMessages,
            HealAnswer,
            ServerProcesses,
            InstalledPackages,
            ProcessKeys,
            ProcessPatches,
        ),
        *(
            ProcessRepair,
            ProcessRequests,
            PromptAnswer,
            ResetAnswer,
            StepsFile,
            StepsRecording,
            Traffic,
        ),
    )
}

A = TypeVar("A", bound=AgentAnswer)
P = TypeVar("P")


class Agent:
    """The agent of one process, verified by `open_agent`, which makes it.

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
        self.uid = agent_files.read_process_uid(process) if uid is None else uid
        self.idle_connection: AgentConnection | None = None

    def fetch_hello(self) -> Hello:
        """Who it is, as it knows itself."""
        return self.fetch_answer("GET", "/hello", Hello)

    def fetch_engine_state(self) -> EngineState:
        """How its engine is doing, with the place from the process tree."""
        answer = self.fetch_answer("GET", "/engine", EngineState)
        return msgspec.structs.replace(answer, **msgspec.structs.asdict(self.process.place))

    def fetch_caches(self, *, keys: bool = False) -> ProcessCaches:
        """Its caches.

        Args:
            keys: whether to list every key of LRU caches too.
        """
        return self.fetch_answer("GET", "/caches?keys=1" if keys else "/caches", ProcessCaches)

    def fetch_patches(self, *, verify: bool = False) -> ProcessPatches:
        """Its patches.

        Args:
            verify: whether to probe again.
        """
        return self.fetch_answer(
            "GET", "/patches?verify=1" if verify else "/patches", ProcessPatches
        )

    def fetch_packages(self) -> InstalledPackages:
        """What is installed beside it."""
        return self.fetch_answer("GET", "/packages", InstalledPackages)

    def fetch_memory(self) -> AgentMemory:
        """What only the process itself knows of its memory."""
        return self.fetch_answer("GET", "/memory", AgentMemory)

    def fetch_fatal_messages(self) -> FatalMessages:
        """The messages that ended a thread of it."""
        return self.fetch_answer("GET", "/messages", FatalMessages)

    def fetch_keys(self, *, reload: bool = False) -> ProcessKeys:
        """Its keys, without their secrets.

        Args:
            reload: whether it is to read their file first.
        """
        return self.fetch_answer("GET", "/keys?reload=1" if reload else "/keys", ProcessKeys)

    def fetch_stacks(self) -> ProcessStacks:
        """Its own view of its threads."""
        stacks = self.fetch_answer("GET", "/stacks", AgentStacks).stacks
        return msgspec.structs.replace(
            stacks, **get_process_fields(self.process), pid=self.process.pid
        )

    def fetch_recording(self) -> StepsRecording:
        """The last steps of its engine."""
        answer = self.fetch_answer("GET", "/steps", StepsFile)
        recording_ = parse_recording(answer.content, self.process.pid, self.process.role)
        return msgspec.structs.replace(recording_, **get_process_fields(self.process))

    def fetch_traffic(self) -> Traffic:
        """How many HTTP requests it has."""
        return self.fetch_answer("GET", "/traffic", Traffic)

    def fetch_requests(self) -> ProcessRequests:
        """The requests that it knows."""
        return self.fetch_answer("GET", "/requests", ProcessRequests)

    def fetch_prompt(self, request_id: str) -> PromptAnswer:
        """The prompt of a request that it knows."""
        return self.fetch_answer(
            "POST", "/prompt", PromptAnswer, msgspec.json.encode(PromptRequest(id=request_id))
        )

    def abort_requests(self, request: AbortRequest) -> AbortAnswer:
        """End requests."""
        return self.fetch_answer("POST", "/abort", AbortAnswer, msgspec.json.encode(request))

    def set_draining(
        self, draining: bool = True, *, cut: bool = False, rerun: bool = False, leave: bool = False
    ) -> Traffic:
        """Refuse new HTTP requests from now on, or take them again.

        Args:
            draining: whether to refuse them.
            cut: whether to refuse those in flight, too.
            rerun: whether the next start runs again what now runs in the background.
            leave: whether to take no more connections.
        """
        body = msgspec.json.encode({"on": draining, "cut": cut, "rerun": rerun, "leave": leave})
        return self.fetch_answer("POST", "/drain", Traffic, body)

    def repair_caches(self, request: RepairRequest) -> ProcessRepair:
        """Repair its caches."""
        return self.fetch_answer("POST", "/repair", ProcessRepair, msgspec.json.encode(request))

    def send_heal_request(self, request: HealRequest) -> HealAnswer:
        """Look for a state that can be healed, or heal it."""
        return self.fetch_answer("POST", "/heal", HealAnswer, msgspec.json.encode(request))

    def reset_caches(self, request: ResetRequest) -> ResetAnswer:
        """Empty the multimodal caches of an API server and its engine."""
        return self.fetch_answer("POST", "/reset", ResetAnswer, msgspec.json.encode(request))

    def compare_caches(self, request: CompareRequest) -> CacheComparison:
        """Both sides of the caches of an API server and its engines, while they work."""
        return self.fetch_answer("POST", "/compare", CacheComparison, msgspec.json.encode(request))

    def fetch_answer(self, method: str, path: str, kind: type[A], body: bytes | None = None) -> A:
        """Ask one question and decode the answer."""
        status, content = self.send_request(method, path, body)
        if status != http.client.OK:
            raise make_broken_agent_error(
                self.process, f"it answered {status} to {path}: {content[:200]!r}"
            )
        answer = decode_answer(f"the agent of {format_process_name(self.process)}", content, kind)
        # The process tree knows its role better, and in a container it has another pid for itself.
        known = {**get_process_fields(self.process), "pid": self.process.pid}
        own = () if kind is Hello else known.keys() & kind.__struct_fields__
        return msgspec.structs.replace(answer, **{field: known[field] for field in own})

    def send_request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Ask one question; the status and the content of the answer."""
        connection = AgentConnection(self.path, self.timeout_s, self.uid)
        if method == "GET":
            # A connection costs the process a thread, so questions share one; what changes
            # something has its own, as it must not be sent twice.
            self.idle_connection, connection = None, self.idle_connection or connection
        try:
            status, content = connection.send_request(method, path, body)
        except (TimeoutError, BlockingIOError) as error:
            connection.close()
            raise make_timeout_error(self.process, self.timeout_s) from error
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise make_unreachable_error(self.process, self.path, error) from error
        if method == "GET":
            self.idle_connection = connection
        else:
            connection.close()
        return status, content


class ProxiedAgent(Agent):
    """An agent that is asked through its `ProxiedProcess`, and raises as that does.

    Args:
        process: whose agent.
        timeout_s: seconds for each question.
    """

    process: agent_files.ProxiedProcess

    def __init__(self, process: agent_files.ProxiedProcess, timeout_s: float) -> None:
        self.process = process
        self.timeout_s = timeout_s

    def send_request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        return self.process.send_request(method, path, body, self.timeout_s)


class DeadlineSocket(socket.socket):
    """A socket whose answers end by a deadline, however slowly they arrive."""

    deadline = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.settimeout(self.remaining_s())
        return super().recv_into(*args, **options)

    def remaining_s(self) -> float:
        """Seconds until the deadline; raises TimeoutError after it."""
        if (left := self.deadline - time.monotonic()) > 0:
            return left
        raise TimeoutError


class AgentConnection(http.client.HTTPConnection):
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

    def send_request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a request and read the answer: its status, its content.

        Raises:
            OSError: TimeoutError where it takes too long, PermissionError if somebody else
                answers.
            http.client.HTTPException: no proper answer, or one that is too long.
        """
        used = self.sock is not None
        if isinstance(self.sock, DeadlineSocket):
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
        self.sock = made = DeadlineSocket(socket.AF_UNIX)
        made.settimeout(self.timeout_s)
        made.deadline = time.monotonic() + self.timeout_s
        # By its folder: a path through another process's root may be too long for a socket.
        folder = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.connect_with_retry(made, f"/proc/self/fd/{folder}/{self.path.name}")
        finally:
            os.close(folder)
        # Since the check of the path, another user may have put another socket there.
        if (uid := read_peer_uid(made)) != self.uid:
            raise PermissionError(errno.EPERM, f"is answered by {format_user(uid)}")

    def connect_with_retry(self, deadline_socket: DeadlineSocket, path: str) -> None:
        while True:
            try:
                deadline_socket.connect(path)
                return
            except BlockingIOError:
                # The queue is full. A Unix socket says so instead of waiting.
                if time.monotonic() > deadline_socket.deadline:
                    raise
                time.sleep(0.01)


def open_agent(process: Process, *, timeout_s: float = TIMEOUT_S) -> Agent:
    """The agent of a process, after checking that it is this process's own.

    Args:
        process: as discovery found it.
        timeout_s: seconds for each question.

    Raises:
        VllmopsError: ``agent.gone``, ``agent.absent``, ``agent.other-user``, ``agent.unsafe``,
            ``agent.stale``, ``agent.path-too-long``, ``agent.mismatch``, ``agent.timeout``,
            ``agent.broken``, ``agent.older`` or ``agent.newer``.
    """
    if isinstance(process, agent_files.ProxiedProcess):
        proxied = ProxiedAgent(process, timeout_s)
        proxied.fetch_hello()  # the server has made sure that it is the process's own
        return proxied
    uid = agent_files.read_process_uid(process)
    if os.geteuid() not in (0, uid):
        raise VllmopsError(
            "agent.other-user",
            f"{format_process_name(process)} belongs to {format_user(uid)}; its agent answers only "
            f"{format_user(uid)} and root",
            f"sudo -u {format_user(uid)} vllmops …, or sudo vllmops …",
        )
    path = agent_files.find_socket_path(process)
    for part in (path.parent, path):
        require_private_path(process, part, uid)
    agent = Agent(process, path, timeout_s, uid)
    hello = agent.fetch_hello()
    if hello.identity != agent_files.read_namespace_identity(process):
        raise VllmopsError(
            "agent.mismatch",
            f"{path} answers for pid {hello.pid} that started {hello.start_ticks} ticks after boot,"
            f" not for {format_process_name(process)} that started after {process.start_ticks}",
            "vllmops ps",
        )
    return agent


def collect_answers(
    processes: Iterable[Process], ask: Callable[[Process], P]
) -> tuple[list[P], list[ProcessGap]]:
    """Ask about every process at the same time.

    Returns:
        The answers, and the processes for which `fetch_answer` raised VllmopsError; each in the
        order of `processes`.
    """

    def answer_or_gap(process: Process) -> tuple[list[P], list[ProcessGap]]:
        try:
            return [ask(process)], []
        except VllmopsError as error:
            return [], [make_gap(process, error)]

    processes = list(processes)
    with ThreadPoolExecutor(max(len(processes), 1)) as pool:
        answers = list(pool.map(answer_or_gap, processes))
    return [answer for parts, _ in answers for answer in parts], [
        process for _, silent in answers for process in silent
    ]


def make_gap(process: Process, error: VllmopsError) -> ProcessGap:
    """A process that did not answer, with the age of its heartbeat."""
    try:
        pulse = agent_files.read_heartbeat(process)
    except VllmopsError:
        pulse = None
    return ProcessGap(
        **get_process_fields(process),
        pid=process.pid,
        code=error.code,
        reason=error.message,
        hint=error.hint,
        exit_code=error.exit_code,
        beat_age_s=pulse.age_s if pulse else None,
    )


def make_no_answer_error(code: ErrorCode, problem: str, gaps: Sequence[ProcessGap]) -> VllmopsError:
    """One error for all processes that did not answer, if none did.

    Args:
        code: as in `VllmopsError`.
        problem: what can't be done.
        gaps: the processes that did not answer; at least one.
    """
    return VllmopsError(
        code,
        f"{problem}: {'; '.join(dict.fromkeys(process.reason for process in gaps))}",
        gaps[0].hint,
        exit_code=ExitCode(gaps[0].exit_code),
        data={"silent": msgspec.to_builtins(gaps)},
    )


def require_private_path(process: Process, path: Path, uid: int) -> None:
    """Check that only the process's user can use a socket or its directory.

    Raises:
        VllmopsError: ``agent.absent`` or ``agent.unsafe``.
    """
    try:
        at = path.lstat()
    except OSError as error:
        raise make_absent_error(process, path) from error
    wanted = stat.S_ISSOCK if path.suffix == ".sock" else stat.S_ISDIR
    wrong, hint = None, "restart the server with a VLLMOPS_HOME that belongs to the server's user"
    if not wanted(at.st_mode):
        wrong = f"is not a {'socket' if path.suffix == '.sock' else 'directory'}"
    elif at.st_uid != uid:
        wrong = f"belongs to {format_user(at.st_uid)}, not to {format_user(uid)}"
    elif stat.S_IMODE(at.st_mode) & 0o077:
        wrong = f"is open to others (mode {stat.S_IMODE(at.st_mode):o})"
        directory = stat.S_ISDIR(at.st_mode)
        hint = f"chmod {'700' if directory else '600'} {shlex.quote(str(path))}; if the server"
        hint += " then still has no agent, restart it"
    if wrong:
        raise make_unsafe_error(process, path, wrong, hint)


def make_unsafe_error(
    process: Process, path: Path, problem: str, hint: str = "vllmops ps shows what runs"
) -> VllmopsError:
    return VllmopsError(
        "agent.unsafe",
        f"{path} {problem}: another program may answer there in place of "
        f"{format_process_name(process)}",
        hint,
    )


def decode_answer(process_name: str, content: bytes, kind: type[A]) -> A:
    """Decode an answer, telling an older or newer agent apart from a broken one.

    Args:
        process_name: how messages name who answered.
        content: the answer.
        kind: its type.

    Raises:
        VllmopsError: ``agent.broken``, ``agent.older`` or ``agent.newer``.
    """
    try:
        schema = DECODERS[AgentAnswer].decode(content).schema
        if schema == SCHEMA:
            answer: A = DECODERS[kind].decode(content)
            return answer
    except DAMAGE as error:
        raise make_invalid_answer_error(
            process_name, f"its answer can't be read: {error}"
        ) from error
    schemas = f"(its schema is {schema}, this one's is {SCHEMA})"
    if schema < SCHEMA:
        raise VllmopsError(
            "agent.older",
            f"{process_name} is older than this vllmops {schemas}",
            "restart the server, so that it loads this vllmops",
        )
    raise VllmopsError(
        "agent.newer",
        f"{process_name} is newer than this vllmops {schemas}",
        "use the vllmops version of the server",
    )


def make_timeout_error(process: Process, timeout_s: float | None = None) -> VllmopsError:
    """No answer in time: the heartbeat shows whether the process still runs Python.

    Args:
        process: whose agent.
        timeout_s: for how many seconds it was waited for; None where it was not asked.
    """
    pulse = agent_files.read_heartbeat(process)
    did = "can't answer" if timeout_s is None else f"did not answer within {timeout_s:g} s"
    what = f"the agent of {format_process_name(process)} {did}"
    if pulse is None:
        what += ", and it has no heartbeat"
    elif pulse.is_late:
        what += f"; its last heartbeat is {pulse.age_s:.0f} s old: stopped, or stuck in native code"
    else:
        what += f"; its last heartbeat is {pulse.age_s:.0f} s old"
    return VllmopsError(
        "agent.timeout",
        what,
        f"vllmops stacks dump -t {process.pid}",
        data={"beat_age_s": pulse.age_s if pulse else None},
    )


def make_unreachable_error(process: Process, path: Path, error: Exception) -> VllmopsError:
    """Nobody listens, or the connection broke."""
    if isinstance(error, PermissionError) and error.errno == errno.EPERM:
        return make_unsafe_error(process, path, error.strerror or str(error))
    if isinstance(error, FileNotFoundError):
        return make_absent_error(process, path)
    if isinstance(error, ConnectionRefusedError):
        return VllmopsError(
            "agent.stale",
            f"no process listens on {path}: the file is a leftover, {format_process_name(process)} "
            "has no agent",
            f"vllmops attach -t {process.pid}",
        )
    return make_broken_agent_error(process, f"{type(error).__name__}: {error}")


def make_absent_error(process: Process, path: Path) -> VllmopsError:
    try:
        proc.has_separate_filesystem(process.pid)
    except PermissionError:
        why = ptrace_permission.make_refusal_error(
            process.pid, ptrace_permission.read_rights(process.pid), "status"
        )
        return VllmopsError(
            "agent.unreadable",
            f"the agent of {format_process_name(process)} can't be found: {why.message}",
            why.hint,
        )
    except OSError:
        return agent_files.make_gone_error(process)
    own = get_socket_directory(agent_files.find_state_home(process)) / path.name
    if len(os.fsencode(own)) > PATH_BYTES:
        return VllmopsError(
            "agent.path-too-long",
            f"the agent of {format_process_name(process)} is off: the path of a Unix socket has at "
            "most "
            f"{PATH_BYTES} bytes, and {own} has {len(os.fsencode(own))}",
            "start the server with a shorter VLLMOPS_HOME",
        )
    return VllmopsError(
        "agent.absent",
        f"{format_process_name(process)} has no agent (there is no {path})",
        f"vllmops attach -t {process.pid} loads it now; a server has it from its start where "
        "vllmops-cli is installed beside vLLM, unless VLLMOPS_DISABLE or VLLM_PLUGINS turn it off",
    )


def make_broken_agent_error(process: Process, reason: str) -> VllmopsError:
    return make_invalid_answer_error(f"the agent of {format_process_name(process)}", reason)


def make_invalid_answer_error(process_name: str, reason: str) -> VllmopsError:
    return VllmopsError(
        "agent.broken",
        f"{process_name} gave an invalid answer: {reason}",
        "vllmops logs shows the errors of the agent",
    )


def get_process_fields(process: Process) -> dict[str, Any]:
    """Role and place of a process, as fields of a row about it."""
    return {"role": process.role.value, **msgspec.structs.asdict(process.place)}
