"""A file that is replaced is the old one or the new one, whatever happens in between."""

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllmops.support import files
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.files import write_atomically

NOBODY = 65534
MIB = 1 << 20


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A directory that everybody may write to, like /tmp."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


def device(path: Path, minor: int) -> Path:
    """A device like /dev/null (3), /dev/zero (5) or /dev/full (7), which may be broken here."""
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    return path


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
    assert {item.name for item in home.iterdir()} == {"file", "filler"}


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


@pytest.mark.root_only
def test_a_device_is_written_into_and_stays(tmp_path: Path) -> None:
    for overwrite in (True, False):
        path = device(tmp_path / f"null{overwrite}", 3)
        write_atomically(path, b"x", overwrite=overwrite)
        assert stat.S_ISCHR(path.lstat().st_mode)
    full = device(tmp_path / "full", 7)
    with pytest.raises(OSError, match="No space"):
        write_atomically(full, b"x" * 100_000)
    assert stat.S_ISCHR(full.lstat().st_mode)


def test_require_writable_refuses_a_full_device_or_disk(
    tmp_path: Path, home: Path, full_disk: Callable[[], None]
) -> None:
    files.require_writable(device(tmp_path / "null", 3))
    with pytest.raises(OSError, match="No space"):
        files.require_writable(device(tmp_path / "full", 7))
    files.require_writable(home / "new")
    full_disk()
    with pytest.raises(OSError, match="No space"):
        files.require_writable(home / "new")


@pytest.mark.root_only
def test_write_refuses_devices_sockets_and_folders(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(7, 250))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, why in ((disk, "block device"), (tmp_path / "socket", "socket")):
            with pytest.raises(OSError, match=why):
                write_atomically(path, b"x")
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, b"x")
    assert sorted(os.listdir(tmp_path)) == ["disk", "socket"]


def test_a_fifo_has_a_reader_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(OSError, match="no process reads it"):
        write_atomically(path, b"x")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    content = b"x" * 300_000  # more than a FIFO holds
    while True:
        with contextlib.suppress(OSError):  # until it reads
            write_atomically(path, content)
            break
    reader.join(60)
    assert found == [content]
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.root_only
def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, first = tmp_path / "far" / "file", tmp_path / "link", tmp_path / "first"
    link.symlink_to("far/file")
    first.symlink_to(link)
    for content in (b"one", b"two"):
        write_atomically(first, content)
        assert target.read_bytes() == content
    assert first.is_symlink()
    assert link.is_symlink()
    with pytest.raises(FileExistsError):
        write_atomically(first, b"three", overwrite=False)
    assert target.read_bytes() == b"two"
    null = device(tmp_path / "null", 3)
    link.unlink()
    link.symlink_to(null)
    write_atomically(first, b"x")
    assert stat.S_ISCHR(null.lstat().st_mode)
    link.unlink()
    link.symlink_to(first)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(first, b"x")


def test_standard_output_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    write_atomically(Path(f"/dev/fd/{descriptor}"), b"new\n")
    os.close(descriptor)
    assert path.read_bytes() == b"before\nnew\n"


@pytest.mark.root_only
@pytest.mark.parametrize("kind", ["link", "file", "fifo", "link at home"])
def test_write_refuses_a_path_planted_by_another_user(everybodys: Path, kind: str) -> None:
    victim, path = everybodys / "victim", everybodys / "planted"
    if kind == "link at home":
        os.chown(everybodys, NOBODY, NOBODY)
    victim.write_bytes(b"old")
    match kind:
        case "link" | "link at home":
            path.symlink_to(victim)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.write_bytes(b"theirs")
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"uid {NOBODY}"):
        write_atomically(path, b"new")
    assert victim.read_bytes() == b"old"
    assert path.lstat().st_uid == NOBODY
    assert len(os.listdir(everybodys)) == 2


def test_a_long_name_and_a_folder_that_can_not_be_listed(tmp_path: Path) -> None:
    path = tmp_path / ("\N{SNOWMAN}" * 85)
    write_atomically(path, b"x")
    assert path.read_bytes() == b"x"
    with pytest.raises(OSError, match="too long"):
        write_atomically(tmp_path / ("x" * 300), b"x")
    assert list(tmp_path.iterdir()) == [path]


def unread(path: Path, most: int = MIB) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        files.read_input(path, most)
    assert str(path) in caught.value.message
    return caught.value


@pytest.mark.root_only
def test_reading_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    assert files.read_input(path, MIB) == b"x" * MIB
    assert unread(path, MIB - 1).code == "file.too-large"
    assert unread(device(tmp_path / "zero", 5)).code == "file.too-large"
    assert files.read_input(device(tmp_path / "null", 3), 1) == b""
    os.mkfifo(tmp_path / "fifo")
    assert "no process writes" in unread(tmp_path / "fifo").message
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert unread(tmp_path / "socket").code == "file.unreadable"
    for other in (tmp_path, tmp_path / "none", path / "below", tmp_path / ("x" * 300)):
        error = unread(other)
        assert (error.code, error.exit_code) == ("file.unreadable", ExitCode.FAILED)


@pytest.mark.root_only
@pytest.mark.parametrize("link", [False, True])
def test_a_device_is_refused_without_being_opened(tmp_path: Path, link: bool) -> None:
    absent = tmp_path / "device"
    os.mknod(absent, 0o666 | stat.S_IFCHR, os.makedev(1, 200))  # to open it fails: it has no driver
    path = tmp_path / "link" if link else absent
    if link:
        path.symlink_to(absent)
    with pytest.raises(PermissionError, match="no plain file") as caught:
        files.open_regular_file(path, files.ANYBODY, follow=link)
    assert caught.value.filename == str(path)


def test_the_error_of_a_file_has_its_name(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "x" / "none"):
        with pytest.raises(FileNotFoundError) as caught:
            files.open_regular_file(path)
        assert caught.value.filename == str(path)


def test_a_slow_writer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITER_WAIT_S", 60.0)  # a busy machine may make it slower still
    path = tmp_path / "fifo"
    os.mkfifo(path)

    def write() -> None:
        time.sleep(0.3)
        with path.open("wb", buffering=0) as file:
            for _ in range(3):
                time.sleep(0.3)
                file.write(b"x" * 100_000)

    writer = threading.Thread(target=write)
    writer.start()
    assert files.read_input(path, MIB) == b"x" * 300_000
    writer.join()


@pytest.mark.root_only
def test_an_unreadable_input_file_exits_as_not_authorised(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    path.chmod(0)
    tmp_path.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            files.read_input(path, 1)
        except VllmopsError as error:
            os._exit(error.exit_code if error.code == "file.unreadable" else 99)
        os._exit(98)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ExitCode.NOT_AUTHORISED
