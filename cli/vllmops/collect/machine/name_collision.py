"""Whether another program is called vllmops, too: an unrelated package has that name."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

OURS = "vllmops-cli"
COMMAND = "vllmops"
# What every script of vllmops imports, however it was installed.
MARK = b"vllmops.app"
SCRIPT = re.compile(r"^\[console_scripts\]\s*(?:^[^\[].*\n)*?^\s*vllmops\s*=", re.MULTILINE)
METADATA = re.compile(r"(?P<name>[\w.-]+?)-(?P<version>[^-]+?)(?:-py[\d.]+)?\.(?:dist|egg)-info")
SCRIPT_BYTES = 1 << 16


def describe_namesakes() -> str:
    """One line for a person; empty if this is the only one."""
    others = sorted({*find_namesake_packages(), *find_namesake_scripts()})
    if not others:
        return ""
    return (
        f"another program is also called {COMMAND}: {', '.join(others)}; "
        f"{sys.executable} -m vllmops runs this one"
    )


def find_namesake_packages() -> Iterator[str]:
    """Other installed packages of that name, or with a command of that name.

    Not by importlib.metadata, which takes longer than all else that ``--version`` does.
    """
    for folder in dict.fromkeys(sys.path):
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = METADATA.fullmatch(name)
            if not match or (own := re.sub(r"[-_.]+", "-", match["name"].lower())) == OURS:
                continue
            text = read_first_bytes(os.path.join(folder, name, "entry_points.txt"))
            if own == COMMAND or SCRIPT.search(text.decode(errors="replace")):
                yield f"package {match['name']} {match['version']} in {folder}"


def find_namesake_scripts() -> Iterator[str]:
    """Programs of that name on the PATH that are not this one."""
    for folder in dict.fromkeys(os.environ.get("PATH", "").split(os.pathsep)):
        path = os.path.join(folder, COMMAND)
        if folder and os.access(path, os.X_OK) and MARK not in read_first_bytes(path):
            yield path


def read_first_bytes(path: str) -> bytes:
    """The first bytes of a file; empty if there is none."""
    try:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return file.read(SCRIPT_BYTES)
    except OSError:
        pass
    return b""
