"""Runs commands of ours as forks of this process: most of a program's start are its imports."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import pty
import re
import select
import signal
import ssl
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, NoReturn, TypeAlias

import httpx
import typer.main

from vllmops import app
from vllmops.collect.http import vllm_client
from vllmops.collect.machine import processes
from vllmops.supervision import supervisor

from . import own_processes
from .forking import Forking

# What commands import late: a fork that has it starts in a third of the time. And a user who may
# not read this Python's library would not find it.
for late in (
    *("rich.emoji", "rich.live", "rich.markdown", "rich.markup", "rich.panel", "rich.pretty"),
    *("rich.progress", "rich.table", "rich.traceback", "typer.rich_utils"),
    *("vllmops.agent.patches.registry", "vllmops.commands.stacks.explanation_view"),
):
    import_module(late)
# Nor need each fork build its command anew, from the annotations of its function.
typer.main.get_command = cache(typer.main.get_command)
for entry in app.COMMANDS.values():
    entry.import_command()


@cache
def read_certificates(is_remote: bool, *named: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context(verify=is_remote)


def make_ssl_context(*, is_remote: bool) -> ssl.SSLContext:
    """`vllm_client.make_ssl_context`, with what is read already; a fork may name other files."""
    named = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    return read_certificates(is_remote, *named)


vars(vllm_client)["make_ssl_context"] = make_ssl_context
for is_remote in (False, True):
    make_ssl_context(is_remote=is_remote)

MAINS: Final = {"vllmops": app.main, "vllmops.supervision.supervisor": supervisor.main}
PR_SET_NAME: Final = 15
STYLE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Output: TypeAlias = int | IO[Any] | None


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def envelope(self) -> Any:
        return json.loads(self.out)

    @property
    def data(self) -> Any:
        return self.envelope["data"]

    @property
    def error(self) -> Any:
        (error,) = self.envelope["errors"]
        assert self.envelope["exit_code"] == self.code
        return error


THREADS = threading.active_count()  # of pytest's
TABLE = processes.read_process_table
Vllmops: TypeAlias = Callable[..., Answer]
End: TypeAlias = Callable[[], int]  # waits for a command; its exit code


def do_nothing() -> None:
    """Change nothing before a command."""


def run_vllmops(
    *words: str,
    columns: int | None = None,
    uid: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180,
    before: Callable[[], object] = do_nothing,
) -> Answer:
    """Run a command.

    Args:
        words: its command line.
        columns: the width of the terminal that is its output; None for a pipe.
        uid: who runs it.
        env: what is added to the environment.
        timeout_s: seconds after which the test fails.
        before: called in the child before anything else of ours; where a test's threads run, it
            reaches only what the program inherits.
    """
    with tempfile.TemporaryFile() as err:
        if columns is not None:
            out, theirs = pty.openpty()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        else:
            out, theirs = os.pipe()

        files = theirs, err.fileno() if columns is None else theirs
        environment = {**os.environ, **(env or {})}
        simple = uid is None and before is do_nothing
        # What is imported already was found by this process's path.
        if (
            has_running_threads()
            and simple
            and not any(name.startswith("PYTHON") for name in env or {})
        ):
            hidden = processes.read_process_table is not TABLE
            pid, end = get_fork_server().start(*files, words, environment, os.getcwd(), hidden)
        else:
            pid, end = start_fork(words, files, environment, uid, before)
        os.close(theirs)
        spoken = read(out, pid, end, timeout_s)
        code = end()
        os.close(out)
        err.seek(0)
        text = spoken.decode(errors="replace")
        if columns is not None:  # in a pipe there must be none
            text = STYLE.sub("", text.replace("\r\n", "\n"))
        return Answer(code, text, err.read().decode(errors="replace"))


def start_fork(
    words: Sequence[str],
    files: tuple[int, int],
    environment: Mapping[str, str],
    uid: int | None,
    before: Callable[[], object],
) -> tuple[int, End]:
    """Start a command as a fork of this process, with the arguments of `run_vllmops`."""
    main = command(words)

    def program() -> None:
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.environ.update(environment)
        before()
        main()

    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        become(program, ["vllmops", *words])
    return pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def has_running_threads() -> bool:
    """Whether a test's threads run.

    A fork has the locks of other threads, and nobody who would release them.
    """
    return threading.active_count() != THREADS


@cache
def get_fork_server() -> Forking:
    """What forks commands while a test's threads run; a test run makes it before its first test."""
    assert not has_running_threads()
    return Forking(become_clean_command)


