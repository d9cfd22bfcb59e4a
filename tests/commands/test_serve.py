"""``vllmops serve`` from end to end, with a stand-in for vLLM (see supervision/standin.py).

tests/live starts the real one; here are the faults and the corner cases.
"""

import asyncio
import fcntl
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmops.collect.machine.processes import is_alive
from vllmops.model.environment import KEYRING, SIGNING_KEY
from vllmops.servers.record import InstanceFolder
from vllmops_responses.keys import keyring_file
from vllmops_responses.serve_settings import create_default_keyring
from vllmops_responses.store import settings
from vllmops_responses.store.backend_factory import make_backend
from vllmops_responses.store.response_store import ResponseStore

from ..support.commands import background
from ..support.extent import long
from ..support.ports import free_port
from ..support.waiting import until

LOGS = Path(__file__).parents[1] / "servers/logs"
NOBODY = 65534


# -- what it is told ---------------------------------------------------------------------


def test_detached(lab: Any) -> None:
    answer = lab.vllmops(*lab.words("a", "--env", "A=b=c"), "--detach", "--json")
    assert answer.code == 0, answer
    assert answer.err == ""
    data = answer.data
    record = lab.record("a")
    assert (data["name"], data["state"], data["detached"]) == ("a", "ready", True)
    assert (data["url"], data["pid"]) == (record.url, record.session)
    assert data["environment"]["A"] == "b=c"
    assert "(APIServer" in Path(data["log"]).read_text()
    environ = Path(f"/proc/{record.session}/environ").read_bytes().split(b"\0")
    assert b"A=b=c" in environ
    assert urllib.request.urlopen(f"{data['url']}/health").status == 200


def test_detached_serve_prints_stages_and_the_url(lab: Any, tmp_path: Path) -> None:
    held = tmp_path / "held"
    serve = background(*lab.words("a", ready_with=str(held)), "--detach")
    assert serve.stderr
    # Which stages it sees depends on how fast they go; it is held at the last one.
    seen = [next(line for line in serve.stderr if "  a: warming up" in line)]
    held.touch()
    out, err = serve.communicate(timeout=60)
    assert serve.returncode == 0
    url = lab.record("a").url
    assert out.startswith(f"a is ready at {url} after ")
    assert "vllmops stop a" in out
    assert "Traceback" not in "".join([*seen, err])


def test_a_dry_run_can_be_pasted_into_a_shell(lab: Any) -> None:
    # Each plan chooses a port anew, and the first one may have become free between the two.
    options = lab.words("a", "--env", "SPACED=it's a [b]", "--port", str(free_port()), "--dry-run")
    behind = ("--", "--x", "a 'b' \"c\" $d")
    answer = lab.vllmops(*options, *behind)
    assert answer.code == 0
    assert not (lab.home / "instances").exists()
    planned = lab.vllmops(*options, "--json", *behind).data
    assert planned["command"][-2:] == ["--x", "a 'b' \"c\" $d"]
    assert planned["environment"]["SPACED"] == "it's a [b]"
    server = subprocess.Popen(["sh", "-c", f"exec {answer.out}"], stdout=subprocess.DEVNULL)
    try:
        until(lambda: healthy(planned["url"]))
        spoken = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode().split("\0")
        assert spoken[1:-1] == planned["command"][1:]
    finally:
        server.terminate()
        server.wait(60)


def test_a_dry_run_shows_no_secrets(lab: Any) -> None:
    env = ("--env", "HF_TOKEN=PLANTED-1", "--env", "DB=postgresql://u:PLANTED-2@db/x")
    hook = ("--watch-webhook", "https://example.com/PLANTED-3")
    words = lab.words("a", *env, *hook, "--dry-run", "--", "--api-key", "PLANTED-4", "--x", "y")
    answer = lab.vllmops(*words)
    assert "PLANTED" not in answer.out
    assert "--api-key '[redacted]' --x y" in answer.out
    planned = lab.vllmops(*words[:-5], "--json", *words[-5:])
    assert "PLANTED" not in planned.out
    assert planned.data["command"][-4:] == ["--api-key", "[redacted]", "--x", "y"]


def healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health").status == 200)
    except OSError:
        return False


def test_serve_passes_store_options_to_the_environment(lab: Any) -> None:
    limits = ("--store-max-size", "7", "--store-max-per-key", "3", "--store-ttl", "1.5h")
    words = ("--store", "memory://", *limits, "--dry-run")
    environment = lab.vllmops(*lab.words("a", *words), "--json").data["environment"]
    assert environment["VLLMOPS_RESPONSES_STORE"] == "memory://"
    assert environment["VLLM_RESPONSES_API_STORE_MAX_SIZE"] == "7"
    assert environment["VLLMOPS_RESPONSES_STORE_MAX_PER_KEY"] == "3"
    assert environment["VLLMOPS_RESPONSES_STORE_TTL"] == "5400"


def test_limits_of_websockets(lab: Any) -> None:
    limits = ("--ws-max-message", "4M", "--ws-idle", "1.5h")
    more = ("--ws-max-requests", "7", "--ws-max-connections", "30")
    words = lab.words("a", *limits, *more, "--dry-run")
    environment = lab.vllmops(*words, "--json").data["environment"]
    assert environment["VLLMOPS_WEBSOCKET_MAX_MESSAGE"] == str(4 << 20)
    assert environment["VLLMOPS_WEBSOCKET_IDLE"] == "5400"
    assert environment["VLLMOPS_WEBSOCKET_MAX_REQUESTS"] == "7"
    assert environment["VLLMOPS_WEBSOCKET_MAX_CONNECTIONS"] == "30"
    assert settings.parse_websocket_limits(environment) == (4 << 20, 5400, 7, 30)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--store", "nonsense"), "is not a store URL"),
        (("--store-ttl", "soon"), "is not a duration"),
        (("--carrier-ttl", "soon"), "is not a duration"),
        (("--carrier-ttl", "40000d"), "up to 36500d"),
        (("--carrier", "v1"), "v2"),
        (("--compaction-prompt", "/dev/null"), "--compaction-prompt"),
        (("--env", "VLLMOPS_CARRIER=v1"), "VLLMOPS_CARRIER"),
        (("--ws-max-message", "17M"), "it can be up to 16M"),
        (("--env", "VLLMOPS_WEBSOCKET_MAX_MESSAGE=0"), "VLLMOPS_WEBSOCKET_MAX_MESSAGE"),
        (("--ws-idle", "soon"), "is not a duration"),
        (("--store", "memory://", "--", "--api-server-count", "2"), "works for one process only"),
        (("--env", "VLLM_RESPONSES_STORE_BACKEND=a.B"), "No module named 'a'"),
    ],
)
def test_a_store_that_can_not_be(lab: Any, words: tuple[str, ...], message: str) -> None:
    answer = lab.vllmops(*lab.words("a", *words))
    assert answer.code == 2
    assert message in answer.err
    assert not (lab.home / "instances" / "a").exists()


def test_serve_passes_carrier_options_to_the_environment(lab: Any) -> None:
    words = ("--carrier", "signed-v1", "--carrier-ttl", "2d", "--dry-run")
    environment = lab.vllmops(*lab.words("a", *words), "--json").data["environment"]
    assert environment["VLLMOPS_CARRIER"] == "signed-v1"
    assert environment["VLLMOPS_CARRIER_TTL"] == "172800"
    # For `keys rotate` the record has the time also where it was said otherwise.
    for more, seconds in (((), "60"), (("--env", "VLLMOPS_CARRIER_TTL=70"), "70")):
        command = (*lab.words("a", *more), "--dry-run", "--json")
        environment = lab.vllmops(*command, env={"VLLMOPS_CARRIER_TTL": "60"}).data["environment"]
        assert environment["VLLMOPS_CARRIER_TTL"] == seconds


