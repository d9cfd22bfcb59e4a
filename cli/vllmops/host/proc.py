"""The one place that reads other processes' ``/proc`` files.

`protocol.identity` reads ``stat`` also for the agent, which does not import this package.
psutil is used where it gives the same. It does not for a command line that setproctitle has
changed (psutil splits it at spaces), nor for an environment with an empty entry (it stops there).
A thread of a process is ``PID/task/TID``.
"""

from __future__ import annotations

import os
from contextlib import suppress
from errno import ELOOP
from pathlib import Path, PurePath

from ..protocol.identity import stat

ROOT = Path("/proc")
LINKS = 40  # that Linux follows in one path


def folder(pid: int | str) -> Path:
    """The folder of a process, or of a thread."""
    return ROOT / str(pid)


def text(path: Path) -> str:
    """What a file of the kernel's says; raises OSError.

    In any locale, and with a process or a control group whose name is not UTF-8.
    """
    return path.read_text("utf-8", "replace")


def status(pid: int | str) -> dict[str, str]:
    """The fields of ``status``; raises OSError."""
    lines = text(folder(pid) / "status").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def effective_uid(pid: int | str) -> int:
    """The uid whose rights a process has; raises OSError."""
    return int(status(pid)["Uid"].split()[1])


def other_than_root(pid: int) -> tuple[int, int] | None:
    """Uid and gid of a process that has any other than root's; None if all are root's.

    The owner of the process's folder does not show this: it is root where a user has started a
    program that has root's rights (set-user-id). The environment is still the user's, and so is
    the code that it makes Python import.

    Raises:
        OSError: it can't be read.
    """
    fields = status(pid)
    pairs = zip(fields["Uid"].split(), fields["Gid"].split(), strict=True)
    return next(((int(uid), int(gid)) for uid, gid in pairs if uid != "0"), None)


def parent(pid: int) -> int:
    """The parent's pid, 0 if there is none."""
    try:
        return int(stat(pid)[1])
    except OSError:
        return 0


def command_line(pid: int) -> list[str]:
    """The command line; empty if it can't be read, or where vLLM has put a title there."""
    try:
        words = (folder(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
    return [] if words[0].startswith(b"VLLM::") else [os.fsdecode(word) for word in words]


def environment(pid: int) -> dict[str, str]:
    """The environment at the start of a process; empty if it can't be read."""
    try:
        words = (folder(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(word).partition("=") for word in words if b"=" in word)
    return {name: value for name, _, value in pairs}


def executable(pid: int) -> str:
    """The program that a process runs; raises OSError."""
    return os.readlink(folder(pid) / "exe")


def directory(pid: int) -> str:
    """The working directory of a process; raises OSError."""
    return os.readlink(folder(pid) / "cwd")


def own_pid(pid: int) -> int:
    """The pid that a process has in its own pid namespace, such as its container's.

    Raises:
        OSError: it can't be read.
    """
    return int(status(pid).get("NSpid", str(pid)).split()[-1])


def elsewhere(pid: int) -> bool:
    """Whether a process sees other files than we do, as in a container; raises OSError."""
    mounts = [os.readlink(folder(of) / "ns/mnt") for of in (pid, "self")]
    return mounts[0] != mounts[1] or not os.path.samestat(
        os.stat(folder(pid) / "root"), os.stat("/")
    )


def seen(pid: int, path: str) -> Path:
    """Where a file of a process is for us; raises OSError.

    Args:
        pid: whose file.
        path: as the process itself names it.

    Returns:
        The same path, or one below the process's own root in ``/proc``. Links are followed as the
        kernel does for the process: an absolute one begins at its root, not at ours.
    """
    if not os.path.isabs(path):
        return folder(pid) / "cwd" / path
    if not elsewhere(pid):
        return Path(path)
    at = root = folder(pid) / "root"
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


def threads(pid: int) -> list[int]:
    """The ids of the threads of a process, in order; raises OSError."""
    return sorted(map(int, os.listdir(folder(pid) / "task")))


def children(pid: int) -> list[int]:
    """The pids of the children of a process; raises OSError."""
    pids = []
    for thread in threads(pid):
        with suppress(OSError):  # the thread may have ended
            pids += text(folder(pid) / f"task/{thread}/children").split()
    return list(map(int, pids))


def name(pid: int) -> str:
    """The name that the kernel has for a process, 15 bytes at most; raises OSError."""
    return text(folder(pid) / "comm").strip()


def cgroup(pid: int) -> Path | None:
    """The folder of the control group (version 2) of a process; None without one."""
    try:
        lines = text(folder(pid) / "cgroup").splitlines()
    except OSError:
        return None
    paths = (line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    return next((Path("/sys/fs/cgroup", path) for path in paths), None)


def home_of(uid: int) -> str:
    """A user's home directory; raises KeyError where the user database has no such user."""
    import pwd  # noqa: PLC0415 - Windows has none

    return pwd.getpwuid(uid).pw_dir
