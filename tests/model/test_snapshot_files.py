"""Snapshots in files, and files that are none."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from vllmops.model import snapshot_files
from vllmops.model.caches import CacheSample, CacheSnapshot
from vllmops.support.errors import ExitCode, VllmopsError

SNAPSHOT = CacheSnapshot(server="demo", samples=[CacheSample(taken_at=1.0, processes=[])])


def refusal(path: Path) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        snapshot_files.load_snapshot(path, CacheSnapshot)
    assert str(path) in caught.value.message
    return caught.value


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 30, "1e300", "1E+30"])
def test_a_number_that_nobody_can_reckon_with(tmp_path: Path, number: str) -> None:
    path = tmp_path / "snapshot.json"
    snapshot_files.save_snapshot(path, SNAPSHOT)
    content = path.read_text().replace('"taken_at":1.0', f'"taken_at":{number}')
    path.write_text(content)
    assert "too large" in refusal(path).message
    # Such a text is no number.
    path.write_text(content.replace(number, "1.0").replace('"demo"', f'"demo{number}"'))
    assert snapshot_files.load_snapshot(path, CacheSnapshot).server == f"demo{number}"


def test_saved_snapshot_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    snapshot_files.save_snapshot(path, SNAPSHOT)
    assert snapshot_files.load_snapshot(path, CacheSnapshot) == SNAPSHOT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_snapshot_with_invalid_utf_8_is_saved(tmp_path: Path) -> None:
    """A model's folder or a process's title may have any bytes."""
    path = tmp_path / "snapshot.json"
    odd = msgspec.structs.replace(SNAPSHOT, server="/m/\udcff \N{OGHAM LETTER BEITH}")
    snapshot_files.save_snapshot(path, odd)
    assert (
        snapshot_files.load_snapshot(path, CacheSnapshot).server
        == "/m/\\udcff \N{OGHAM LETTER BEITH}"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"not json",
        b"[]",
        b"{}",
        b'{"kind":"caches","schema":1}',
        b"\xff\xfe",
        msgspec.json.encode(SNAPSHOT)[:-5],
        b'{"kind":"caches","schema":"1"}',
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "snapshot.json"
    path.write_bytes(content)
    error = refusal(path)
    assert (error.code, error.exit_code) == ("file.not-a-snapshot", ExitCode.FAILED)
    assert error.hint


def test_another_kind_and_a_newer_one_are_told(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    path.write_bytes(b'{"kind":"stacks","schema":1,"processes":[]}')
    assert (refusal(path).code, refusal(path).exit_code) == ("file.other-kind", ExitCode.USAGE)
    path.write_bytes(b'{"kind":"caches","schema":99,"whatever":[]}')
    assert refusal(path).code == "file.newer"


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    assert (refusal(tmp_path / "none").code, refusal(tmp_path).code) == (
        "file.unreadable",
        "file.unreadable",
    )


def test_a_file_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(VllmopsError) as caught:
        snapshot_files.save_snapshot(tmp_path / "none" / "snapshot.json", SNAPSHOT)
    assert caught.value.code == "file.not-written"
    (tmp_path / "directory").mkdir()
    with pytest.raises(VllmopsError):
        snapshot_files.save_snapshot(tmp_path / "directory", SNAPSHOT)
    assert os.listdir(tmp_path) == ["directory"]


@pytest.mark.root_only
def test_a_journal_into_a_device_a_link_and_a_fifo(tmp_path: Path) -> None:
    null, link, fifo = tmp_path / "null", tmp_path / "link", tmp_path / "fifo"
    os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    link.symlink_to(tmp_path / "target")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for path in (null, link, fifo):
        journal = snapshot_files.Journal(path, SNAPSHOT)
        journal.append(SNAPSHOT)
        assert journal.failure is None
    assert stat.S_ISCHR(null.lstat().st_mode)
    assert link.is_symlink()
    lines = msgspec.json.encode(SNAPSHOT) + b"\n"
    assert (tmp_path / "target").read_bytes() == os.read(reader, 1 << 16) == 2 * lines
    os.close(reader)
    with pytest.raises(VllmopsError) as caught:
        snapshot_files.Journal(fifo, SNAPSHOT)
    assert caught.value.code == "file.not-written"
    full = tmp_path / "full"
    os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    with pytest.raises(VllmopsError, match="No space"):
        snapshot_files.Journal(full, SNAPSHOT)
