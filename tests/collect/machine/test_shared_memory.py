"""Segments in /dev/shm, with real files and real processes that map them."""

import errno
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vllmops.collect.machine import shared_memory
from vllmops.collect.machine.shared_memory import (
    SHM,
    find_unused_segments,
    find_used_segments,
    remove_stale_segments,
    remove_unused_segments,
)

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


@pytest.mark.parametrize("name", ["model-{}.gguf", "vllm-weights-{}.safetensors"])
def test_a_file_of_the_user_s_own_is_no_segment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "explain_hidden_processes", str)  # as outside of a container
    monkeypatch.setattr(shared_memory, "OLD_S", 0.0)
    path = SHM / name.format(os.getpid())
    path.write_bytes(bytes(4096))
    try:
        holder = hold("map", path.name)
        assert find_used_segments(holder.pid) == set()
        holder.communicate(timeout=60)
        assert remove_unused_segments([path.name]) == []  # an older vllmops may have noted it
        assert path.name not in {item.name for item in find_unused_segments().segments}
        assert path.exists()
    finally:
        path.unlink()


@pytest.mark.parametrize("how", ["map", "open"])
def test_a_segment_that_a_live_process_uses_stays(segment: str, how: str) -> None:
    holder = hold(how, segment)
    assert find_used_segments(holder.pid) == {segment}
    assert remove_unused_segments([segment]) == []
    assert (SHM / segment).exists()
    holder.communicate(timeout=60)
    assert find_used_segments(holder.pid) == set()
    assert remove_unused_segments([segment]) == [segment]
    assert not (SHM / segment).exists()


def test_a_segment_that_was_unlinked_is_still_known(segment: str) -> None:
    with (SHM / segment).open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        (SHM / segment).unlink()
        assert segment in find_used_segments(os.getpid())
    assert remove_unused_segments([segment]) == []


@pytest.mark.root_only
def test_a_segment_of_another_user_stays(segment: str) -> None:
    os.chown(SHM / segment, 65534, 65534)
    assert remove_unused_segments([segment]) == []


def test_names_that_are_gone_do_no_harm() -> None:
    assert remove_unused_segments(["psm_never_was", "sem.never/was"]) == []


def test_file_outside_the_shm_directory_is_not_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    outside = os.path.relpath(victim, SHM)
    assert remove_unused_segments([outside]) == []
    assert victim.exists()


SEMAPHORE = """
import multiprocessing, os, signal, sys, time
context = multiprocessing.get_context("spawn")
lock = context.Lock()
print(lock._semlock.name.lstrip("/"), flush=True)
sys.stdin.read()
"""


def semaphore_holder() -> "tuple[subprocess.Popen[str], str]":
    popen = subprocess.Popen(
        [sys.executable, "-c", SEMAPHORE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert popen.stdout
    return popen, f"sem.{popen.stdout.readline().strip()}"


def end(popen: "subprocess.Popen[str]") -> None:
    """Kill it and its resource tracker, which would remove what it left."""
    for child in psutil.Process(popen.pid).children():
        child.kill()
    popen.kill()
    popen.communicate(timeout=60)


def test_a_semaphore_is_its_maker_s_though_it_has_another_name_there() -> None:
    holder, name = semaphore_holder()
    assert (SHM / name).exists()
    assert f"/dev/shm/{name}" not in Path(f"/proc/{holder.pid}/maps").read_text()
    assert name in find_used_segments(holder.pid)
    assert remove_unused_segments([name]) == []
    end(holder)
    assert (SHM / name).exists()
    assert remove_unused_segments([name]) == [name]


def test_a_file_that_took_a_dead_one_s_name_stays(segment: str) -> None:
    (old,) = [item for item in shared_memory.list_segments() if item.name == segment]
    (SHM / segment).rename(SHM / f"{segment}_kept")
    (SHM / segment).write_bytes(b"another's")
    (SHM / f"{segment}_kept").unlink()
    (new,) = [item for item in shared_memory.list_segments() if item.name == segment]
    if old.file != new.file:  # an inode may be used again
        assert shared_memory.unlink_segments([old]) == []


def test_no_segment_is_removed_if_its_users_are_unknown(
    segment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with no descriptor left, which would hinder pytest itself.
    def none_left(_: int) -> set[shared_memory.File]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(shared_memory, "find_used_files", none_left)
    assert remove_unused_segments([segment]) == []
    assert (SHM / segment).exists()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "OLD_S", 0.0)
    # Other tests' segments are theirs.
    monkeypatch.setattr(shared_memory, "NAMES", re.compile(rf"psm_test_{os.getpid()}"))


@pytest.mark.root_only
@pytest.mark.parametrize("how", ["map", "open", None])
def test_remove_stale_segments_spares_segments_in_use(
    segment: str, how: str | None, patient: None
) -> None:
    holder = hold(how, segment) if how else None
    found, removed = remove_stale_segments()
    assert found.uncertainty == ""
    assert [item.name for item in removed] == ([] if holder else [segment])
    assert (SHM / segment).exists() == bool(holder)
    if holder:
        holder.communicate(timeout=60)


@pytest.mark.root_only
def test_a_holder_with_another_dev_shm_is_seen(segment: str, patient: None, tmp_path: Path) -> None:
    """A container that shares it has it mounted elsewhere, under another name."""
    script = f"mount --bind /dev/shm {tmp_path} && "
    script += f"exec {sys.executable} -S -c '{HOLD}' map {tmp_path}/{segment}"
    holder = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    assert holder.stdout.readline() == "up\n"
    assert remove_stale_segments()[1] == []
    assert remove_unused_segments([segment]) == []
    holder.communicate(timeout=60)
    assert [item.name for item in remove_stale_segments()[1]] == [segment]


def test_a_young_one_and_one_of_another_kind_stay(
    segment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SHM / f"PostgreSQL.{os.getpid()}"
    other.touch()
    try:
        assert segment in {item.name for item in find_unused_segments().segments}
        _, removed = remove_stale_segments()
        assert segment not in {item.name for item in removed}
        monkeypatch.setattr(shared_memory, "OLD_S", 0.0)
        names = {item.name for item in find_unused_segments().segments}
        assert other.name not in names
        assert segment in names
    finally:
        other.unlink()


def clean_in_namespace(*words: str, how: list[str]) -> str:
    """Clean as somebody with another view of the processes."""
    done = subprocess.run(
        [*how, sys.executable, "-c", CLEAN, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


CLEAN = """
import sys
from vllmops.collect.machine import shared_memory as shm
shm.OLD_S = 0.0
found, removed = shm.remove_stale_segments()
print(removed if not found.uncertainty else found.uncertainty)
"""


@pytest.mark.root_only
def test_in_a_container_nothing_is_proven(segment: str) -> None:
    words = clean_in_namespace(how=["unshare", "--mount", "--pid", "--fork", "--mount-proc"])
    assert "container" in words
    assert (SHM / segment).exists()


@pytest.mark.root_only
@pytest.mark.parametrize("hidepid", ["0", "1", "2"])
def test_another_user_can_prove_nothing(segment: str, hidepid: str) -> None:
    os.chown(SHM / segment, 65534, 65534)
    hide = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    lower = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    words = clean_in_namespace(how=["unshare", "--mount", "sh", "-c", hide, "sh", *lower])
    assert "run as root" in words
    assert ("hidepid" in words) == (hidepid != "0")
    assert (SHM / segment).exists()
