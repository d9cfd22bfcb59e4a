"""The one place that reads other processes' ``/proc`` files.

`model.process_identity` reads ``stat`` also for the agent, which does not import this package.
psutil is used where it gives the same. It does not for a command line that setproctitle has
changed (psutil splits it at spaces), nor for an environment with an empty entry (it stops there).
A thread of a process is ``PID/task/TID``.
"""

from __future__ import annotations

import os
from contextlib import suppress
from errno import ELOOP
from pathlib import Path, PurePath

from ...model.process_identity import read_stat_fields

ROOT = Path("/proc")
LINKS = 40  # that Linux follows in one path


def get_process_folder(pid: int | str) -> Path:
    """The folder of a process, or of a thread."""
    return ROOT / str(pid)


def read_lossy_text(path: Path) -> str:
    """What a file of the kernel's says; raises OSError.

    In any locale, and with a process or a control group whose name is not UTF-8.
    """
    return path.read_text("utf-8", "replace")


def read_status(pid: int | str) -> dict[str, str]:
    """The fields of ``status``; raises OSError."""
    lines = read_lossy_text(get_process_folder(pid) / "status").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def read_effective_uid(pid: int | str) -> int:
    """The uid whose rights a process has; raises OSError."""
    return int(read_status(pid)["Uid"].split()[1])


def find_non_root_owner(pid: int) -> tuple[int, int] | None:
    """Uid and gid of a process that has any other than root's; None if all are root's.

    The owner of the process's folder does not show this: it is root where a user has started a
    program that has root's rights (set-user-id). The environment is still the user's, and so is
    the code that it makes Python import.

    Raises:
        OSError: it can't be read.
    """
    fields = read_status(pid)
    pairs = zip(fields["Uid"].split(), fields["Gid"].split(), strict=True)
    return next(((int(uid), int(gid)) for uid, gid in pairs if uid != "0"), None)


def read_parent_pid(pid: int) -> int:
    """The parent's pid, 0 if there is none."""
    try:
        return int(read_stat_fields(pid)[1])
    except OSError:
        return 0


def read_command_line(pid: int) -> list[str]:
    """The command line; empty if it can't be read, or where vLLM has put a title there."""
    try:
        words = (get_process_folder(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
    return [] if words[0].startswith(b"VLLM::") else [os.fsdecode(word) for word in words]


def read_environment(pid: int) -> dict[str, str]:
    """The environment at the start of a process; empty if it can't be read."""
    try:
        words = (get_process_folder(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(word).partition("=") for word in words if b"=" in word)
    return {name: value for name, _, value in pairs}


def read_executable(pid: int) -> str:
    """The program that a process runs; raises OSError."""
    return os.readlink(get_process_folder(pid) / "exe")


def read_working_directory(pid: int) -> str:
    """The working directory of a process; raises OSError."""
    return os.readlink(get_process_folder(pid) / "cwd")


def read_namespace_pid(pid: int) -> int:
    """The pid that a process has in its own pid namespace, such as its container's.

    Raises:
        OSError: it can't be read.
    """
    return int(read_status(pid).get("NSpid", str(pid)).split()[-1])


def has_separate_filesystem(pid: int) -> bool:
    """Whether a process sees other files than we do, as in a container; raises OSError."""
    mounts = [os.readlink(get_process_folder(of) / "ns/mnt") for of in (pid, "self")]
    return mounts[0] != mounts[1] or not os.path.samestat(
        os.stat(get_process_folder(pid) / "root"), os.stat("/")
    )


def resolve_path(pid: int, path: str) -> Path:
    """Where a file of a process is for us; raises OSError.

    Args:
        pid: whose file.
        path: as the process itself names it.

    Returns:
        The same path, or one below the process's own root in ``/proc``. Links are followed as the
        kernel does for the process: an absolute one begins at its root, not at ours.
    """
    if not os.path.isabs(path):
        return get_process_folder(pid) / "cwd" / path
    if not has_separate_filesystem(pid):
        return Path(path)
    at = root = get_process_folder(pid) / "root"
    left, links = list(reversed(PurePath(path).parts[1:])), 0
    while left:
        if (part := left.pop()) == "..":
            at = at if at == root else at.parent
            continue
        try:
            target = PurePath(os.readlink(at / part))
        except OSError:
            at /= part  # no link; opening it reports any other reason
            continue
        if (links := links + 1) > LINKS:
            raise OSError(ELOOP, os.strerror(ELOOP), path)
        at = root if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return at


def list_thread_ids(pid: int) -> list[int]:
    """The ids of the threads of a process, in order; raises OSError."""
    return sorted(map(int, os.listdir(get_process_folder(pid) / "task")))


def list_child_pids(pid: int) -> list[int]:
    """The pids of the children of a process; raises OSError."""
    pids = []
    for thread in list_thread_ids(pid):
        with suppress(OSError):  # the thread may have ended
            pids += read_lossy_text(get_process_folder(pid) / f"task/{thread}/children").split()
    return list(map(int, pids))


def read_process_name(pid: int) -> str:
    """The name that the kernel has for a process, 15 bytes at most; raises OSError."""
    return read_lossy_text(get_process_folder(pid) / "comm").strip()


def find_cgroup(pid: int) -> Path | None:
    """The folder of the control group (version 2) of a process; None without one."""
    try:
        lines = read_lossy_text(get_process_folder(pid) / "cgroup").splitlines()
    except OSError:
        return None
    paths = (line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    return next((Path("/sys/fs/cgroup", path) for path in paths), None)


def find_user_home(uid: int) -> str:
    """A user's home directory; raises KeyError where the user database has no such user."""
    import pwd  # noqa: PLC0415 - Windows has none

    return pwd.getpwuid(uid).pw_dir
