"""The ring's file, through everything that becomes of files."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import stat
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmops.model.environment import KEYRING, SIGNING_KEY, find_keyring_source
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.files import lock_file
from vllmops.support.secret_files import MOST_BYTES, require_secret_file
from vllmops_responses.keys import keyring_file
from vllmops_responses.keys.keyring import Key, KeyRing, KeyStatus, generate_secret

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keyring.json"


def killed_at(fault: str) -> None:
    """Have this process kill itself at a call, which from outside can't be timed.

    Args:
        fault: ``name:number:before`` or ``name:number:after``; the name is one of `os`.
    """
    name, number, when = fault.split(":")
    real, calls = getattr(os, name), 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(number) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, name, faulty)


@dataclass
class Adding:
    """A process that adds keys, as a fork of this one, and tells the kid of each."""

    path: Path
    count: int = 1
    before: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        words, self.saying = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self.add)
        self.process.start()
        os.close(self.saying)
        self.said = os.fdopen(words)

    def add(self) -> None:
        self.before()
        for _ in range(self.count):
            key = Key.from_secret(generate_secret(), KeyStatus.NEXT, 1)
            keyring_file.change_keyring(self.path, partial(KeyRing.add, key=key), create=True)
            os.write(self.saying, f"{key.kid}\n".encode())

    def end(self) -> str:
        """What it told, once it has ended."""
        with self.said:
            shown = self.said.read()
        self.process.join(60)
        return shown


def create_keyring(path: Path, keys: int = 1) -> KeyRing:
    for _ in range(keys):
        key = Key.from_secret(generate_secret(), KeyStatus.NEXT, 1)
        keyring_file.change_keyring(path, lambda ring, key=key: ring.add(key), create=True)  # type: ignore[misc]
    return keyring_file.load_keyring(path)


def refusal(code: str) -> pytest.RaisesExc[VllmopsError]:
    return pytest.raises(VllmopsError, check=lambda error: error.code == code and bool(error.hint))


def names(path: Path) -> set[str]:
    return {item.name for item in path.parent.iterdir()}


def test_it_is_private_and_has_a_copy(path: Path) -> None:
    before = os.umask(0)
    try:
        ring = create_keyring(path, 2)
    finally:
        os.umask(before)
    assert names(path) == {"keyring.json", "keyring.json.copy", "keyring.json.lock"}
    assert {stat.S_IMODE(item.stat().st_mode) for item in path.parent.iterdir()} == {0o600}
    assert path.read_bytes() == keyring_file.locate_copy(path).read_bytes()
    assert len(ring.keys) == 2
    written = json.loads(path.read_text())
    assert written["version"] == 1
    assert set(written["keys"][0]) == {*Key.__struct_fields__}
    assert bytes.fromhex(written["keys"][0]["secret"]) == ring.keys[0].secret.reveal()


def test_unchanged_keyring_is_not_written(path: Path) -> None:
    ring = create_keyring(path)
    before = path.stat()
    assert keyring_file.change_keyring(path, lambda ring: ring.add(ring.keys[0])) == ring
    assert path.stat() == before


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    create_keyring(path)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "ring"
    link.symlink_to(path)
    create_keyring(link)
    assert link.is_symlink()
    assert (
        len(keyring_file.load_keyring(path).keys) == len(keyring_file.load_keyring(link).keys) == 2
    )


def test_no_file(path: Path) -> None:
    with refusal("keys.no-ring") as caught:
        keyring_file.load_keyring(path)
    assert caught.value.exit_code == ExitCode.FAILED
    with refusal("keys.no-ring"):
        keyring_file.change_keyring(path, lambda ring: ring)


def test_a_lost_file_is_not_begun_anew_beside_its_copy(path: Path) -> None:
    ring = create_keyring(path)
    path.unlink()
    with refusal("keys.no-ring") as caught:
        create_keyring(path)
    assert str(keyring_file.locate_copy(path)) in caught.value.hint
    keyring_file.locate_copy(path).rename(path)
    assert keyring_file.load_keyring(path) == ring


@pytest.mark.parametrize("mode", [0o604, 0o660, 0o601, 0o777])
def test_a_lax_mode(path: Path, mode: int) -> None:
    create_keyring(path)
    path.chmod(mode)
    with refusal("keys.unsafe") as caught:
        keyring_file.load_keyring(path)
    assert caught.value.exit_code == ExitCode.NOT_AUTHORISED
    assert f"{mode:o}" in caught.value.message
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.root_only
def test_another_users(path: Path) -> None:
    create_keyring(path)
    os.chown(path, NOBODY, NOBODY)
    before = path.read_bytes()
    with refusal("keys.unsafe") as caught:
        create_keyring(path)
    assert f"uid {NOBODY}" in caught.value.message
    assert path.read_bytes() == before
    assert path.stat().st_uid == NOBODY


@pytest.mark.root_only
def test_roots_may_be_read_by_a_group_and_stays_so(path: Path) -> None:
    create_keyring(path)
    os.chown(path, 0, NOBODY)
    for mode in (0o644, 0o660):
        path.chmod(mode)
        with refusal("keys.unsafe"):
            keyring_file.load_keyring(path)
    path.chmod(0o640)
    create_keyring(path)
    at = path.stat()
    assert (at.st_gid, stat.S_IMODE(at.st_mode)) == (NOBODY, 0o640)
    os.chown(path, NOBODY, NOBODY)
    own = path.stat()
    os.seteuid(NOBODY)
    try:
        require_secret_file(path, at)
        # Nobody but root need do that.
        with refusal("keys.unsafe"):
            require_secret_file(path, own)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("what", ["directory", "pipe", "device"])
def test_keyring_must_be_a_regular_file(path: Path, what: str) -> None:
    match what:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path = Path("/dev/zero")
    with refusal("keys.unsafe"):
        keyring_file.load_keyring(path)


def spoilt(content: bytes) -> dict[str, bytes]:
    """What may become of a ring's file."""
    secret = json.loads(content)["keys"][0]["secret"].encode()
    return {
        "empty": b"",
        "zeros": b"\0" * len(content),
        "half": content[: len(content) // 2],
        "no end": content[:-4],
        "not text": b"\xff" + content,
        "a list": b"[]",
        "a typo": content.replace(b'"status"', b'"statsu"', 1),
        "no such status": content.replace(b'"next"', b'"nxet"', 1),
        "another secret": content.replace(secret, b"00" * 32),
        "no hex": content.replace(secret, b"zz" + secret[2:]),
        "cut secret": content.replace(secret, secret[2:]),
        "a number": content.replace(b'"' + secret + b'"', b"7"),
        "twice": content.replace(
            b'"keys": [', b'"keys": [' + content.split(b"[")[1].split(b"]")[0] + b","
        ),
        "no version": content.replace(b'"version"', b'"vision"'),
        "newer": content.replace(b'"version": 1', b'"version": 2'),
        "deep": b'{"version":1,"keys":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "huge": content + b" " * MOST_BYTES,
    }


@pytest.mark.parametrize(
    "how",
    spoilt(
        keyring_file.encode_keyring(
            KeyRing(keys=(Key.from_secret(generate_secret(), KeyStatus.NEXT),))
        )
    ),
)
def test_a_spoilt_file_loses_nothing_and_tells_nothing(path: Path, how: str) -> None:
    ring = create_keyring(path, 2)
    content = path.read_bytes()
    path.write_bytes(spoilt(content)[how])
    with refusal("keys.newer" if how == "newer" else "keys.broken") as caught:
        create_keyring(path)
    assert path.read_bytes() == spoilt(content)[how]
    # As the message says: its last good content is put back.
    keyring_file.locate_copy(path).replace(path)
    assert keyring_file.load_keyring(path) == ring
    shown = "".join(traceback.format_exception(caught.value)) + caught.value.hint
    for key in ring.keys:
        assert key.secret.reveal().hex()[4:20] not in shown


CALLS = ("open", "fsync", "replace", "close", "unlink")


def test_killed_at_every_step(path: Path) -> None:
    """Whatever it was doing, what was there is there, and what it added is there or not."""
    create_keyring(path, 2)
    faults = 0
    for name in CALLS:
        for number in range(1, 20):
            for when in ("before", "after"):
                before = keyring_file.load_keyring(path)
                adder = Adding(path, 1, partial(killed_at, f"{name}:{number}:{when}"))
                adder.end()
                code = adder.process.exitcode
                assert code in {0, -signal.SIGKILL}
                after = keyring_file.load_keyring(path)
                assert set(before.keys) <= set(after.keys)
                assert len(after.keys) - len(before.keys) in ({0, 1} if code else {1})
                assert set(after.keys) <= set(
                    keyring_file.decode_keyring(
                        keyring_file.locate_copy(path).read_bytes(), path
                    ).keys
                )
                faults += code != 0
            if code == 0:
                break
    assert faults >= 14
    # What they left lying about is secret, too: the next one takes it away.
    create_keyring(path)
    assert names(path) == {"keyring.json", "keyring.json.copy", "keyring.json.lock"}


def test_killed_in_the_middle_of_a_write(path: Path) -> None:
    """The kernel kills it once so many bytes of a file are written."""
    before = create_keyring(path, 3)
    size = path.stat().st_size

    def limits(most: int) -> Callable[[], None]:
        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        return limit

    for most in (0, 1, size // 2, size + 1):
        adder = Adding(path, 1, limits(most))
        adder.end()
        assert adder.process.exitcode == -signal.SIGXFSZ
        assert any(item.startswith(".keyring.json.") for item in names(path))
        assert keyring_file.load_keyring(path) == before


def test_killed_at_any_moment_while_many_write(path: Path) -> None:
    chance = random.Random(1)
    before = set(create_keyring(path).keys)
    for _ in range(8):
        writers = [Adding(path, 1000) for _ in range(2)]
        writers[0].said.readline()
        time.sleep(chance.uniform(0, 0.05))
        for writer in writers:
            writer.process.kill()
        words = "".join(writer.end() for writer in writers)
        after = keyring_file.load_keyring(path)
        assert before <= set(after.keys)
        kids = {key.kid for key in after.keys}
        # The last line may be torn.
        assert {kid for kid in words.split() if len(kid) == 8} <= kids
        assert len(after.keys) > len(before)
        before = set(after.keys)


def test_many_writers_lose_nothing(path: Path) -> None:
    writers = [Adding(path, 10) for _ in range(4)]
    words = [writer.end() for writer in writers]
    assert [writer.process.exitcode for writer in writers] == [0] * 4
    kids = {key.kid for key in keyring_file.load_keyring(path).keys}
    assert kids == set("".join(words).split())
    assert len(kids) == 40


def test_a_writer_that_hangs_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_keyring(path)
    held = lock_file(path.with_name("keyring.json.lock"))
    assert held is not None
    monkeypatch.setattr(keyring_file, "LOCK_WAIT_S", 0.1)
    with refusal("keys.locked") as caught:
        create_keyring(path)
    assert caught.value.exit_code == ExitCode.TIMED_OUT
    os.close(held)
    create_keyring(path)


def test_a_full_disk(home: Path, full_disk: Callable[[], None]) -> None:
    path = home / "keyring.json"
    ring = create_keyring(path, 2)
    full_disk()
    for _ in range(3):
        with refusal("keys.not-written") as caught:
            keyring_file.change_keyring(path, add_many_keys)
        assert "No space" in caught.value.message
        assert keyring_file.load_keyring(path) == ring
    assert not [item for item in names(path) if item.startswith(".keyring")]
    (home / "filler").unlink()
    assert len(keyring_file.change_keyring(path, add_many_keys).keys) == 52


def add_many_keys(ring: KeyRing) -> KeyRing:
    """More than fits into what a full disk has left in its last page."""
    for _ in range(50):
        ring = ring.add(Key.from_secret(generate_secret(), KeyStatus.NEXT))
    return ring


def test_unwritable_keyring_is_reported(path: Path) -> None:
    with refusal("keys.not-written"):
        create_keyring(path.parent / "no" / "ring")


def test_files_of_others_beside_it_are_left_alone(path: Path) -> None:
    for name in (".keyring.json.swp", ".keyring.json.bak.abcdefgh", ".keyring.jsonx.abcdefgh"):
        path.with_name(name).touch()
    left = path.with_name(".keyring.json.abc_1234")
    left.touch()
    create_keyring(path)
    assert len(names(path)) == 6
    assert not left.exists()


def test_which_ring_counts(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    text = "ab" * 32
    everything = {KEYRING: "/place/ring", SIGNING_KEY: text}
    assert find_keyring_source(everything, Path("/named")).path == Path("/named")
    assert find_keyring_source(everything).path == Path("/place/ring")
    assert find_keyring_source({KEYRING: "", SIGNING_KEY: ""}).path == home / "keyring.json"
    single = find_keyring_source({SIGNING_KEY: text})
    assert single.path is None
    ring = keyring_file.load_keyring_source(single)
    assert ring.primary is not None
    assert ring.primary.secret.reveal() == bytes.fromhex(text)
    # The same on every replica, and once it is imported.
    assert keyring_file.load_keyring_source(single) == ring
    with refusal("keys.not-hex") as caught:
        keyring_file.load_keyring_source(find_keyring_source({SIGNING_KEY: "x" * 64}))
    assert SIGNING_KEY in caught.value.message
    monkeypatch.chdir(tmp_path)
    assert find_keyring_source({KEYRING: "ring"}).path == tmp_path / "ring"


def test_an_encoded_ring_is_what_was_decoded(path: Path) -> None:
    ring = create_keyring(path, 3)
    changed = KeyRing(
        keys=(
            msgspec.structs.replace(ring.keys[0], status=KeyStatus.REVOKED, not_after=5),
            *ring.keys[1:],
        )
    )
    assert keyring_file.decode_keyring(keyring_file.encode_keyring(changed), path) == changed


def test_a_lock_of_somebody_else_is_a_missing_right(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny_lock(lock: Path) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(lock))

    create_keyring(path)
    monkeypatch.setattr(keyring_file, "lock_file", deny_lock)
    with refusal("keys.not-written") as caught:
        create_keyring(path)
    assert caught.value.exit_code == ExitCode.NOT_AUTHORISED


def test_a_hint_can_be_run_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "a b;$(c)" / "keyring.json"
    path.parent.mkdir()
    ring = create_keyring(path)
    path.chmod(0o644)
    with refusal("keys.unsafe") as caught:
        keyring_file.load_keyring(path)
    subprocess.run(caught.value.hint, shell=True, check=True)
    path.write_text("{")
    with refusal("keys.broken") as caught:
        keyring_file.load_keyring(path)
    subprocess.run(caught.value.hint.partition(": ")[2], shell=True, check=True)
    path.unlink()
    with refusal("keys.no-ring") as caught:
        keyring_file.load_keyring(path)
    subprocess.run(caught.value.hint.partition(", or")[0], shell=True, check=True)
    assert keyring_file.load_keyring(path) == ring
