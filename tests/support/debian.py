"""Programs of Debian's packages, which are not installed: they are unpacked into a folder."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

DOWNLOAD_S = 120


@cache
def unpacked(*packages: str) -> tuple[Path | None, str]:
    """The folder with the packages' files, or why there is none."""
    for needed in ("apt-get", "dpkg-deb"):
        if shutil.which(needed) is None:
            return None, f"it is not on the path, and without {needed} no package of it can be had"
    folder = Path(mkdtemp(prefix=f"{packages[0]}-"))
    fetched = run("apt-get", "download", *packages, at=folder)
    files = [next(folder.glob(f"{name}_*.deb"), None) for name in packages]
    for file in files:
        if file is None:
            return None, f"apt-get has no package: {fetched}"
        if failed := run("dpkg-deb", "-x", str(file), str(folder), at=folder):
            return None, failed
    return folder, ""


def run(*words: str, at: Path) -> str:
    """The last line of what a command says about its work."""
    try:
        done = subprocess.run(
            words, cwd=at, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took longer than {DOWNLOAD_S} s"
    return (done.stderr.strip().splitlines() or [""])[-1]