def test_a_server_whose_gpus_can_be_dumped(lab: Any) -> None:
    armed = {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}
    for words, folder in (
        (("--cuda-coredump",), f"{lab.home}/cuda"),
        (("--cuda-coredump", "/srv/cores"), "/srv/cores"),
    ):
        command = (*lab.words("a", *words), "--dry-run", "--json")
        environment = lab.vllmops(*command).data["environment"]
        assert environment.items() >= armed.items()
        assert environment["CUDA_COREDUMP_FILE"].startswith(f"{folder}/")
        assert environment["CUDA_COREDUMP_PIPE"].startswith(f"{folder}/")
        # Without it the driver ends the process after a dump; without the others it dumps memory.
        assert "skip_abort" in environment["CUDA_COREDUMP_GENERATION_FLAGS"]
        assert "skip_global_memory" in environment["CUDA_COREDUMP_GENERATION_FLAGS"]
    own = lab.words("a", "--cuda-coredump", "--env", "CUDA_COREDUMP_FILE=/mine")
    environment = lab.vllmops(*own, "--dry-run", "--json").data["environment"]
    assert environment["CUDA_COREDUMP_FILE"] == "/mine"
    plain = lab.vllmops(*lab.words("a"), "--dry-run", "--json").data["environment"]
    assert armed.keys().isdisjoint(plain)


def test_a_folder_for_dumps_that_cannot_be_made(lab: Any) -> None:
    answer = lab.vllmops(*lab.words("a", "--cuda-coredump", "/proc/none"), "--json")
    assert (answer.code, answer.error["code"]) == (1, "file.not-written")


@pytest.fixture
def keyring(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (KEYRING, SIGNING_KEY):
        monkeypatch.delenv(name, raising=False)
    return Path(lab.home) / "keyring.json"


def test_a_keyring_is_made_where_there_is_none(lab: Any, keyring: Path) -> None:
    assert lab.vllmops(*lab.words("a"), "--dry-run").code == 0
    assert not keyring.exists()
    answer = lab.vllmops(*lab.words("a"), "--detach")
    assert answer.code == 0, answer
    key = keyring_file.load_keyring(keyring).require_primary()
    assert [line for line in answer.err.splitlines() if key.kid in line and str(keyring) in line]
    assert keyring.stat().st_mode & 0o777 == 0o600
    assert lab.record("a").environment[KEYRING] == str(keyring)
    # The next one takes it, and says nothing.
    answer = lab.vllmops(*lab.words("b"), "--detach")
    assert key.kid not in answer.err
    assert keyring_file.load_keyring(keyring).keys == (key,)
    assert lab.vllmops("restart", "a", "--force").code == 0
    assert lab.record("a").environment[KEYRING] == str(keyring)
    assert keyring_file.load_keyring(keyring).keys == (key,)


@pytest.mark.parametrize(
    ("words", "env", "place"),
    [
        (("--keyring", "none"), {}, "none"),
        ((), {"VLLMOPS_KEYRING": "none"}, "none"),
        pytest.param(("--env", "VLLMOPS_KEYRING=none"), {}, "none", marks=long),
        (("--keyring", "none"), {"VLLM_RESPONSES_STATE_SIGNING_KEY": "ab" * 32}, "none"),
        ((), {"VLLM_RESPONSES_STATE_SIGNING_KEY": "ab" * 32}, None),
    ],
)
def test_no_keyring_is_made_where_none_is_wanted(
    lab: Any, keyring: Path, words: tuple[str, ...], env: dict[str, str], place: str | None
) -> None:
    answer = lab.vllmops(*lab.words("a", *words), "--detach", "--json", env=env)
    assert answer.code == 0, answer
    assert lab.record("a").environment.get(KEYRING) == place
    assert not keyring.exists()


def test_a_keyring_that_is_lost_is_not_replaced(lab: Any, keyring: Path) -> None:
    """What clients carry would be lost with it."""
    assert lab.vllmops("keys", "add").code == 0
    keyring.unlink()
    answer = lab.vllmops(*lab.words("a"), "--detach", "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.no-ring")
    assert not keyring.exists()
    answer = lab.vllmops(*lab.words("a", "--keyring", str(lab.home / "no.json")), "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.no-ring")


def test_a_keyring_that_cannot_be_looked_for(lab: Any, keyring: Path) -> None:
    place = lab.home / ("x" * 300)
    answer = lab.vllmops(*lab.words("a", "--keyring", str(place)), "--dry-run", "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.unreadable")


def test_two_at_once_make_one_keyring(lab: Any, keyring: Path) -> None:
    environment = {KEYRING: str(keyring)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: create_default_keyring(environment, quiet=True), range(8)))
    assert len(keyring_file.load_keyring(keyring).keys) == 1


