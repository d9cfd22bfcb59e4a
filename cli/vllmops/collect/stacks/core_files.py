"""Takes the stacks out of a core file with pystack, in a process that a damaged core may crash."""

from __future__ import annotations

import stat
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from ...model.stacks import DumpOptions, ProcessStacks, StacksSnapshot
from ...support.errors import VllmopsError
from ...support.files import make_unreadable_error

MOST_BYTES = sys.maxsize  # if the table of what follows is missing, too
HINT = "coredumpctl dump PID --output FILE, or gcore PID, writes a core file"


def read_core_stacks(path: Path, options: DumpOptions, *, timeout_s: float) -> StacksSnapshot:
    """The stacks of the process that left a core file.

    Args:
        path: of the file.
        options: with local variables, with native frames.
        timeout_s: seconds.

    Raises:
        VllmopsError: ``file.unreadable``, or a code that begins with ``core.``.
    """
    if not find_spec("pystack"):
        raise VllmopsError(
            "core.no-pystack",
            "--core needs pystack, which is not installed",
            "pip install 'vllmops-cli[core]'",
        )
    try:
        _require_core_file(path)
        captured_at = path.stat().st_mtime
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    command = (sys.executable, "-m", f"{__package__}.core_reader", path.absolute())
    try:
        ran = subprocess.run(
            (*command, msgspec.json.encode(options)),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        process = msgspec.json.decode(ran.stdout, type=ProcessStacks)
    except subprocess.TimeoutExpired as error:
        raise VllmopsError(
            "core.timeout",
            f"pystack did not finish with {path} within {timeout_s:g} s",
            f"vllmops stacks dump --core {path} --timeout {max(60, 3 * timeout_s):.0f}",
        ) from error
    except msgspec.DecodeError as error:
        why = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = why or [f"it ended with {ran.returncode} and without a message"]
        raise _make_unreadable_error(path, why[0]) from error
    match process.error:
        case None:
            pass
        case problem if problem.code == "core.no-program":
            raise VllmopsError(
                "core.no-program",
                f"{path} is of the program {problem.message}, which this machine does not have",
                "run vllmops where the server ran, in the same image",
            )
        case problem if problem.code == "core.not-python":
            raise VllmopsError(
                "core.not-python",
                f"{path} is of {problem.message}, which does not run Python",
                f"for native stacks: gdb -c {path} -batch -ex 'thread apply all bt'",
            )
        case problem:
            raise _make_unreadable_error(path, problem.message)
    return StacksSnapshot(
        captured_at=captured_at, seconds=0.0, options=options, processes=(process,)
    )


def _make_unreadable_error(path: Path, reason: str) -> VllmopsError:
    return VllmopsError(
        "core.unreadable",
        f"pystack found no stacks in {path}: {reason}",
        f"for native stacks: gdb -c {path} -batch -ex 'thread apply all bt'",
    )


def _require_core_file(path: Path) -> None:
    """Refuse what is no core file, or only the beginning of one.

    Raises:
        VllmopsError: ``core.not-a-core`` or ``core.truncated``.
        OSError: the file can't be read.
    """
    from elftools.common.exceptions import ELFError  # noqa: PLC0415 - slow to import
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415 - the same

    seen = path.stat()
    if not stat.S_ISREG(seen.st_mode):
        raise OSError(0, "it is not a regular file")
    is_core, end = False, 0
    # A damaged header makes pyelftools look anywhere.
    with path.open("rb") as file, suppress(ELFError, ValueError, OverflowError, OSError):
        core = ELFFile(file)
        is_core, end = core["e_type"] == "ET_CORE", MOST_BYTES
        segments = ((segment["p_offset"], segment["p_filesz"]) for segment in core.iter_segments())
        end = max(offset + size for offset, size in segments)
    if not is_core:
        raise VllmopsError("core.not-a-core", f"{path} is not a core file", HINT)
    if end > seen.st_size:
        raise VllmopsError(
            "core.truncated",
            f"{path} is truncated: it has only the first {seen.st_size:,} bytes of a core file",
            "ulimit -c unlimited before the server starts, and enough space on the disk",
        )
