"""Prometheus' own programs: of the path, or out of Debian's package, which is not installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .debian import get_package_folder


def program(name: str) -> Path:
    """``prometheus`` or ``promtool``; skips the test with the reason where it can't be had."""
    if found := shutil.which(name):
        return Path(found)
    folder, why = get_package_folder("prometheus")
    if folder is None:
        pytest.skip(f"there is no {name}: {why}")
    return folder / "usr" / "bin" / name
