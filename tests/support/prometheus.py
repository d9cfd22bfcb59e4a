"""Prometheus' own programs: of the path, or out of Debian's package, which is not installed."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

DOWNLOAD_S = 120


def program(name: str) -> Path:
    """``prometheus`` or ``promtool``; skips the test with the reason where it can't be had."""
    if found := shutil.which(name):
        return Path(found)
    folder, why = unpacked()
    if folder is None:
        pytest.skip(f"there is no {name}: {why}")
    return folder / "usr" / "bin" / name


@cache
def unpacked() -> tuple[Path | None, str]:
    """The folder with Debian's package, or why there is none."""
    for needed in ("apt-get", "dpkg-deb"):
        if shutil.which(needed) is None:
            return None, f"it is not on the path, and without {needed} no package of it can be had"
    folder = Path(mkdtemp(prefix="prometheus-"))
    fetched = run("apt-get", "download", "prometheus", at=folder)
    package = next(folder.glob("prometheus_*.deb"), None)
    if package is None:
        return None, f"apt-get has no package: {fetched}"
    failed = run("dpkg-deb", "-x", str(package), str(folder), at=folder)
    return (folder, "") if (folder / "usr/bin/promtool").exists() else (None, failed)


def run(*words: str, at: Path) -> str:
    """The last line of what a command says."""
    try:
        done = subprocess.run(
            words, cwd=at, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took longer than {DOWNLOAD_S} s"
    return (done.stderr.strip().splitlines() or [""])[-1]
