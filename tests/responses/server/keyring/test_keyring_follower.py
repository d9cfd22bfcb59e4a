"""The keys of a process that serves HTTP: taken, followed, kept, and told without secrets."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllmops.collect.agents.agent_client import open_agent
from vllmops.model import process_identity
from vllmops.model.environment import SIGNING_KEY
from vllmops.model.keys import ProcessKeys
from vllmops_responses.keys import keyring_file
from vllmops_responses.keys.keyring import Key, KeyStatus, generate_secret

from ....support.waiting import until

Spawn = Callable[..., Any]
TEXT = "ab" * 32
LOOK_S = 1.0  # for a change of the file to be in use two seconds later


def keys(child: Any, *, reload: bool = False) -> ProcessKeys:
    return open_agent(child.process).fetch_keys(reload=reload)


def fetch_key_statuses(child: Any) -> dict[str, str]:
    return {key.kid: key.status for key in keys(child).keys}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring"


def grow(path: Path, status: KeyStatus = KeyStatus.NEXT) -> Key:
    key = Key.from_secret(generate_secret(), status, 1)
    keyring_file.change_keyring(path, lambda ring: ring.add(key), create=True)
    return key


def test_it_tells_what_it_holds_and_no_secret(spawn: Spawn, path: Path) -> None:
    first, second = grow(path, KeyStatus.PRIMARY), grow(path)
    began = time.time()
    child = spawn(VLLMOPS_KEYRING=str(path))
    shown = keys(child)
    assert (shown.keyring, shown.source, shown.problem) == (str(path), "file", "")
    assert (shown.pid, shown.role) == (child.process.pid, "api")
    assert shown.loaded_at == pytest.approx(began, abs=600)
    assert [(key.kid, key.status, key.fingerprint, key.created_at) for key in shown.keys] == [
        (first.kid, "primary", first.fingerprint, 1),
        (second.kid, "next", second.fingerprint, 1),
    ]
    assert (
        child.run(
            "from vllmops_responses.server.keyring import keyring_follower as keys; out = "
            "len(keys.get_keyring().keys)"
        )
        == "2"
    )
    spelt = [key.secret.reveal().hex() for key in (first, second)]
    child.run("import json; from vllmops.agent.transport.unix_socket import GETS; import msgspec")
    answer = child.run("out = msgspec.json.encode(GETS['/keys?reload=1']()).decode()")
    log = child.end()
    assert first.kid in log
    assert not [item for item in spelt if item in answer + log]


def test_a_change_is_taken_within_two_seconds(spawn: Spawn, path: Path) -> None:
    first = grow(path, KeyStatus.PRIMARY)
    children = [spawn(VLLMOPS_KEYRING=str(path)) for _ in range(2)]
    for child in children:
        # A look takes nearly no time, but on a busy machine its turn may come late.
        assert (
            float(
                child.run(
                    "from vllmops_responses.server.keyring import keyring_follower as keys; out = "
                    "keys.CHECK_S"
                )
            )
            <= LOOK_S
        )
    before = [keys(child).loaded_at for child in children]
    second = grow(path)
    for child in children:
        until(lambda child=child: second.kid in fetch_key_statuses(child))  # type: ignore[misc]
    keyring_file.change_keyring(path, lambda ring: ring.promote(second.kid, time.time(), 3600))
    for child in children:
        until(lambda child=child: fetch_key_statuses(child)[second.kid] == "primary")  # type: ignore[misc]
        assert fetch_key_statuses(child)[first.kid] == "verify-only"
    assert all(keys(child).loaded_at != item for child, item in zip(children, before, strict=True))


def test_it_is_taken_at_once_when_asked_for(spawn: Spawn, path: Path) -> None:
    grow(path, KeyStatus.PRIMARY)
    child = spawn(VLLMOPS_KEYRING=str(path))
    child.run(
        "from vllmops_responses.server.keyring import keyring_follower as keys; "
        "keys._holder.read_fingerprint = lambda: "
        "keys._holder.last_fingerprint"
    )
    second = grow(path)
    assert second.kid not in fetch_key_statuses(child)
    assert second.kid in {key.kid for key in keys(child, reload=True).keys}
    assert second.kid in fetch_key_statuses(child)


def check_keys_often(child: Any) -> Any:
    """A process that looks often, too, for tests of many looks."""
    child.run(
        "from vllmops_responses.server.keyring import keyring_follower as keys; "
        "keys.CHECK_S = 0.02; "
        "keys._holder.follow_file()"
    )
    return child


@pytest.mark.root_only
def test_broken_keyring_file_is_reported_and_old_keys_stay(spawn: Spawn, path: Path) -> None:
    before = {grow(path, KeyStatus.PRIMARY).kid: "primary"}
    child = check_keys_often(spawn(VLLMOPS_KEYRING=str(path)))
    wrongs: list[Callable[[bytes], object]] = [
        lambda content: path.write_bytes(content[:100]),
        lambda _: path.write_bytes(b""),
        lambda content: path.write_bytes(content.replace(b'"version": 1', b'"version": 9')),
        lambda _: path.chmod(0o644),
        lambda _: path.unlink(),
        lambda _: os.chown(path, 65534, 65534),
    ]
    for wrong in wrongs:
        wrong(path.read_bytes())
        until(lambda: keys(child).problem)
        shown = keys(child)
        assert str(path) in shown.problem
        assert "hint: " in shown.problem
        assert fetch_key_statuses(child) == before
        time.sleep(0.1)
        # Once it is in order again, all is.
        path.unlink(missing_ok=True)
        keyring_file.locate_copy(path).replace(path)
        before[grow(path).kid] = "next"
        until(lambda: fetch_key_statuses(child) == before)
        assert keys(child).problem == ""
    log = child.end()
    # More where it was looked at while a file was on its way.
    assert log.count("the keys loaded before stay in use") >= len(wrongs), log


def test_a_file_that_is_broken_from_the_start(spawn: Spawn, path: Path) -> None:
    path.write_text("{")
    path.chmod(0o600)
    child = spawn(VLLMOPS_KEYRING=str(path))
    assert "damaged" in keys(child).problem
    assert fetch_key_statuses(child) == {}
    assert (
        child.run(
            "from vllmops_responses.server.keyring import keyring_follower as keys; out = "
            "keys.get_keyring()"
        )
        == "None"
    )
    path.unlink()
    first = grow(path, KeyStatus.PRIMARY)
    until(lambda: fetch_key_statuses(child) == {first.kid: "primary"})


def test_a_file_that_comes_later(spawn: Spawn, path: Path) -> None:
    child = spawn(VLLMOPS_KEYRING=str(path))
    shown = keys(child)
    assert (shown.keys, shown.problem, shown.loaded_at) == ((), "", None)
    first = grow(path, KeyStatus.PRIMARY)
    until(lambda: fetch_key_statuses(child) == {first.kid: "primary"})


def test_the_default_place(spawn: Spawn, tmp_path: Path) -> None:
    without = spawn()
    assert keys(without).source == "none"
    assert "vllmops-keys" not in without.run(THREADS)
    home = tmp_path / "home"
    first = grow(home / "keyring.json", KeyStatus.PRIMARY)
    child = spawn()
    assert fetch_key_statuses(child) == {first.kid: "primary"}
    assert keys(child).keyring == str(home / "keyring.json")


def test_no_keys_are_wanted(spawn: Spawn, tmp_path: Path) -> None:
    spawn().end()  # it makes its home
    grow(tmp_path / "home" / "keyring.json", KeyStatus.PRIMARY)
    child = spawn(VLLMOPS_KEYRING="none", VLLM_RESPONSES_STATE_SIGNING_KEY=TEXT)
    assert keys(child).source == "none"
    assert "vllmops-keys" not in child.run(THREADS)
    assert child.run("import os; out = 'VLLM_RESPONSES_STATE_SIGNING_KEY' in os.environ") == "False"


THREADS = "import threading; out = [each.name for each in threading.enumerate()]"


def test_a_key_of_the_environment(spawn: Spawn) -> None:
    child = spawn(VLLM_RESPONSES_STATE_SIGNING_KEY=TEXT)
    shown = keys(child)
    assert (shown.source, shown.keyring, shown.problem) == ("environment", None, "")
    assert list(fetch_key_statuses(child).values()) == ["primary"]
    assert "vllmops-keys" not in child.run(THREADS)


@pytest.mark.parametrize("text", ["nonsense", "ab" * 31])
def test_a_key_of_the_environment_that_is_none(spawn: Spawn, text: str) -> None:
    """The server starts, and has no keys."""
    child = spawn(VLLM_RESPONSES_STATE_SIGNING_KEY=text)
    shown = keys(child)
    assert "VLLM_RESPONSES_STATE_SIGNING_KEY" in shown.problem
    assert "vllmops keygen" in shown.problem
    assert shown.keys == ()
    assert text not in child.end()


PARENT = """
import multiprocessing, os, subprocess
NAME = "VLLM_RESPONSES_STATE_SIGNING_KEY"
def tell(queue):
    queue.put(os.environ.get(NAME))
