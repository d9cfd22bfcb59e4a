"""Lets other users run what tests start: root's folders that they can't enter are opened.

Only this process and its children see that: they have a mount namespace of their own, where such a
folder is an empty one that anybody may enter, with the places that tests need bound into it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
ENTER = 0o001
CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
LIBC = ctypes.CDLL(None, use_errno=True)


def is_open(folder: Path) -> bool:
    return bool(folder.stat().st_mode & ENTER)


def open_to_all(needed: Iterable[Path] = NEEDED) -> None:
    """Let other users enter some folders; nothing is done if they can, or if this is not root.

    Raises:
        pytest.UsageError: this root may not mount, as in a container.
    """
    folders = [folder.resolve() for folder in needed]
    closed = {each for folder in folders for each in (folder, *folder.parents) if not is_open(each)}
    outermost = [folder for folder in closed if closed.isdisjoint(folder.parents)]
    if os.geteuid() != 0 or not outermost:
        return
    # Of a folder that is itself closed, all that is in it.
    places = [place for each in folders for place in ([each] if is_open(each) else each.iterdir())]
    here, mask = os.getcwd(), os.umask(0o022)
    if LIBC.unshare(CLONE_NEWNS):
        names = " ".join(map(str, outermost))
        raise pytest.UsageError(
            f"other users, which some tests are, can't enter {names}, and this root may not mount: "
            f"let them enter (chmod o+x {names}), or run the tests where they can"
        )
    mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    kept = {place: os.open(place, os.O_PATH) for place in places}
    for folder in outermost:
        mount("tmpfs", folder, "tmpfs", 0, b"mode=755")
    for place, descriptor in kept.items():
        if closed.isdisjoint(place.parents):
            continue
        source = f"/proc/self/fd/{descriptor}"
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(source):
            place.mkdir(exist_ok=True)
        else:
            place.touch()
        mount(source, place, "", MS_BIND | MS_REC)
    for descriptor in kept.values():
        os.close(descriptor)
    os.umask(mask)
    os.chdir(here)  # the same path, which leads to the new mount now


def mount(source: str, target: Path, kind: str, flags: int, data: bytes | None = None) -> None:
    check(LIBC.mount(source.encode(), bytes(target), kind.encode(), flags, data))


def check(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
