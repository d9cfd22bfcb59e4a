"""Shared memory in ``/dev/shm``: its owners, and removing what dead processes left.

vLLM's processes share ``psm_*`` segments and ``sem.mp-*`` semaphores. Python's resource tracker
unlinks them when a server ends in order, and nobody does when it is killed (vLLM #51579, #54002).

A process uses a file if it maps or holds its device and inode. The name does not show this: the
creator of a semaphore maps it under a temporary name.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import proc

SHM = Path("/dev/shm")  # noqa: S108 - the kernel's own place
# What Python's multiprocessing, torch, NCCL and vLLM call theirs. A user's own files are here, too:
# a model that is to load fast, whatever its name begins with.
NAMES = re.compile(
    r"psm_\w+|sem\.mp-\w+|torch_\d+_\d+_\d+|nccl-\w+"
    r"|vllm_[a-z]+_(?:[\w-]+|[\w.-]+\.mmap)|VLLM_OBJECT_STORAGE_SHM_BUFFER[\w-]*"
)
OLD_S = 600.0  # a younger one may be between two processes: made, and not yet opened by the other
MAPPING = re.compile(rb"^\S+ \S+ \S+ (\w+):(\w+) (\d+) +(.*)$", re.MULTILINE)
DELETED = b" (deleted)"
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, the same on every Linux

File = tuple[int, int]  # device, inode


@dataclass(frozen=True)
class Segment:
    """A file in ``/dev/shm`` of a kind that vLLM makes.

    Args:
        name: relative to it.
        file: device and inode.
        bytes: its size.
        uid: of its owner.
        age_s: seconds since it was last changed, by the clock as it is set now.
    """

    name: str
    file: File
    bytes: int
    uid: int
    age_s: float


def list_segments() -> list[Segment]:
    """The segments in ``/dev/shm``, by name."""
    segments_ = []
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                at = entry.stat(follow_symlinks=False)
                if not (NAMES.fullmatch(entry.name) and stat.S_ISREG(at.st_mode)):
                    continue
                age_s = max(now - at.st_mtime, 0.0)
                file = at.st_dev, at.st_ino
                segments_.append(Segment(entry.name, file, at.st_size, at.st_uid, age_s))
    return sorted(segments_, key=lambda segment: segment.name)


def find_used_files(pid: int) -> set[File]:
    """The files that a process maps or holds open in the file system of ``/dev/shm``.

    Raises:
        OSError: it can't be looked into, or is gone (ProcessLookupError, FileNotFoundError).
    """
    device = SHM.stat().st_dev
    words = b"%02x" % os.major(device), b"%02x" % os.minor(device)
    maps = (proc.get_process_folder(pid) / "maps").read_bytes()
    used = {
        (device, int(inode))
        for major, minor, inode, _ in MAPPING.findall(maps)
        if (major, minor) == words
    }
    names = set(os.listdir(SHM))
    for descriptor in os.listdir(proc.get_process_folder(pid) / "fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            link = proc.get_process_folder(pid) / "fd" / descriptor
            # In whichever place it is mounted there, it has its name. Others are not asked for
            # what they are: a file on a network that hangs would never answer.
            if os.path.basename(os.readlink(link)).removesuffix(" (deleted)") in names:
                at = os.stat(link)
                if at.st_dev == device:
                    used.add((device, at.st_ino))
    return used


def find_used_segments(pid: int) -> set[str]:
    """Names of the segments that a process maps or holds open; none if it can't be looked into.

    One that was unlinked is among them under the name it had.
    """
    names: set[str] = set()
    with contextlib.suppress(OSError):
        used = find_used_files(pid)
        names |= {segment.name for segment in list_segments() if segment.file in used}
        place = os.fsencode(SHM) + b"/"
        for *_, path in MAPPING.findall((proc.get_process_folder(pid) / "maps").read_bytes()):
            if path.startswith(place) and path.endswith(DELETED):
                name = os.fsdecode(path.removeprefix(place).removesuffix(DELETED))
                names |= {name} if NAMES.fullmatch(name) else set()
    return names


def remove_unused_segments(names: Iterable[str]) -> list[str]:
    """Remove those of the segments that no live process uses; returns what was removed.

    A segment with an owner other than us is left alone: its users may be invisible here.

    Args:
        names: of segments that were a server's.
    """
    own = set(names)
    uid = os.geteuid()
    left = {segment for segment in list_segments() if segment.name in own and segment.uid == uid}
    try:
        used = find_files_in_use(left)
    except OSError:  # for example, no file can be opened: then nothing is known
        return []
    return unlink_segments(segment for segment in left if segment.file not in used)


def find_files_in_use(segments: Iterable[Segment]) -> set[File]:
    """Which files live processes use, as far as they can be looked into; raises OSError."""
    used: set[File] = set()
    for pid in psutil.pids() if segments else ():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
            used |= find_used_files(pid)
    return used


def unlink_segments(segments: Iterable[Segment]) -> list[str]:
    """Unlink segments, each if its name is still that file's; returns the names of those."""
    removed = []
    for segment in sorted(segments, key=lambda segment: segment.name):
        with contextlib.suppress(OSError):
            at = (SHM / segment.name).lstat()
            if (at.st_dev, at.st_ino) == segment.file:
                (SHM / segment.name).unlink()
                removed.append(segment.name)
    return removed


