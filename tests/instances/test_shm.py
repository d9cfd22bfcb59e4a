"""Segments in /dev/shm, with real files and real processes that map them."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmops.instances.shm import SHM, sweep, used_by

HOLD = """
import mmap, os, sys
descriptor = os.open(sys.argv[2], os.O_RDWR)
if sys.argv[1] == "map":
    kept = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"psm_test_{os.getpid()}"
    (SHM / name).write_bytes(bytes(4096))
    yield name
    (SHM / name).unlink(missing_ok=True)


def hold(how: str, name: str) -> "subprocess.Popen[str]":
    popen = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, how, str(SHM / name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert popen.stdout
    assert popen.stdout.readline() == "up\n"
    return popen


@pytest.mark.parametrize("how", ["map", "open"])
def test_a_segment_that_a_live_process_uses_stays(segment: str, how: str) -> None:
    holder = hold(how, segment)
    assert used_by(holder.pid) == {segment}
    assert sweep([segment]) == []
    assert (SHM / segment).exists()
    holder.communicate(timeout=10)
    assert used_by(holder.pid) == set()
    assert sweep([segment]) == [segment]
    assert not (SHM / segment).exists()


def test_a_segment_that_was_unlinked_is_still_known(segment: str) -> None:
    with (SHM / segment).open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        (SHM / segment).unlink()
        assert segment in used_by(os.getpid())
    assert sweep([segment]) == []


def test_a_segment_of_another_user_stays(segment: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(SHM / segment, 65534, 65534)
    assert sweep([segment]) == []


def test_names_that_are_gone_do_no_harm() -> None:
    assert sweep(["psm_never_was", "sem.never/was"]) == []


def test_nothing_outside_is_touched(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    outside = os.path.relpath(victim, SHM)
    assert sweep([outside]) == []
    assert victim.exists()
