"""What is on disk about an instance: names, damage, and the lock that tells who lives."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from vllmops.collect.machine.processes import Process
from vllmops.model.roles import Role
from vllmops.servers.record import (
    Failure,
    InstanceFolder,
    InstanceRecord,
    InstanceState,
    create_instances_root,
    get_client_host,
    get_instance_folder,
    list_instance_folders,
)
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.files import lock_file


def record(name: str = "a") -> InstanceRecord:
    return InstanceRecord(
        name=name,
        model="M",
        command=("x", "y"),
        environment={"A": "b"},
        directory="/",
        host="127.0.0.1",
        port=8000,
        detached=True,
        created_at=1.5,
        processes=(Process(Role.API, 5, 250, "vllm serve M", 7),),
        segments=("psm_1",),
        failure=Failure("why", "Worker", "do"),
    )


def folder(name: str = "a") -> InstanceFolder:
    create_instances_root()
    made = get_instance_folder(name)
    made.path.mkdir()
    return made


def test_a_record_comes_back_as_it_was(home: Path) -> None:
    one = folder()
    assert one.load_record() is None
    one.save_record(record())
    assert one.load_record() == record()
    assert one.record_file.stat().st_mode & 0o777 == 0o600
    assert one.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"name": 5}', b"\x00" * 100, b'{"schema": 1}', b"\xff\xfe"],
)
def test_a_damaged_record_is_said_to_be_one(home: Path, content: bytes) -> None:
    one = folder()
    one.record_file.write_bytes(content)
    with pytest.raises(VllmopsError) as caught:
        one.load_record()
    assert caught.value.code == "registry.corrupt"
    assert str(one.record_file) in caught.value.message
    assert str(one.path) in caught.value.hint


def test_half_a_record_is_never_left(home: Path, full_disk: Callable[[], None]) -> None:
    one = folder()
    one.save_record(record())
    full_disk()
    large = msgspec.structs.replace(record(), note="x" * 10_000)
    with pytest.raises(OSError, match="No space"):
        one.save_record(large)
    assert one.load_record() == record()
    assert [item.name for item in one.path.iterdir()] == ["instance.json"]


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "..", "a/b", "../a", "a b", "a\n", "ü", "a" * 64, "[red]"]
)
def test_names_that_are_none(home: Path, name: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        get_instance_folder(name)
    assert (caught.value.code, caught.value.exit_code) == ("name.invalid", ExitCode.USAGE)


def test_a_home_too_long_for_a_socket(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 107 - len(f"{home}/") - len("/instances/ab/control.sock")
    monkeypatch.setenv("VLLMOPS_HOME", f"{home}/{'x' * longest}")
    get_instance_folder("ab")
    with pytest.raises(VllmopsError) as caught:
        get_instance_folder("abc")
    assert caught.value.code == "home.path-too-long"
    assert "1 bytes too long" in caught.value.message
    assert "VLLMOPS_HOME" in caught.value.hint


def test_a_home_below_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("VLLMOPS_HOME", str(home / "file" / "state"))
    with pytest.raises(VllmopsError) as caught:
        create_instances_root()
    assert caught.value.code == "home.unusable"
    assert f"{home}/file/state" in caught.value.message
    with pytest.raises(VllmopsError) as caught:
        list(list_instance_folders())
    assert caught.value.code == "home.unusable"


def test_only_directories_are_listed_as_instances(home: Path) -> None:
    assert list(list_instance_folders()) == []
    folder("b")
    folder("a")
    (home / "instances" / ".lock").touch()
    assert [item.name for item in list_instance_folders()] == ["a", "b"]


def test_the_lock_goes_with_its_holder(home: Path) -> None:
    one = folder()
    assert not one.is_supervised()
    held = one.take_lock()
    assert held is not None
    assert one.take_lock() is None
    assert one.is_supervised()
    os.close(held)
    assert not one.is_supervised()


def test_the_lock_is_not_inherited(home: Path) -> None:
    held = lock_file(folder().path / "lock")
    assert held is not None
    assert not os.get_inheritable(held)
    os.close(held)


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("127.0.0.1", "127.0.0.1"),
        ("box.example", "box.example"),
    ],
)
def test_client_host_replaces_wildcard_addresses(host: str, client: str) -> None:
    assert get_client_host(host) == client


def test_which_states_are_the_end() -> None:
    assert {state for state in InstanceState if state.is_over} == {
        InstanceState.STOPPED,
        InstanceState.FAILED,
    }