if __name__ == "__main__":
    from vllmops.agent import register
    register()
    spawning = multiprocessing.get_context("spawn")
    queue = spawning.Queue()
    for name in "EngineCore VllmWorker-0 ApiServer_1 APIServer_DPRank_0 EngineCore_DP1".split():
        process = spawning.Process(target=tell, name=name, args=(queue,))
        process.start()
        print(name, queue.get(timeout=60))
        process.join()
    print("env", NAME in subprocess.run(["env"], capture_output=True, text=True).stdout)
"""


def test_children_that_serve_no_http_do_not_inherit_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "VLLMOPS_HOME": str(tmp_path / "h"), SIGNING_KEY: TEXT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "EngineCore None",
        "VllmWorker-0 None",
        f"ApiServer_1 {TEXT}",
        f"APIServer_DPRank_0 {TEXT}",
        "EngineCore_DP1 None",
        "env False",
    ], done.stderr


def test_an_engine_holds_none(spawn: Spawn, path: Path) -> None:
    grow(path, KeyStatus.PRIMARY)
    # What multiprocessing does before vLLM's engine loads plug-ins.
    code = (
        "import multiprocessing, os; multiprocessing.current_process().name = 'EngineCore'\n"
        "from vllmops_responses.server.keyring import keyring_follower as keys\n"
        "keys._holder = None; os.environ['{0}'] = '{1}'\n"
        "keys.start_key_holder(); out = (keys.observe_keys().source, os.environ.get('{0}'))"
    )
    child = spawn(VLLMOPS_KEYRING=str(path))
    assert child.run(code.format(SIGNING_KEY, TEXT)) == "('none', None)"


def test_a_fork_holds_none(spawn: Spawn, path: Path) -> None:
    grow(path, KeyStatus.PRIMARY)
    child = spawn(VLLMOPS_KEYRING=str(path))
    code = (
        "import os; read, write = os.pipe()\n"
        "from vllmops_responses.server.keyring import keyring_follower as keys\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.write(write, repr(keys.get_keyring()).encode()); os._exit(0)\n"
        "os.waitpid(pid, 0); out = os.read(read, 1000).decode()"
    )
    assert child.run(code) == "None"
    assert child.run("out = keys.get_keyring() is not None") == "True"


def test_it_never_waits_for_a_file_that_hangs(spawn: Spawn, path: Path) -> None:
    grow(path, KeyStatus.PRIMARY)
    child = check_keys_often(spawn(VLLMOPS_KEYRING=str(path)))
    # A file system that hangs can't be had here: a stat that does is put in its place.
    child.run(
        "import threading, time; "
        "from vllmops_responses.server.keyring import keyring_follower as keys; "
        "hangs = threading.Event()\n"
        "keys._holder.read_fingerprint = lambda: hangs.set() or time.sleep(1000)"
    )
    assert child.run("out = hangs.wait(60)") == "True"
    child.run("for _ in range(1000): keys.get_keyring().primary")
    assert list(fetch_key_statuses(child).values()) == ["primary"]


# -- SIGHUP ------------------------------------------------------------------------------------

# As where a network's file system tells old news of files: a look sees nothing new.
LOOP = """
import asyncio
from vllmops_responses.server.keyring import keyring_follower as keys
from vllmops.agent import register
from vllmops.model import process_identity as identity
keys.KeyHolder.read_fingerprint = lambda self: (1,)
keys.CHECK_S = 0.02
{loop}
async def main():
    register()
    print("up", flush=True)
    while True:
        await asyncio.sleep(0.01)
