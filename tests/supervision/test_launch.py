"""What `serve` checks and plans before anything starts."""

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from vllmops.collect.machine.server_address import ServingMode
from vllmops.model.environment import STORE, STORE_CLASS
from vllmops.servers.record import InstanceFolder
from vllmops.servers.target_endpoint import find_store_url
from vllmops.supervision import launch
from vllmops.supervision.launch import (
    LaunchOptions,
    find_free_port,
    preview_record,
    require_readable_model,
    require_usable_port,
    reserve_instance,
)
from vllmops.support import urls
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops_responses.store.backends import sqlite

from ..support import ports


def refusal(code: str, check: Any, *arguments: Any) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        check(*arguments)
    assert caught.value.code == code
    assert caught.value.hint
    return caught.value


def test_the_ports_start_at_8000() -> None:
    assert 8000 <= find_free_port("127.0.0.1", set()) <= 8999


def test_models_that_are_none(tmp_path: Path) -> None:
    assert (
        str(tmp_path / "no")
        in refusal("model.missing", require_readable_model, f"{tmp_path}/no").message
    )
    assert "config.json" in refusal("model.missing", require_readable_model, str(tmp_path)).message
    assert "~" not in refusal("model.missing", require_readable_model, "~/no/such/model").message
    refusal("model.missing", require_readable_model, "~no-such-user/model")
    refusal("model.missing", require_readable_model, "./no-such-model")
    (tmp_path / "config.json").mkdir()
    refusal("model.missing", require_readable_model, str(tmp_path))