def test_a_store_of_a_newer_version(lab: Any, tmp_path: Path) -> None:
    database = tmp_path / "responses.db"
    url = f"sqlite:///{database}"
    asyncio.run(make(url))
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("UPDATE vllmops_meta SET value = 99 WHERE key = 'schema'")
    answer = lab.vllmops(*lab.words("a", "--store", url))
    assert answer.code == 1
    assert "schema 99" in answer.err
    assert "install the newest vllmops" in answer.err


def test_a_store_that_is_away_is_told_and_the_server_starts(lab: Any) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    answer = lab.vllmops(*lab.words("a", "--detach", "--store", url))
    assert answer.code == 0
    assert "warning: the store is unavailable" in answer.err


async def make(url: str) -> None:
    async with ResponseStore(make_backend(url)):
        pass


def test_a_dry_run_needs_no_vllm(vllmops: Any, model: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert vllmops("serve", str(model), "--dry-run").code == 0


def test_a_port_behind_the_dashes_is_the_port(lab: Any) -> None:
    port = free_port()
    words = lab.words("a", "--detach", "--json", "--", "--port", str(port))
    answer = lab.vllmops(*words)
    assert answer.data["url"] == f"http://127.0.0.1:{port}"
    assert healthy(answer.data["url"])


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("M", "--demo", "text"),
        ("M", "--env", "nonsense"),
        ("M", "--env", "=x"),
        ("M", "--port", "0"),
        ("M", "--port", "65536"),
        ("M", "--port", "x"),
        ("M", "--demo", "video"),
        ("M", "--nonsense"),
        ("M", "N"),
        ("M", "--port", "8001", "--", "--port", "8002"),
        ("M", "--host", "::1", "--", "--host=::2"),
        ("M", "--name", "../a"),
    ],
)
def test_command_lines_that_are_wrong(vllmops: Any, home: Path, words: tuple[str, ...]) -> None:
    answer = vllmops("serve", "--json", *words)
    assert answer.code == 2
    assert answer.error["code"] in {"usage", "name.invalid"}
    assert answer.err == ""
    plain = vllmops("serve", *words)
    assert (plain.code, plain.out) == (2, "")
    assert plain.err
    assert not (home / "instances").exists() or not list((home / "instances").glob("*/"))


# -- what it refuses ---------------------------------------------------------------------


def expect_serve_error(lab: Any, code: str, *words: str, **options: Any) -> Any:
    """The error of a `serve` that started nothing."""
    answer = lab.vllmops("serve", *words, "--detach", "--json", **options)
    assert answer.error["code"] == code, answer
    assert answer.code == 1
    assert answer.err == ""
    assert not list(lab.home.glob("instances/*/supervisor.log"))
    return answer.error


def test_vllm_not_installed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # How Python itself marks a module that can't be imported; without vLLM's absence in an
    # environment of its own, which takes a minute to make.
    monkeypatch.setitem(sys.modules, "vllm", None)
    error = expect_serve_error(lab, "vllm.missing", str(lab.model))
    assert "pip install 'vllmops-cli[" in error["hint"]


def test_models_that_cannot_be_served(lab: Any, tmp_path: Path) -> None:
    assert "/no/such" in expect_serve_error(lab, "model.missing", "/no/such")["message"]
    assert "config.json" in expect_serve_error(lab, "model.missing", str(tmp_path))["message"]


@pytest.mark.root_only
def test_a_model_that_cannot_be_read(lab: Any) -> None:
    lab.home.chmod(0o755)
    lab.model.parent.chmod(0o755)
    for path, mode in ((lab.model / "config.json", 0o600), (lab.model, 0o700)):
        lab.model.chmod(0o755)
        path.chmod(mode)
        error = expect_serve_error(lab, "model.unreadable", str(lab.model), uid=NOBODY)
        assert str(lab.model) in error["message"]
        assert f"chmod -R u+rX {lab.model}" in error["hint"]
        path.chmod(0o755)