asyncio.run(main())
"""


def start_loop_process(
    path: Path, tmp_path: Path, loop: str = "", **options: Any
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "VLLMOPS_HOME": str(tmp_path / "h"),
        "VLLMOPS_KEYRING": str(path),
    }
    options.setdefault("stdin", subprocess.DEVNULL)
    popen = subprocess.Popen(
        [sys.executable, "-c", LOOP.format(loop=loop)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    assert popen.stdout is not None
    assert popen.stdout.readline() == "up\n"
    return popen


def make_child(popen: subprocess.Popen[str]) -> Any:
    from vllmops.collect.machine.processes import Process
    from vllmops.model.roles import Role

    class Looping:
        process = Process(
            Role.API, popen.pid, process_identity.read_identity(popen.pid).start_ticks
        )

    return Looping


@pytest.mark.parametrize("loop", ["", "import uvloop; uvloop.install()"])
def test_a_hangup_reloads_and_ends_nothing(path: Path, tmp_path: Path, loop: str) -> None:
    grow(path, KeyStatus.PRIMARY)
    popen = start_loop_process(path, tmp_path, loop)
    try:
        child = make_child(popen)
        second = grow(path)
        time.sleep(0.1)
        assert second.kid not in fetch_key_statuses(child)
        for _ in range(20):
            os.kill(popen.pid, signal.SIGHUP)
        until(lambda: second.kid in fetch_key_statuses(child))
        assert popen.poll() is None
    finally:
        popen.kill()
        popen.communicate()


def test_a_hangup_of_a_terminal_ends_it_as_ever(path: Path, tmp_path: Path) -> None:
    grow(path, KeyStatus.PRIMARY)
    ours, theirs = pty.openpty()

    def control() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    popen = start_loop_process(path, tmp_path, stdin=theirs, preexec_fn=control)
    os.close(theirs)
    os.close(ours)  # as a terminal window that is closed
    assert popen.wait(60) == -signal.SIGHUP
    popen.communicate()


def test_a_hangup_that_is_somebody_elses_stays_so(spawn: Spawn, path: Path) -> None:
    grow(path, KeyStatus.PRIMARY)
    child = spawn(VLLMOPS_KEYRING=str(path))
    code = (
        "import signal; from vllmops_responses.server.keyring import keyring_follower as keys\n"
        "def own(*_): pass\n"
        "signal.signal(signal.SIGHUP, {0}); keys.reload_on_hangup()\n"
        "out = signal.getsignal(signal.SIGHUP) is {0}"
    )
    assert child.run(code.format("own")) == "True"
    assert child.run(code.format("signal.SIG_IGN")) == "False"  # as below a supervisor