def become_clean_command(
    words: Sequence[str], environment: Mapping[str, str], folder: str, hidden: bool
) -> None:
    """Be a command as it is where no test has changed anything.

    Args:
        words: its command line.
        environment: all of it.
        folder: where it runs.
        hidden: whether it sees no servers but those of its state directory.
    """
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in added if place and place not in sys.path]
    if hidden:
        processes.read_process_table = own_processes.table_of(Path(environment["VLLMOPS_HOME"]))
    become(app.main, ["vllmops", *words])


def command(words: Sequence[str]) -> Callable[[], object]:
    """What a fork calls to be a command: a program of its own where a test's threads run."""
    if not has_running_threads():
        return app.main
    # Where this process hides other tests' servers, the program does, too.
    file = ("-m", "vllmops") if processes.read_process_table is TABLE else (own_processes.__file__,)
    return lambda: os.execv(sys.executable, [sys.executable, *file, *words])


def read(descriptor: int, pid: int, end: End, timeout_s: float) -> bytes:
    """All it writes; one that takes too long is killed, and the test fails."""
    deadline = time.monotonic() + timeout_s
    words = b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left_s)[0]:
            break
        try:
            added = os.read(descriptor, 65536)
        except OSError:  # a terminal's way to say that the other end is closed
            return words
        if not added:
            return words
        words += added
    os.kill(pid, signal.SIGKILL)
    end()
    raise AssertionError(f"no end after {timeout_s} s; so far: {words.decode()}")


def background(
    *words: str, env: Mapping[str, str] | None = None, stderr: Output = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start a command, and do not wait for it.

    Args:
        words: its command line.
        env: what is added to the environment.
        stderr: where it complains.
    """

    main = command(words)

    def program() -> None:
        os.environ.update(env or {})
        main()

    return fork_program(program, ["vllmops", *words], stderr=stderr)


def start_detached_fork(
    module: str,
    words: Sequence[str],
    keep: Sequence[int],
    log: int | None = None,
    directory: str | None = None,
) -> None:
    """`vllmops.servers.detached_process.start_detached`, without the start of an interpreter."""
    argv = [module, *words]
    fork_program(
        MAINS[module], argv, keep, stdout=log, stderr=log, session=True, directory=directory
    )


def fork_program(
    program: Callable[[], object],
    argv: Sequence[str],
    keep: Sequence[int] = (),
    *,
    stdout: Output = subprocess.PIPE,
    stderr: Output = subprocess.PIPE,
    session: bool = False,
    directory: str | None = None,
) -> subprocess.Popen[str]:
    """Start a program of ours as a fork.

    Args:
        program: what is called, as of `become`; so are `argv` and `keep`.
        argv: its command line.
        keep: open files that it gets.
        stdout: where its output goes, as of `subprocess.Popen`.
        stderr: where it complains.
        session: whether it has one of its own.
        directory: where it runs, as of `subprocess.Popen`.
    """
    return subprocess.Popen(
        argv,
        preexec_fn=lambda: become(program, argv, keep),  # noqa: PLW1509 - nothing is executed
        restore_signals=False,  # as Python has them
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=session,
        cwd=directory,
        text=True,
    )


def become(
    program: Callable[[], object], argv: Sequence[str], keep: Sequence[int] = ()
) -> NoReturn:
    """Be a program, in a fork that has the program's standard input and output.

    Its environment in /proc is this process's still, so its name there says whose it is: see
    `own_processes.in_home`.

    Args:
        program: what is called; it ends with its exit code.
        argv: its command line.
        keep: open files that it gets, besides the first three.
    """
    code = 70
    try:
        gc.freeze()  # what it has from here is never freed, nor copied only to be looked at
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in keep:
                with contextlib.suppress(OSError):
                    os.close(number)
        name = os.path.basename(os.environ.get("VLLMOPS_HOME", ""))
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
        sys.argv = list(argv)
        try:
            program()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        sys.stdout.flush()
    finally:
        os._exit(code)