def test_a_port_that_is_taken(lab: Any, listener: int) -> None:
    error = expect_serve_error(lab, "port.taken", str(lab.model), "--port", str(listener))
    assert f":{listener}" in error["message"]
    assert f"pid {os.getpid()}" in error["message"]
    assert "--port " in error["hint"]
    behind = ("--", "--port", str(listener))
    answer = lab.vllmops("serve", str(lab.model), "--json", *behind)
    assert answer.error["code"] == "port.taken"


def test_a_name_that_is_taken(lab: Any) -> None:
    lab.serve("a")
    answer = lab.vllmops("serve", str(lab.model), "--name", "a", "--detach", "--json")
    assert answer.error["code"] == "name.taken"
    assert lab.state("a") == "ready"
    lab.kill_supervisor("a")  # without one it still has its name
    answer = lab.vllmops("serve", str(lab.model), "--name", "a", "--detach", "--json")
    assert answer.error["code"] == "name.taken"


def test_a_state_directory_that_cannot_be_written(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = {"VLLMOPS_HOME": str(tmp_path / "file" / "home")}
    error = expect_serve_error(lab, "home.unusable", str(lab.model), env=below)
    assert str(tmp_path / "file" / "home") in error["message"]
    assert "VLLMOPS_HOME=" in error["hint"]


@pytest.mark.root_only
def test_a_state_directory_of_somebody_else(lab: Any) -> None:
    lab.home.chmod(0o755)
    lab.model.parent.chmod(0o755)
    answer = lab.vllmops("serve", str(lab.model), "--detach", "--json", uid=NOBODY)
    assert (answer.code, answer.error["code"]) == (4, "home.unsafe")
    assert f"{lab.home} belongs to root, not to nobody" in answer.error["message"]


def test_a_state_directory_too_long_for_a_socket(lab: Any, tmp_path: Path) -> None:
    deep = {"VLLMOPS_HOME": str(lab.home / ("x" * 90))}
    error = expect_serve_error(lab, "home.path-too-long", str(lab.model), env=deep)
    assert "Unix socket" in error["message"]


def test_a_full_disk(full_disk: Callable[[], None], lab: Any) -> None:
    full_disk()
    error = expect_serve_error(lab, "home.full", str(lab.model))
    assert "No space left" in error["message"]
    assert "free some space" in error["hint"]
    (lab.home / "filler").unlink()
    lab.serve("tiny")


# -- two at once ---------------------------------------------------------------------------


def test_several_at_once_get_different_names_and_ports(lab: Any) -> None:
    started = [background("serve", str(lab.model), "--detach", "--json") for _ in range(3)]
    data = [json.loads(popen.communicate(timeout=180)[0])["data"] for popen in started]
    assert {one["name"] for one in data} == {"tiny", "tiny-2", "tiny-3"}
    assert len({one["url"] for one in data}) == 3
    assert all(healthy(one["url"]) for one in data)


# -- when it fails -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("unknown-argument", "unrecognized arguments: --frobnicate"),
        pytest.param(
            "worker-assertion",
            "AssertionError: num_heads (3) is not divisible by num_kv_heads (4)",
            marks=long,
        ),
    ],
)
def test_the_true_cause_comes_first(lab: Any, log: str, cause: str) -> None:
    # An exit status of 0 is a failure too.
    words = lab.words("a", says=str(LOGS / f"{log}.log"), exits=0)
    answer = lab.vllmops(*words, "--quiet")
    assert answer.code == 1
    lines = answer.err.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("error:")]
    assert cause in lines[first]
    assert f"log: {InstanceFolder('a').server_log}" in answer.err
    assert "hint: " in lines[-1]
    assert "Traceback" not in answer.err
    answer = lab.vllmops(*words, "--detach", "--json")
    assert (answer.code, answer.error["code"]) == (1, "serve.failed")
    assert cause in answer.error["message"]
    assert answer.data["failure"]["cause"].endswith(cause)
    assert answer.data["state"] == "failed"


def test_an_exit_that_nothing_explains(lab: Any) -> None:
    answer = lab.vllmops(*lab.words("a", exits=7), "--json")
    assert answer.code == 1
    assert "exited with status 7" in answer.error["message"]


