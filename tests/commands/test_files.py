"""Files that a person names: each command that reads or writes one, with what is no plain file."""

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vllmops.commands.stacks import explanation_view
from vllmops.support.errors import ExitCode

from ..support.extent import EVERYTHING, long

# What commands import late, a user who may not read this Python's library would not find.
assert explanation_view

# Each takes a file where {} is.
READERS = (
    ("stacks", "explain", "{}"),
    ("memory", "report", "{}"),
    ("doctor", "{}"),
    ("cache", "inspect", "{}"),
    ("responses", "import", "{}", "--store", "sqlite:////{home}/store.db"),
    ("keys", "import", "{}"),
    ("keys", "push", "-t", "http://127.0.0.1:1", "--admin-token", "{}"),
    ("keys", "list", "--keyring", "{}"),
    ("serve", "{home}", "--dry-run", "--admin-token", "{}"),
)
INPUTS = [words for words in READERS if "--keyring" not in words]
WRITERS = (("keygen", "--out", "{}"), ("keys", "export", "--out", "{}"))
DEEP = 6_000


def fill_placeholders(words: tuple[str, ...], file: object, home: Path) -> list[str]:
    return [item.replace("{home}", str(home)).replace("{}", str(file)) for item in words]


def device(path: Path, minor: int) -> Path:
    """A device like /dev/null (3), /dev/zero (5) or /dev/full (7), which may be broken here."""
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    return path


@pytest.fixture
def ring(vllmops: Any) -> None:
    assert vllmops("keys", "add").code == 0


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """Files of every odd kind."""
    found = {
        "zero": device(tmp_path / "zero", 5),
        "fifo": tmp_path / "fifo",
        "directory": tmp_path / "directory",
        "sparse": tmp_path / "sparse",
    }
    os.mkfifo(found["fifo"])
    found["directory"].mkdir()
    with found["sparse"].open("wb") as file:
        file.truncate(1 << 40)
    for name, content in {
        "nested": b"[" * DEEP,
        "objects": b'{"a":' * DEEP,
        "closed": b"[" * DEEP + b"]" * DEEP,
        "kind": b'{"kind":"caches","schema":1,"server":' + b"[" * DEEP,
        "binary": bytes(range(256)) * 400,
        "long": b"x" * (8 << 20),
        "empty": b"",
    }.items():
        found[name] = tmp_path / name
        found[name].write_bytes(content)
    return found


@pytest.mark.root_only
@pytest.mark.parametrize("words", READERS, ids=" ".join)
@pytest.mark.usefixtures("ring")
def test_odd_files_are_read_to_an_end(
    vllmops: Any,
    home: Path,
    odd: dict[str, Path],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # How long a line really may be is seen where it comes from standard input.
    lines = import_module("vllmops_responses.commands.responses.import_")
    monkeypatch.setattr(lines, "LONGEST_LINE", 64 << 20)
    monkeypatch.setattr(lines, "ENDLESS", lines.LONGEST_LINE + 1)
    # Each command reads some kinds; over the commands each kind has its turns.
    turn = READERS.index(words)
    for number, (kind, file) in enumerate(odd.items()):
        if not (EVERYTHING or number % 3 == turn % 3):
            continue
        answer = vllmops(*fill_placeholders(words, file, home), "--json")
        assert answer.code in {1, 4} or (kind, words[0]) == ("empty", "responses"), (kind, answer)
        assert "Traceback" not in answer.err
        assert "unexpected" not in answer.out + answer.err, kind


@pytest.mark.parametrize("words", INPUTS, ids=" ".join)
@pytest.mark.usefixtures("ring")
def test_a_missing_file_has_one_code(
    vllmops: Any, home: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    for file in (tmp_path / "none", tmp_path / "none" / "below"):
        answer = vllmops(*fill_placeholders(words, file, home), "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "file.unreadable")
        assert str(file) in answer.error["message"]


@pytest.mark.root_only
@pytest.mark.parametrize(
    "words",
    [
        INPUTS[0],  # a text
        INPUTS[4],  # lines
        pytest.param(INPUTS[5], marks=long),
        pytest.param(("keys", "verify", "{}"), marks=long),
    ],
)
@pytest.mark.usefixtures("ring")
def test_standard_input_without_an_end(
    vllmops: Any, home: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    zero = device(tmp_path / "zero", 5)

    def endless() -> None:
        os.dup2(os.open(zero, os.O_RDONLY), 0)

    answer = vllmops(*fill_placeholders(words, "-", home), "--json", before=endless)
    assert answer.code == ExitCode.FAILED
    assert answer.error["code"] in {"file.too-large", "responses.unreadable"}


def test_a_paste_through_a_pipe_of_the_shell(home: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.write_text('Thread 1 (idle): "MainThread"\n    wait (threading.py:320)\n')
    words = f"{sys.executable} -m vllmops stacks explain <(sleep 0.5; cat {dump}) --json"
    done = subprocess.run(
        ["bash", "-c", words], capture_output=True, check=False, env={**os.environ}, timeout=60
    )
    assert json.loads(done.stdout)["data"]["seen"] or json.loads(done.stdout)["data"]["findings"]


@pytest.mark.root_only
@pytest.mark.parametrize("words", WRITERS, ids=" ".join)
@pytest.mark.usefixtures("ring")
def test_writers_keep_devices_and_links_and_refuse_pipes(
    vllmops: Any, home: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    for minor, code in ((3, ExitCode.OK), (7, ExitCode.FAILED)):
        for force in ([], ["--force"]):
            file = tmp_path / f"device{minor}{len(force)}"
            answer = vllmops(*fill_placeholders(words, device(file, minor), home), *force, "--json")
            assert answer.code == code
            assert code == ExitCode.OK or str(file) in answer.error["message"]
            assert stat.S_ISCHR(file.lstat().st_mode)
    os.mkfifo(tmp_path / "fifo")
    for file, force in ((tmp_path / "fifo", []), (tmp_path, ["--force"])):
        answer = vllmops(*fill_placeholders(words, file, home), *force, "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "keys.not-written")
    answer = vllmops(*fill_placeholders(words, "-", home), "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage")
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    for _ in range(2):
        assert vllmops(*fill_placeholders(words, link, home), "--force", "--json").code == 0
    assert link.is_symlink()
    assert target.stat().st_size > 32
    with contextlib.suppress(FileNotFoundError):
        Path("-").unlink()
        raise AssertionError


@pytest.mark.usefixtures("ring")
def test_a_full_disk(vllmops: Any, full_disk: Callable[[], None], home: Path) -> None:
    assert vllmops("keys", "add").code == 0
    out = home / "out"
    assert vllmops("keys", "export", "--out", str(out)).code == 0
    before = out.read_bytes()
    full_disk()
    names = set(os.listdir(home))
    for words in (("keys", "export", "--force", "--out", str(out)), ("keys", "add")):
        answer = vllmops(*words, "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "keys.not-written")
        assert str(home) in answer.error["message"]
    assert out.read_bytes() == before
    assert set(os.listdir(home)) == names


@pytest.mark.root_only
def test_a_directory_of_others(vllmops: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    answer = vllmops("keygen", "--out", "/etc/vllmops-test", "--json", uid=65534)
    assert (answer.code, answer.error["code"]) == (ExitCode.NOT_AUTHORISED, "keys.not-written")
    answer = vllmops("stacks", "explain", "/etc/shadow", "--json", uid=65534)
    assert (answer.code, answer.error["code"]) == (ExitCode.NOT_AUTHORISED, "file.unreadable")