def test_models_that_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("hf", "config.json"), ("mistral", "params.json"), ("gguf", "m.gguf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
        require_readable_model(str(tmp_path / name))
    require_readable_model(str(tmp_path / "gguf" / "m.gguf"))
    require_readable_model("Qwen/Qwen3-0.6B")  # vLLM's business
    monkeypatch.chdir(tmp_path)
    require_readable_model("hf")


def test_a_port_that_is_taken(listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = ports.launch_ports()  # no other test takes the one that is free
    monkeypatch.setattr(launch, "FIRST_PORT", first)
    monkeypatch.setattr(launch, "LAST_PORT", last)
    error = refusal("port.taken", require_usable_port, "127.0.0.1", listener)
    assert f"127.0.0.1:{listener}" in error.message
    assert f"pid {os.getpid()}" in error.message
    free = int(error.hint.split("--port ")[1].split(",")[0])
    require_usable_port("127.0.0.1", free)


def test_a_port_that_others_may_share() -> None:
    """As vLLM binds where it has several API servers: nobody would be told of the other."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        # Its model is loading.
        assert str(port) in refusal("port.taken", require_usable_port, "127.0.0.1", port).message
        server.listen()
        error = refusal("port.taken", require_usable_port, "127.0.0.1", port)
        assert f"pid {os.getpid()}" in error.message


def test_a_port_that_is_taken_on_every_address() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        refusal("port.taken", require_usable_port, "127.0.0.1", server.getsockname()[1])


def test_a_port_in_time_wait_is_free() -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        address = server.getsockname()
        client = socket.create_connection(address)
        accepted, _ = server.accept()
        accepted.close()
        client.close()
    require_usable_port("127.0.0.1", address[1])


def test_hosts_that_are_none() -> None:
    refusal("host.unknown", require_usable_port, "no.such.host.invalid", 8000)
    error = refusal("host.unknown", require_usable_port, "192.0.2.1", 8000)  # RFC 5737: nobody's
    assert "192.0.2.1" in error.message


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1", "\ud800"])
def test_a_host_that_is_none_is_refused_before_a_port_is_looked_for(
    host: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require_vllm", lambda: None)
    refusal(
        "host.unknown", launch.validate_options, launch.LaunchOptions(model=str(model), host=host)
    )


def test_no_free_port(monkeypatch: pytest.MonkeyPatch, listener: int) -> None:
    monkeypatch.setattr(launch, "FIRST_PORT", listener)
    monkeypatch.setattr(launch, "LAST_PORT", listener)
    refusal("port.none", find_free_port, "127.0.0.1", set())


@pytest.mark.parametrize(
    ("ambient", "given", "planned"),
    [
        (None, {}, None),
        ("a,b", {}, "a,b,vllmops"),
        ("vllmops,a", {}, "vllmops,a"),
        ("", {}, "vllmops"),
        ("a", {"VLLM_PLUGINS": "c"}, "c,vllmops"),
    ],
)
def test_the_users_plugins_are_kept(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    ambient: str | None,
    given: dict[str, str],
    planned: str | None,
) -> None:
    if ambient is not None:
        monkeypatch.setenv("VLLM_PLUGINS", ambient)
    environment = preview_record(LaunchOptions("M", environment=given)).environment
    assert environment.get("VLLM_PLUGINS") == planned
    assert environment["VLLMOPS_HOME"] == str(home)


@pytest.mark.parametrize(
    ("ambient", "given", "planned"),
    [
        ({}, {}, "sqlite:///{home}/instances/m/responses.db"),
        ({STORE: "memory://"}, {}, "memory://"),
        ({STORE: "memory://"}, {STORE: "none"}, "none"),
        ({STORE_CLASS: "a.B"}, {}, None),
        ({STORE_CLASS: "a.B"}, {STORE: "redis://r"}, "redis://r"),
    ],
)
def test_launch_chooses_the_response_store(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    ambient: dict[str, str],
    given: dict[str, str],
    planned: str | None,
) -> None:
    for name, value in ambient.items():
        monkeypatch.setenv(name, value)
    found = preview_record(LaunchOptions("M", environment=given)).environment.get(STORE)
    assert found == (planned and planned.format(home=home))


def test_responses_are_kept_below_a_home_of_any_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLMOPS_HOME", str(odd := home / "a?b#c%41"))
    url = preview_record(LaunchOptions("M")).environment[STORE]
    assert sqlite.parse_file_path(url) == odd / "instances/m/responses.db"
    urls.parse_store_url(url)


def test_the_store_of_an_instance_is_the_same_from_everywhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there := home / "a?b").mkdir()
    monkeypatch.chdir(there)
    url = "sqlite:///s/a%23.db?namespace=blue"
    record = preview_record(LaunchOptions("M", environment={STORE: url}))
    monkeypatch.chdir(home)
    store = find_store_url(record)
    assert store is not None
    assert sqlite.parse_file_path(store.partition("?")[0]) == there / "s/a#.db"
    assert urls.parse_store_url(store).query == {"namespace": "blue"}
    for other in ("sqlite:////a/b.db", "sqlite:///~/b.db", "redis://h/0", "postgresql://h/d?a=b"):
        assert urls.resolve_store_url(there, other) == other


def test_the_command(home: Path) -> None:
    order = LaunchOptions("M", arguments=("--port", "9", "--x"), port=7, host="0.0.0.0")
    record = preview_record(order)
    assert record.command == (
        *(sys.executable, "-P", "-m", "vllmops.agent.launch", "serve", "M"),
        *("--host", "0.0.0.0", "--port", "7", "--port", "9", "--x"),
    )
    assert record.scheme == "http"
    secure = preview_record(LaunchOptions("M", arguments=("--ssl-certfile", "c.pem")))
    assert secure.url
    assert secure.url.startswith("https://")
    assert not list(home.iterdir())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("/models/Tiny Model/", "tiny-model"),
        ("...", "vllm"),
        ("/", "vllm"),
        ("x" * 100, "x" * 63),
    ],
)
def test_the_name_follows_the_model(home: Path, model: str, name: str) -> None:
    assert preview_record(LaunchOptions(model)).name == name


def test_names_are_numbered(home: Path) -> None:
    first = reserve_instance(LaunchOptions("M"))
    second = reserve_instance(LaunchOptions("M"))
    long = [reserve_instance(LaunchOptions("x" * 70)) for _ in range(2)]
    assert [first.record.name, second.record.name] == ["m", "m-2"]
    assert [one.record.name for one in long] == ["x" * 63, "x" * 58 + "-2"]
    assert first.record.port != second.record.port
    for one in (first, second, *long):
        os.close(one.lock)


def test_a_name_that_is_taken(home: Path) -> None:
    first = reserve_instance(LaunchOptions("M", name="a"))
    error = refusal("name.taken", reserve_instance, LaunchOptions("M", name="a"))
    assert "'a'" in error.message
    os.close(first.lock)
    os.close(reserve_instance(LaunchOptions("M", name="a")).lock)  # nothing of it runs any more


def test_a_port_that_another_one_is_about_to_take(home: Path) -> None:
    first = reserve_instance(LaunchOptions("M"))
    error = refusal("port.taken", reserve_instance, LaunchOptions("M", port=first.record.port))
    assert str(first.record.port) in error.message
    os.close(first.lock)


def test_a_bad_name_leaves_nothing(home: Path) -> None:
    error = refusal_without_hint("name.invalid", LaunchOptions("M", name="../a"))
    assert error.exit_code == ExitCode.USAGE
    assert not (home / "a").exists()
    assert not [item for item in (home / "instances").iterdir() if item.is_dir()]


def refusal_without_hint(code: str, order: LaunchOptions) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        reserve_instance(order)
    assert caught.value.code == code
    return caught.value


def take_one(pipe: Any) -> None:
    one = reserve_instance(LaunchOptions("M"))
    pipe.send((one.record.name, one.record.port))
    pipe.recv()


def test_many_at_once_get_different_names_and_ports(home: Path) -> None:
    fork = multiprocessing.get_context("fork")
    pipes = []
    for _ in range(12):
        ours, theirs = fork.Pipe()
        fork.Process(target=take_one, args=(theirs,), daemon=True).start()
        pipes.append(ours)
    taken = [pipe.recv() for pipe in pipes if pipe.poll(60)]
    for pipe in pipes:
        pipe.send(None)
    assert len(taken) == 12
    assert {name for name, _ in taken} == {"m", *(f"m-{n}" for n in range(2, 13))}
    assert len({port for _, port in taken}) == 12


def take_elsewhere(pipe: Any, place: Path) -> None:
    os.environ["VLLMOPS_HOME"] = str(place)
    take_one(pipe)


def test_many_homes_at_once_get_different_ports(home: Path) -> None:
    fork = multiprocessing.get_context("fork")
    pipes = []
    for number in range(12):
        ours, theirs = fork.Pipe()
        words = (theirs, home / str(number))
        fork.Process(target=take_elsewhere, args=words, daemon=True).start()
        pipes.append(ours)
    taken = [pipe.recv() for pipe in pipes if pipe.poll(60)]
    error = refusal("port.taken", reserve_instance, LaunchOptions("M", port=taken[0][1]))
    assert "belongs to another instance" in error.message
    for pipe in pipes:
        pipe.send(None)
    assert len(taken) == 12
    assert {name for name, _ in taken} == {"m"}
    assert len({port for _, port in taken}) == 12


def test_a_record_in_the_way_that_is_damaged(home: Path) -> None:
    folder = InstanceFolder("a")
    folder.path.mkdir(parents=True)
    folder.record_file.write_text("{")
    error = refusal("registry.corrupt", reserve_instance, LaunchOptions("M", name="a"))
    assert str(folder.path) in error.message
    assert (
        reserve_instance(LaunchOptions("a")).record.name == "a-2"
    )  # one that nobody asked for by name


@pytest.mark.parametrize(
    ("content", "words", "headless", "uds"),
    [
        ("headless: true", "", True, None),
        ("headless: true\ntensor-parallel-size: 2\ncompilation-config: {level: 1}", "", True, None),
        ("headless: false", "", False, None),
        ("api-server-count: 0", "", True, None),
        ("uds: /run/v.sock", "", False, "/run/v.sock"),
        ("uds: /run/v.sock", "--uds /run/w.sock", False, "/run/w.sock"),
        ("- headless", "", False, None),
        ("{", "", False, None),
        ("5: !!python/object:x {}", "", False, None),
        ("[" * 5000, "", False, None),
    ],
)
def test_the_shape_that_vllms_own_file_gives(
    home: Path, tmp_path: Path, content: str, words: str, headless: bool, uds: str | None
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(content)
    order = launch.LaunchOptions("m", ("--config", str(file), *words.split()))
    record = launch.build_record(order, "a", None)
    assert (record.headless, record.uds) == (headless, uds)
    assert (order.serving_mode == ServingMode()) == (not headless and uds is None)


def test_a_yaml_file_is_read_once_for_one_start(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("uds: a.sock\n")
    order = LaunchOptions("some/model", ("--config", str(file)))
    assert launch.preview_record(order).uds == str(Path("a.sock").absolute())
    file.write_text("headless: true\n")
    again = launch.preview_record(order)
    assert (again.headless, again.uds) == (False, str(Path("a.sock").absolute()))


@pytest.mark.parametrize("path", ["/nowhere.yaml", "/dev/zero", "/", ""])
def test_a_file_of_vllms_that_cannot_be_read_is_left_to_vllm(home: Path, path: str) -> None:
    assert not launch.build_record(
        launch.LaunchOptions("m", ("--config", path)), "a", None
    ).headless


def test_an_address_that_is_none() -> None:
    for host in ("a\x1b[2J\u202e", "\x00", "a..b", "x" * 300):
        assert isinstance(launch.try_bind(host, 8000), OSError), host