def test_a_command_that_cannot_be_started(lab: Any) -> None:
    record = lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    folder = InstanceFolder("a")
    until(lambda: not folder.is_supervised())
    folder.save_record(
        msgspec.structs.replace(record, state="stopped", directory=f"{lab.home}/missing")
    )
    answer = lab.vllmops("restart", "a", "--json")
    assert answer.code == 1
    assert "missing: No such file" in answer.error["message"]


# -- in the foreground -----------------------------------------------------------------------


def test_ready_then_ended_from_outside(lab: Any) -> None:
    serve = lab.hold("a")
    record = lab.record("a")
    lab.kill(record.session, signal.SIGTERM)  # vLLM itself exits 0 then
    out, err = serve.communicate(timeout=60)
    assert serve.returncode == 1
    assert "stopped by a signal" in err
    assert "a is ready at" in err
    assert "(APIServer" in out
    lab.nothing_left(record)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 0, marks=long),
        pytest.param(signal.SIGHUP, -1, marks=long),
        (signal.SIGKILL, -9),
    ],
)
def test_however_it_ends_nothing_is_left(lab: Any, number: signal.Signals, code: int) -> None:
    serve = lab.hold("a")
    record = lab.record("a")
    assert not record.detached
    serve.send_signal(number)
    err = serve.communicate(timeout=60)[1]
    assert serve.returncode == code, err
    assert "Traceback" not in err
    until(lambda: lab.state("a") == "stopped")
    lab.nothing_left(record)
    until(lambda: not InstanceFolder("a").is_supervised())


def test_interrupted_while_it_starts(lab: Any) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "vllmops", *lab.words("a", "--port", port, ready_s=600)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as serve:
        until(lambda: lab.state("a") and len(lab.record("a").processes) >= 3)
        record = lab.record("a")
        serve.send_signal(signal.SIGINT)
        serve.communicate(timeout=60)
    assert serve.returncode == 130
    assert lab.state("a") == "stopped"
    lab.nothing_left(record)


def test_a_terminal_that_is_closed(lab: Any) -> None:
    ours, theirs = pty.openpty()
    port = str(free_port())
    serve = subprocess.Popen(
        [sys.executable, "-m", "vllmops", *lab.words("a", "--port", port)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - its terminal
    )
    os.close(theirs)
    until(lambda: lab.state("a") == "ready")
    record = lab.record("a")
    os.close(ours)
    until(lambda: lab.state("a") == "stopped")
    assert serve.wait(60) != 0
    lab.nothing_left(record)


def test_it_goes_on_when_its_supervisor_dies(lab: Any) -> None:
    serve = lab.hold("a")
    record = lab.record("a")
    lab.kill_supervisor("a")
    until(lambda: InstanceFolder("a").is_supervised())
    time.sleep(0.5)
    assert serve.poll() is None
    assert all(map(is_alive, record.processes))
    assert lab.state("a") == "ready"
    serve.send_signal(signal.SIGKILL)  # its successor holds on to it just as well
    until(lambda: lab.state("a") == "stopped")
    lab.nothing_left(record)


def test_next_command_ends_a_server_whose_serve_and_supervisor_died(lab: Any) -> None:
    serve = lab.hold("a")
    record = lab.record("a")
    supervisor = lab.supervisor("a")
    lab.kill(supervisor, signal.SIGSTOP)  # so that it sees nothing of the other's end
    lab.kill(serve.pid)
    lab.kill(supervisor)
    until(lambda: not InstanceFolder("a").is_supervised())
    assert any(map(is_alive, record.processes))  # nobody is left to know; the next command is
    lab.vllmops("ps")
    until(lambda: lab.state("a") in {"failed", "stopped"})
    lab.nothing_left(record)


def test_json_in_the_foreground_is_one_document_at_the_end(lab: Any) -> None:
    serve = lab.hold("a", "--json")
    serve.send_signal(signal.SIGTERM)
    out, err = serve.communicate(timeout=60)
    assert json.loads(out)["data"]["state"] == "stopped"
    assert err == ""