@dataclass(frozen=True)
class UnusedSegments:
    """Segments that nobody uses, as far as can be seen.

    Args:
        segments: those.
        uncertainty: why a process that can't be seen may use them, in words; empty if
            none can.
    """

    segments: tuple[Segment, ...] = ()
    uncertainty: str = ""


def find_unused_segments(include: Callable[[Segment], bool] = lambda _: True) -> UnusedSegments:
    """The segments that no live process uses: of this user, for root of anybody.

    Args:
        include: which of them.
    """
    uid = os.geteuid()
    left = [segment for segment in list_segments() if uid in (0, segment.uid) and include(segment)]
    if not left:
        return UnusedSegments()
    doubt = explain_hidden_processes()
    hidden = []
    for pid in psutil.pids():
        try:
            used = find_used_files(pid)
        except (ProcessLookupError, FileNotFoundError):
            continue
        except OSError:
            # Init makes none of these kinds. Where it is protected even from root, as in some
            # virtual machines, nothing could ever be removed.
            hidden += [pid] if pid != 1 else []
            continue
        left = [segment for segment in left if segment.file not in used]
    if hidden and not doubt:
        who = f"pid {hidden[0]}" + (f" and {len(hidden) - 1} more" if hidden[1:] else "")
        doubt = f"{who} can't be inspected and may use it: run as root"
    return UnusedSegments(tuple(left), doubt)


def explain_hidden_processes() -> str:
    """Why there may be processes that ``/proc`` does not show here; empty if it shows all."""
    try:
        if os.readlink("/proc/self/ns/pid") != INITIAL_PID_NAMESPACE:
            return "this is a container: processes outside may use its memory; run it on the host"
        os.stat("/proc/1/stat")
    except OSError:
        return "/proc hides the processes of other users (hidepid): run as root"
    return ""


def remove_stale_segments() -> tuple[UnusedSegments, list[Segment]]:
    """Remove segments that are proven to be unused, and have been for a while.

    Returns:
        What is left, and what was removed.
    """
    unused_ = find_unused_segments()
    old = {segment.file for segment in unused_.segments if segment.age_s >= OLD_S}
    if unused_.uncertainty or not old:
        return unused_, []
    # Once more: somebody may have opened one since that process was looked into.
    again = find_unused_segments(lambda segment: segment.file in old and segment.age_s >= OLD_S)
    names = [] if again.uncertainty else unlink_segments(again.segments)
    left = tuple(segment for segment in unused_.segments if segment.name not in names)
    removed = [segment for segment in unused_.segments if segment.name in names]
    return UnusedSegments(left, again.uncertainty), removed
