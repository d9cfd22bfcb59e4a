"""Programs of Debian's packages, which are not installed: they are unpacked into a folder."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

DOWNLOAD_S = 120
# In pytest's cache: for all processes of a test run, and for the next run.
KEPT = Path(__file__).parents[2] / ".pytest_cache/d/debian"


@cache
def get_package_folder(*packages: str) -> tuple[Path | None, str]:
    """The folder with the packages' files, or why there is none."""
    for needed in ("apt-get", "dpkg-deb"):
        if shutil.which(needed) is None:
            return None, f"it is not on the path, and without {needed} no package of it can be had"
    KEPT.mkdir(parents=True, exist_ok=True)
    place = KEPT / "+".join(packages)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        failed = "" if place.is_dir() else unpack(packages, place)
    return (None, failed) if failed else (place, "")


def unpack(packages: Sequence[str], place: Path) -> str:
    """Download packages and put their files into a folder; empty, or why that fails."""
    with TemporaryDirectory(dir=KEPT) as name:
        folder = Path(name)
        fetched = run("apt-get", "download", *packages, at=folder)
        for package in packages:
            file = next(folder.glob(f"{package}_*.deb"), None)
            if file is None:
                return f"apt-get has no package: {fetched}"
            if failed := run("dpkg-deb", "-x", file.name, "files", at=folder):
                return failed
        (folder / "files").rename(place)
    return ""


def run(*words: str, at: Path) -> str:
    """The last line of what a command says about its work."""
    try:
        done = subprocess.run(
            words, cwd=at, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took longer than {DOWNLOAD_S} s"
    return (done.stderr.strip().splitlines() or [""])[-1]
