"""Reads the tables of this package."""

from __future__ import annotations

import threading
import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

# msgspec crashes where two threads decode into a type for the first time.
_alone = threading.Lock()


def load_table(name: str, kind: type[T]) -> T:
    """A table.

    Args:
        name: of its TOML file, from this folder.
        kind: what it contains.
    """
    content = tomllib.loads((Path(__file__).parent / name).read_text("utf-8"))
    with _alone:
        return msgspec.convert(content, kind)
