"""A file that is replaced is the old one or the new one, whatever happens in between."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllmops.files import write_atomically


def test_it_replaces_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_it_does_not_overwrite_unless_it_may(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one", overwrite=False)
    with pytest.raises(FileExistsError):
        write_atomically(path, b"two", overwrite=False)
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_one(home: Path, full_disk: Callable[[], None]) -> None:
    path = home / "file"
    write_atomically(path, b"old")
    full_disk()
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"x" * 100_000)
    assert path.read_bytes() == b"old"
    assert {each.name for each in home.iterdir()} == {"file", "filler"}


def test_a_crash_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def crash(_: int) -> None:
        raise KeyboardInterrupt

    # A power cut at the worst moment can't be had: the data is written, the name not yet moved.
    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no" / "file", b"")
