"""Asks CUDA's driver for a core dump of the GPU: it names the kernel that runs there.

The driver of a process that was started with the variables of `build_coredump_environment` makes a
FIFO with its first CUDA context, and dumps when somebody writes into it. The process goes on only
with ``skip_abort``.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from ...model.stacks import StacksGap
from ...support.errors import VllmopsError
from ...support.files import open_path_handle
from . import proc
from .processes import Process

ENABLED = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
FILE, PIPE = "CUDA_COREDUMP_FILE", "CUDA_COREDUMP_PIPE"
FLAGS = "CUDA_COREDUMP_GENERATION_FLAGS"
GOES_ON = "skip_abort"
# No memory of the GPU, so no prompts either: some megabytes, within seconds.
LIGHT = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,"
    f"skip_constbank_memory,{GOES_ON}"
)
# The driver's own names: %h is the host, %p the pid, %t the time.
DEFAULTS = {FILE: "core_%t_%h_%p.nvcudmp", PIPE: "corepipe.cuda.%h.%p"}
LOOK_S = 0.05


class CudaDump(msgspec.Struct, frozen=True, kw_only=True):
    """The core dump of a process's GPU, or why there is none.

    Args:
        role, pid: of the process.
        file: where it is on this machine.
        bytes: its size.
        seconds: how long it took.
        error: None if it is complete.
    """

    role: str
    pid: int
    file: str = ""
    bytes: int = 0
    seconds: float = 0.0
    error: StacksGap | None = None


def build_coredump_environment(folder: Path) -> dict[str, str]:
    """The environment of a server whose GPUs can be dumped into a folder."""
    return {
        ENABLED: "1",
        FILE: str(folder / "cuda.%h.%p.%t.core"),
        PIPE: str(folder / "cuda.%h.%p.pipe"),
        FLAGS: LIGHT,
    }


def dump_gpus(processes: Sequence[Process], *, timeout_s: float) -> tuple[CudaDump, ...]:
    """Dump the GPU of every process that has one, all at the same time.

    Args:
        processes: of a server on this machine.
        timeout_s: seconds for all of them together.

    Raises:
        VllmopsError: ``cuda.not-armed``, ``cuda.would-abort`` or ``cuda.no-gpu``.
    """
    deadline = time.monotonic() + timeout_s
    variables = {process.pid: proc.read_environment(process.pid) for process in processes}
    ready = [process for process in processes if variables[process.pid].get(ENABLED) == "1"]
    if not ready:
        raise VllmopsError(
            "cuda.not-armed",
            "this server was not started so that its GPUs can be dumped",
            "vllmops serve MODEL --cuda-coredump",
        )
    if any(GOES_ON not in variables[process.pid].get(FLAGS, "") for process in ready):
        raise VllmopsError(
            "cuda.would-abort",
            f"a core dump would end this server: {FLAGS} lacks {GOES_ON}",
            "vllmops serve MODEL --cuda-coredump sets it",
        )
    pipes = [(p, pipe) for p in ready for pipe in _find_driver_files(p, variables[p.pid], PIPE)]
    if not pipes:
        raise VllmopsError(
            "cuda.no-gpu",
            "no process of this server has a pipe of CUDA: none uses an NVIDIA GPU yet",
            "vllmops status shows whether the server has started",
        )
    with ThreadPoolExecutor(len(pipes)) as pool:
        dumps = [
            pool.submit(_dump_gpu, process, pipe, variables[process.pid], deadline)
            for process, pipe in pipes
        ]
        return tuple(dump.result() for dump in dumps)


def _find_driver_files(process: Process, variables: dict[str, str], name: str) -> list[Path]:
    """The files that one of the driver's variables names; the host and the time are not known."""
    try:
        path = proc.resolve_path(process.pid, variables.get(name) or DEFAULTS[name])
        pattern = glob.escape(str(path)).replace("%p", str(proc.read_namespace_pid(process.pid)))
    except OSError:
        return []
    return [Path(found) for found in glob.glob(pattern.replace("%h", "*").replace("%t", "*"))]


def _dump_gpu(process: Process, pipe: Path, variables: dict[str, str], deadline: float) -> CudaDump:
    began = time.monotonic()
    before = set(_find_driver_files(process, variables, FILE))
    try:
        _trigger_dump(process, pipe)
        while True:
            new = [
                path for path in _find_driver_files(process, variables, FILE) if path not in before
            ]
            # A file that the process has open is not complete.
            if done := next((path for path in new if _is_complete(process.pid, path)), None):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the driver has not finished it in time")
            time.sleep(LOOK_S)
    except OSError as error:
        why = StacksGap("cuda.failed", f"no core dump of the GPU: {error.strerror}")
        return CudaDump(role=process.role, pid=process.pid, error=why)
    return CudaDump(
        role=process.role,
        pid=process.pid,
        file=str(done),
        bytes=done.stat().st_size,
        seconds=round(time.monotonic() - began, 3),
    )


def _trigger_dump(process: Process, pipe: Path) -> None:
    """Write into a process's pipe; raises OSError."""
    with open_path_handle(pipe) as (place, seen):
        if not stat.S_ISFIFO(seen.st_mode):
            raise OSError(errno.EINVAL, f"{pipe} is not a FIFO")
        if seen.st_uid != proc.read_effective_uid(process.pid):
            raise PermissionError(errno.EPERM, f"{pipe} belongs to another user")
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise OSError(errno.ENXIO, f"no process reads {pipe}") from error
            raise
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)


def _is_complete(pid: int, path: Path) -> bool:
    """Whether a file has content, and a process has it not open."""
    seen = path.stat()
    return bool(seen.st_size) and not any(
        os.path.samestat(seen, held) for held in _stat_open_files(pid)
    )


def _stat_open_files(pid: int) -> Iterable[os.stat_result]:
    for descriptor in (proc.get_process_folder(pid) / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield descriptor.stat()
