"""The Python that a server runs in, used to ask for its packages and for vLLM's collect_env."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..collect.machine import proc
from ..support.errors import VllmopsError
from .discovery import Server

NICENESS = 19
# A killed process ends at once, unless the kernel itself is stuck in it.
KILL_WAIT_S = 0.5
TOLD = 400  # characters of a complaint
OUTPUT_BYTES = 16 << 20  # of the packages of an environment some 100 KB


@dataclass(frozen=True)
class Interpreter:
    """An interpreter, and how a server was started with it.

    Args:
        program: what is executed.
        name: the name that it is started by: Python finds its virtual environment by it.
        environment: the server's.
        directory: the server's.
        owner: uid and gid that it is to have, None for one's own: what another user's environment
            makes Python import must not run with root's rights.
    """

    program: str
    name: str
    environment: Mapping[str, str]
    directory: str
    owner: tuple[int, int] | None = None


def find_interpreter(server: Server) -> Interpreter:
    """The interpreter of a server, or of one that is over.

    Raises:
        VllmopsError: ``interpreter.unreadable`` (exit code 4), ``interpreter.elsewhere``,
            ``interpreter.none``.
    """
    record = server.record
    if server.pid is None:
        if record is None:
            raise VllmopsError("interpreter.none", f"{server.label} has no process")
        return Interpreter(
            record.command[0],
            record.command[0],
            {**os.environ, **record.environment},
            record.directory,
        )
    try:
        exe, directory = proc.read_executable(server.pid), proc.read_working_directory(server.pid)
        owner, elsewhere = (
            proc.find_non_root_owner(server.pid),
            proc.has_separate_filesystem(server.pid),
        )
    except OSError as error:
        raise VllmopsError(
            "interpreter.unreadable",
            f"the interpreter of pid {server.pid} can't be found: {error.strerror}",
            "run vllmops as the user who started the server",
        ) from error
    if elsewhere:
        raise VllmopsError(
            "interpreter.elsewhere",
            f"the interpreter of pid {server.pid} runs in another container: its libraries are not"
            " here",
            "run vllmops in that container",
        )
    environment = proc.read_environment(server.pid)
    if not environment:
        environment = {**os.environ, **(record.environment if record else {})}
    name = next(iter(proc.read_command_line(server.pid)), exe)
    # By its entry in /proc: a package manager may have replaced the file.
    program = str(proc.get_process_folder(server.pid) / "exe")
    return Interpreter(
        program,
        name if "/" not in name else os.path.join(directory, name),
        environment,
        directory if Path(directory).is_dir() else "/",
        owner if os.geteuid() == 0 else None,
    )


class InterpreterRun:
    """Something that an interpreter runs, at the lowest priority.

    Args:
        interpreter: which.
        arguments: its arguments.

    Raises:
        VllmopsError: ``interpreter.failed`` if it can't be started.
    """

    def __init__(self, interpreter: Interpreter, arguments: Sequence[str]) -> None:
        # Files, not pipes: a process that is late and can't be killed does not block.
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as it runs
        self.complaint = tempfile.TemporaryFile()  # noqa: SIM115
        uid, gid = interpreter.owner or (None, None)
        try:
            self.popen = subprocess.Popen(
                [interpreter.name, *arguments],
                executable=interpreter.program,
                # As -P, which only Python 3.11 has: a vllm in that directory is not the server's.
                env={**interpreter.environment, "PYTHONSAFEPATH": "1"},
                cwd=interpreter.directory,
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.complaint,
                # Its own, so that it can be ended with all it starts, and Ctrl-C is not for it. And
                # where the kernel shares by sessions it has a share on a busy machine, too.
                start_new_session=True,
                user=uid,
                group=gid,
                extra_groups=None if uid is None else [],
            )
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise VllmopsError(
                "interpreter.failed", f"{interpreter.name} can't be started: {error}"
            ) from error
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.popen.pid, NICENESS)

    def wait_for_output(self, deadline: float) -> str:
        """What it has printed once it is done.

        Args:
            deadline: when to give it up, by the monotonic clock.

        Raises:
            VllmopsError: ``interpreter.late`` or ``interpreter.failed``.
        """
        try:
            code = self.popen.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill_group()
            raise VllmopsError("interpreter.late", "not finished in time") from None
        if code:
            lines = read_output(self.complaint).strip().splitlines() or [f"exit code {code}"]
            raise VllmopsError("interpreter.failed", lines[-1][:TOLD])
        return read_output(self.output)

    def kill_group(self) -> None:
        """End it, and all that it has started."""
        if self.popen.poll() is not None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(KILL_WAIT_S)


def read_output(file: IO[bytes]) -> str:
    """What a run has written, as far as it is of a decent size: it may be another user's code."""
    file.seek(0)
    return file.read(OUTPUT_BYTES).decode(errors="replace")
