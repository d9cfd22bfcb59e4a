"""The heartbeat, on real files that go wrong."""

import os
import shutil
import time
from pathlib import Path

import pytest

from vllmops.agent import heartbeat
from vllmops.agent.heartbeat import Heart
from vllmops.snapshots.engine import BEAT_BYTES, Beat


def beat(sequence: int, now: float) -> Beat:
    return Beat(monotonic=now, sequence=sequence, pid=1, create_time=2.0, role="engine")


def test_always_the_same_length(tmp_path: Path) -> None:
    heart = Heart(tmp_path / "1.beat", beat)
    for sequence in (0, 10**15, 3):
        heart.write(sequence)
        content = heart.path.read_bytes()
        assert len(content) == BEAT_BYTES
        assert content.rstrip().endswith(b"}")


def test_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_INTERVAL_S", 0.01)
    heart = Heart(tmp_path / "1.beat", beat)
    heart.start()
    first = heart.path.read_bytes()
    time.sleep(0.3)
    heart.stop()
    assert heart.path.read_bytes() != first


def test_a_full_disk_is_survived() -> None:
    heart = Heart(Path("/dev/full"), beat)
    with pytest.raises(OSError, match="No space left"):
        os.pwrite(heart.fd, b"x", 0)
    heart.write(1)


def test_a_removed_directory_is_survived(tmp_path: Path) -> None:
    heart = Heart(tmp_path / "agents.beat", beat)
    shutil.rmtree(tmp_path)
    heart.write(1)


def test_a_beat_that_can_not_be_made_is_survived(tmp_path: Path) -> None:
    def broken(sequence: int, now: float) -> Beat:
        raise AttributeError("another shape")

    heart = Heart(tmp_path / "1.beat", broken)
    heart.write(1)
    assert heart.path.read_bytes() == b""


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "1.beat").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        Heart(tmp_path / "1.beat", beat)
