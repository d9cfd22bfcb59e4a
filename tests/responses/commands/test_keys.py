"""``vllmops keygen`` and ``vllmops keys``, on real files and real processes that hold keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllmops.model.environment import CARRIER_TTL, KEYRING, SIGNING_KEY
from vllmops.model.roles import Role
from vllmops.servers.record import InstanceFolder, InstanceState
from vllmops_responses.keys import keyring_file
from vllmops_responses.keys.carrier import seal_history, sign_history, verify_carrier
from vllmops_responses.keys.keyring import Key, KeyRing, KeyStatus, generate_secret

from ...support.children import start_child
from ...support.extent import long
from ...support.waiting import until
from ..keys.test_keyring_file import killed_at

TEXT = "ab" * 32
NAME = SIGNING_KEY
Spawn = Callable[..., Any]


@pytest.fixture
def path(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (KEYRING, NAME):
        monkeypatch.delenv(name, raising=False)
    return home / "keyring.json"


def statuses(path: Path) -> list[str]:
    return [key.status.value for key in keyring_file.load_keyring(path).keys]


def secrets(ring: KeyRing) -> list[str]:
    return [key.secret.reveal().hex() for key in ring.keys]


# -- keygen ------------------------------------------------------------------------------------


def test_keygen(vllmops: Any, path: Path) -> None:
    answer = vllmops("keygen")
    assert (answer.code, len(answer.out)) == (0, 65)
    assert bytes.fromhex(answer.out)
    assert "keep it secret" in answer.err
    assert answer.out != vllmops("keygen").out
    assert vllmops("keygen", "--format", "env").out.startswith(f"{NAME}=")
    manifest = vllmops("keygen", "--format", "k8s-secret").out.splitlines()
    assert manifest[:2] == ["apiVersion: v1", "kind: Secret"]
    assert len(json.loads(manifest[-1].removeprefix(f"  {NAME}: "))) == 64
    ring = keyring_file.decode_keyring(vllmops("keygen", "--format", "json").out.encode(), path)
    assert ring.primary
    data = vllmops("keygen", "--json").data
    assert (len(data["key"]), len(data["kid"]), data["path"]) == (64, 8, None)


def test_keygen_to_a_file(vllmops: Any, home: Path, path: Path) -> None:
    out = home / "key"
    answer = vllmops("keygen", "--out", str(out))
    assert (answer.code, answer.out) == (0, "")
    first = out.read_text()
    assert first.strip() not in answer.err
    assert out.stat().st_mode & 0o777 == 0o600
    answer = vllmops("keygen", "--out", str(out), "--json")
    assert (answer.code, answer.error["code"]) == (2, "keys.exists")
    assert out.read_text() == first
    assert vllmops("keygen", "--out", str(out), "--force", "--json").data["key"] is None
    assert out.read_text() != first
    assert vllmops("keygen", "--out", "/no/where", "--json").error["code"] == "keys.not-written"


# -- key by key --------------------------------------------------------------------------------


def test_a_key_through_its_life(vllmops: Any, path: Path) -> None:
    answer = vllmops("keys", "list", "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.no-ring")
    first = vllmops("keys", "add", "--json").data
    assert (first["keyring"], first["keys"][0]["status"]) == (str(path), "primary")
    second = vllmops("keys", "add", "--json").data["kid"]
    assert statuses(path) == ["primary", "next"]
    answer = vllmops("keys", "promote", second, "--overlap", "1h", "--json")
    old, new = answer.data["keys"]
    assert (old["status"], new["status"]) == ("verify-only", "primary")
    assert old["not_after"] == pytest.approx(time.time() + 3600 + 60, abs=600)
    answer = vllmops("keys", "retire", first["kid"], "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.in-use")
    assert vllmops("keys", "retire", second, "--json").error["code"] == "keys.primary"
    assert vllmops("keys", "retire", first["kid"], "--force").code == 0
    listed = vllmops("keys", "list", "--json").data
    assert set(listed["keys"][0]) == {"kid", "status", "created_at", "not_after", "fingerprint"}
    assert [key["kid"] for key in listed["keys"]] == [second]


def test_revoking_asks_and_says_what_breaks(vllmops: Any, path: Path) -> None:
    kid = vllmops("keys", "add", "--json").data["kid"]
    answer = vllmops("keys", "revoke", kid, "--json")
    assert (answer.code, answer.error["code"]) == (2, "unconfirmed")
    assert "Every client-held conversation" in answer.error["message"]
    assert answer.error["hint"] == f"vllmops keys revoke {kid} --yes"
    assert statuses(path) == ["primary"]
    answer = vllmops("keys", "revoke", kid, "--yes", "--json")
    assert statuses(path) == ["revoked", "primary"]
    assert "Every client-held conversation" in answer.data["breaks"]
    assert vllmops("keys", "revoke", "nobody", "--yes", "--json").error["code"] == "keys.unknown"


def test_import_and_export(vllmops: Any, path: Path, home: Path) -> None:
    given = home / "given"
    given.write_text(f"export {NAME}='{TEXT}'\n")
    kid = vllmops("keys", "import", str(given), "--json").data["keys"][0]["kid"]
    assert statuses(path) == ["primary"]
    # The key has the name that servers with it in their environment give it.
    listed = vllmops("keys", "list", "--json", env={NAME: TEXT}).data
    assert (listed["keyring"], listed["keys"][0]["kid"]) == (NAME, kid)
    given.write_text("cd" * 32)
    vllmops("keys", "import", str(given), "--verify-only")
    assert statuses(path) == ["primary", "verify-only"]
    answer = vllmops("keys", "export", "--json")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    out = home / "exported"
    assert vllmops("keys", "export", "--out", str(out)).code == 0
    assert out.stat().st_mode & 0o777 == 0o600
    other = str(home / "other.json")
    vllmops("keys", "import", str(out), "--keyring", other)
    assert keyring_file.load_keyring(Path(other)) == keyring_file.load_keyring(path)
    before = keyring_file.load_keyring(Path(other))
    keyring_file.change_keyring(
        path, lambda ring: ring.add(Key.from_secret(generate_secret(), KeyStatus.NEXT))
    )
    words = ("keys", "import", str(path), "--keyring", other, "--verify-only", "--json")
    assert vllmops(*words).error["code"] == "usage"
    assert keyring_file.load_keyring(Path(other)) == before
    assert vllmops("keys", "export", "--format", "env", "--reveal").out == f"{NAME}={TEXT}\n"
    assert vllmops("keys", "export", kid, "--format", "hex", "--reveal").out == f"{TEXT}\n"
    given.write_text("nonsense")
    assert vllmops("keys", "import", str(given), "--json").error["code"] == "keys.not-hex"


def test_no_command_shows_a_secret_unasked(vllmops: Any, path: Path, home: Path) -> None:
    vllmops("keys", "add")
    vllmops("keys", "rotate")
    ring = keyring_file.load_keyring(path)
    carrier = seal_history(["x"], ring, model="m", owner="o")
    verify_only, primary = (key.kid for key in ring.keys)
    for words in (
        ("list",),
        ("status",),
        ("rotate", "--dry-run"),
        ("verify", carrier, "--reveal"),
        ("promote", verify_only),
        ("promote", primary),
        ("retire", verify_only),
        ("export", "--out", str(home / "e")),
        ("import", str(home / "e")),
        ("revoke", verify_only, "--yes"),
    ):
        for flags in ((), ("--json",)):
            answer = vllmops("keys", *words, *flags, env={"VLLMOPS_DEBUG": "1"})
            assert not [item for item in secrets(ring) if item in answer.out + answer.err], words


@pytest.mark.parametrize("text", ["3x", "", "-1d", "1e9d", "d", "0", f"{9**40}d"])
def test_times_that_are_none(vllmops: Any, path: Path, text: str) -> None:
    assert vllmops("keys", "rotate", f"--overlap={text}", "--json").error["code"] == "usage"
    assert not path.exists()


@pytest.mark.root_only
def test_without_a_home_a_named_keyring_works(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    ring = Path(tempfile.mkdtemp(prefix="vo-ring-", dir="/tmp"))
    ring.chmod(0o777)
    user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "env", "-i"]
    words = [*user, sys.executable, "-m", "vllmops", "keys"]
    try:
        done = subprocess.run(
            [*words, "add", "--keyring", str(ring / "r")], cwd="/", capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        lost = subprocess.run([*words, "list"], cwd="/", capture_output=True, check=False)
        assert b"VLLMOPS_HOME" in lost.stderr
    finally:
        for item in ring.iterdir():
            item.unlink()
        ring.rmdir()


# -- carriers ----------------------------------------------------------------------------------


def test_verify(vllmops: Any, path: Path) -> None:
    kid = vllmops("keys", "add", "--json").data["kid"]
    ring = keyring_file.load_keyring(path)
    good = seal_history(["needle"], ring, model="m", owner="hash")
    data = vllmops("keys", "verify", good, "--json").data
    assert (data["valid"], data["kid"], data["model"], data["owner"]) == (True, kid, "m", "hash")
    assert data["issued_at"] == pytest.approx(time.time(), abs=600)
    shown = vllmops("keys", "verify", good)
    assert (shown.code, "needle" in shown.out, kid in shown.out) == (0, False, True)
    assert "needle" in vllmops("keys", "verify", good, "--reveal").out
    assert vllmops("keys", "verify", sign_history(["x"], ring), "--json").data["format"] == 1
    half = vllmops("keys", "verify", sign_history(["\ud83d \N{SNOWMAN}"], ring), "--reveal")
    assert (half.code, "\N{SNOWMAN}" in half.out) == (0, True)
    old = seal_history([], ring, model="m", owner="", now=time.time() - 10**8)
    for text, case in ((good[:-1], "tampered"), ("gAAAA", "foreign"), (old, "expired")):
        answer = vllmops("keys", "verify", text, "--json")
        assert (answer.code, answer.data["valid"], answer.data["case"]) == (1, False, case)
    vllmops("keys", "revoke", kid, "--yes")
    answer = vllmops("keys", "verify", good, "--json")
    assert (answer.code, answer.data["case"], answer.data["kid"]) == (1, "revoked-key", kid)


# -- rotation ----------------------------------------------------------------------------------


def test_rotate_without_servers(vllmops: Any, path: Path) -> None:
    steps = vllmops("keys", "rotate", "--dry-run", "--json").data["steps"]
    assert steps[0] == "add a fresh key as next"
    assert not path.exists()
    for expected in (["primary"], ["verify-only", "primary"]):
        assert vllmops("keys", "rotate", "--overlap", "1s", "--json").code == 0
        assert statuses(path) == expected
    assert vllmops("keys", "status", "--json").data["stage"] == "overlap"


def server(spawn: Spawn, home: Path, path: Path) -> Any:
    return spawn("VLLM::APIServer_0", Role.API, home=home, VLLMOPS_KEYRING=str(path))


def test_rotate_replaces_a_next_key_whose_time_is_over(vllmops: Any, path: Path) -> None:
    old, late = (
        Key.from_secret(generate_secret(), KeyStatus.PRIMARY, 1),
        Key.from_secret(generate_secret(), KeyStatus.NEXT, 1),
    )
    late = replace(late, not_after=2)
    keyring_file.change_keyring(path, lambda _: KeyRing(keys=(old, late)), create=True)
    steps = " ".join(vllmops("keys", "rotate", "--dry-run", "--json").data["steps"])
    assert f"remove {late.kid}" in steps
    assert "fresh" in steps
    answer = vllmops("keys", "rotate", "--json")
    assert (answer.code, answer.data["kid"] in {old.kid, late.kid}) == (0, False)
    assert [key["kid"] for key in answer.data["keys"]] == [old.kid, answer.data["kid"]]


def test_rotate_waits_for_every_server_and_refuses_none(
    vllmops: Any, spawn: Spawn, home: Path, path: Path, patience: pytest.MonkeyPatch
) -> None:
    patience.undo()
    vllmops("keys", "add")
    servers = [server(spawn, home, path) for _ in range(2)]
    before = seal_history(["x"], keyring_file.load_keyring(path), model="m", owner="o")
    stopped = servers[1].process.pid
    os.kill(stopped, signal.SIGSTOP)
    answer = vllmops("keys", "rotate", "--timeout", "1", "--json")
    assert (answer.code, answer.error["code"]) == (3, "keys.not-loaded")
    assert str(stopped) in answer.error["message"]
    assert statuses(path) == ["primary", "next"]
    kid = keyring_file.load_keyring(path).keys[1].kid
    answer = vllmops("keys", "promote", kid, "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.not-loaded")
    silent = vllmops("keys", "status", "--json").data["silent"]
    assert [item["pid"] for item in silent] == [stopped]
    os.kill(stopped, signal.SIGCONT)
    data = vllmops("keys", "rotate", "--json").data
    # It went on with the key that was there.
    assert (data["kid"], statuses(path)) == (kid, ["verify-only", "primary"])
    assert (len(data["loaded"]), data["not_loaded"]) == (2, [])
    status = vllmops("keys", "status", "--json").data
    assert [item["up_to_date"] for item in status["servers"]] == [True, True]
    assert status["stage"] == "overlap"
    after = seal_history(["x"], keyring_file.load_keyring(path), model="m", owner="o")
    for item in servers:
        for text in (before, after):
            code = (
                "from vllmops_responses.server.keyring import keyring_follower as keys; from "
                "vllmops_responses.keys.carrier import unseal_carrier\n"
                f"out = unseal_carrier({text!r}, keys.get_keyring(), model='m', owner='o').history"
            )
            assert item.run(code) == "['x']"


@pytest.mark.root_only
@pytest.mark.parametrize("mounted", ["folder", "file"])
def test_rotate_waits_for_a_server_in_a_container(
    vllmops: Any, home: Path, path: Path, mounted: str
) -> None:
    """It has the keyring under another name; of a file alone it does not see the new one."""
    vllmops("keys", "add")
    place = "mount -t tmpfs none /mnt && "
    if mounted == "folder":
        place += f"mkdir /mnt/keys && mount --bind {path.parent} /mnt/keys"
    else:
        place += f"mkdir -m 700 /mnt/keys && touch /mnt/keys/{path.name}"
        place += f" && mount --bind {path} /mnt/keys/{path.name}"
    inside = ("unshare", "--mount", "sh", "-c", f'{place} && exec "$@"', "sh")
    ring = f"/mnt/keys/{path.name}"
    child = start_child("VLLM::APIServer_0", Role.API, home, inside, VLLMOPS_KEYRING=ring)
    try:
        timeout = "60" if mounted == "folder" else "2"
        answer = vllmops("keys", "rotate", "--timeout", timeout, "--json")
        if mounted == "folder":
            assert (answer.code, len(answer.data["loaded"])) == (0, 1), answer
        else:
            assert (answer.code, answer.error["code"]) == (3, "keys.not-loaded"), answer
            assert str(child.process.pid) in answer.error["message"]
    finally:
        child.kill()


# In a process that holds keys: seals all the time, and opens what all of them have sealed.
CONVERSING = """
import glob, os, threading, time
from vllmops_responses.server.keyring import keyring_follower as keys
from vllmops_responses.keys.carrier import seal_history, unseal_carrier
turns, refused, folder, own = [0], [], {folder!r}, f"{{os.getpid()}}"
def converse():
    while not os.path.exists(folder + "/stop"):
        text = seal_history([own], keys.get_keyring(), model="m", owner="o")
        with open(f"{{folder}}/{{own}}.new", "w") as file:
            file.write(text)
        os.replace(f"{{folder}}/{{own}}.new", f"{{folder}}/{{own}}.carrier")
        for path in glob.glob(folder + "/*.carrier"):
            with open(path) as file:
                text = file.read()
            try:
                unseal_carrier(text, keys.get_keyring(), model="m", owner="o")
                turns[0] += 1
            except Exception as error:
                refused.append(repr(error))
        time.sleep(0.002)
thread = threading.Thread(target=converse)
thread.start()
"""


def test_no_turn_is_refused_while_keys_are_rotated(
    vllmops: Any, spawn: Spawn, home: Path, path: Path, tmp_path: Path
) -> None:
    vllmops("keys", "add")
    servers = [server(spawn, home, path) for _ in range(3)]
    for item in servers:
        item.run(CONVERSING.format(folder=str(tmp_path)))
    for _ in range(3):
        assert vllmops("keys", "rotate", "--json").code == 0
    for item in servers:
        until(lambda item=item: int(item.run("out = turns[0]")) > 100)  # type: ignore[misc]
    (tmp_path / "stop").touch()
    for item in servers:
        assert item.run("thread.join(); out = refused") == "[]"
    assert statuses(path) == ["verify-only"] * 3 + ["primary"]


DAY_S = 24 * 3600


def test_the_overlap_is_as_long_as_carriers_live(lab: Any, path: Path) -> None:
    lab.vllmops("keys", "add")

    def plan(*words: str) -> Any:
        data = lab.vllmops("keys", "rotate", "--dry-run", "--json", *words).data
        return data["overlap_s"], data["steps"][-1].partition("Z: ")[2]

    assert plan() == (30 * DAY_S, "carriers live for 30 days")
    wide = lab.serve("wide", "--carrier-ttl", "60d")
    other = {**wide.environment, KEYRING: str(lab.home / "other"), CARRIER_TTL: "9e9"}
    for name, environment in (
        ("other", other),
        ("narrow", {**wide.environment, CARRIER_TTL: "60"}),
        ("broken", {**wide.environment, CARRIER_TTL: "x"}),
    ):
        InstanceFolder(name).path.mkdir()
        over = replace(wide, name=name, state=InstanceState.STOPPED, processes=(), session=None)
        InstanceFolder(name).save_record(replace(over, environment=environment))
    assert plan() == (60 * DAY_S, "carriers of wide live for 60 days")
    assert plan("--overlap", "90d") == (90 * DAY_S, "--overlap")
    assert plan("--overlap", "1h") == (3600, "--overlap, but carriers of wide live for 60 days")
    # What it has sealed does not end with it.
    assert lab.vllmops("stop", "wide", "--force").code == 0
    for words in (("rotate",), ("promote", keyring_file.load_keyring(path).keys[0].kid)):
        assert lab.vllmops("keys", *words).code == 0
        (old,) = keyring_file.load_keyring(path).select_keys(KeyStatus.VERIFY_ONLY)
        assert old.not_after == pytest.approx(time.time() + 60 * DAY_S + 60, abs=600)


def test_names_of_keys_are_completed(path: Path, vllmops: Any) -> None:
    from vllmops_responses.commands.keys.keyring_options import complete_kid

    assert complete_kid("") == []
    kid = vllmops("keys", "add", "--json").data["kid"]
    assert complete_kid(kid[:2]) == [kid]
    path.write_text("{")
    assert complete_kid("") == []


def test_servers_with_another_ring_are_not_waited_for(
    vllmops: Any, spawn: Spawn, home: Path, path: Path
) -> None:
    vllmops("keys", "add", "--keyring", str(home / "other"))
    server(spawn, home, home / "other")
    assert vllmops("keys", "rotate", "--timeout", "60", "--json").data["loaded"] == []


def test_status_of_a_broken_ring_still_tells_who_holds_what(
    vllmops: Any, spawn: Spawn, home: Path, path: Path
) -> None:
    kid = vllmops("keys", "add", "--json").data["kid"]
    server(spawn, home, path)
    path.write_text("{")
    answer = vllmops("keys", "status", "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.broken")
    assert [key["kid"] for key in answer.data["servers"][0]["keys"]] == [kid]


@long
def test_two_rotations_at_once(vllmops: Any, path: Path) -> None:
    vllmops("keys", "add")
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "vllmops", "keys", "rotate", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for item in both:
        _, err = item.communicate(timeout=60)
        assert (item.returncode, err) == (0, b"")
    # One and the same, or one after the other; never two primaries, never a key that is lost.
    found = statuses(path)
    assert found.count("primary") == 1
    assert found.count("verify-only") in {1, 2}
    assert len(found) == 1 + found.count("verify-only")


def test_a_rotation_killed_at_each_step_verifies_what_it_did_and_goes_on(
    vllmops: Any, path: Path
) -> None:
    vllmops("keys", "add")
    kills = 0
    for name in ("replace", "fsync"):
        for number in range(1, 10):
            before = keyring_file.load_keyring(path)
            carrier = seal_history(["x"], before, model="m", owner="o")
            fault = f"{name}:{number}:{('before', 'after')[number % 2]}"
            done = vllmops("keys", "rotate", before=partial(killed_at, fault))
            ring = keyring_file.load_keyring(path)
            assert ring.primary
            assert {key.kid for key in before.keys} <= {key.kid for key in ring.keys}
            assert verify_carrier(carrier, ring).history == ["x"]
            if done.code == 0:
                break
            assert done.code == -signal.SIGKILL, done.err
            kills += 1
            assert vllmops("keys", "rotate", "--json").code == 0
            assert keyring_file.load_keyring(path).select_keys(KeyStatus.NEXT) == ()
    assert kills >= 8


# -- serve -------------------------------------------------------------------------------------


def test_serve_hands_down_where_the_keys_are(vllmops: Any, path: Path, home: Path) -> None:
    words = ("serve", "org/model", "--dry-run", "--json")
    # Also before there is one: it may come later.
    assert vllmops(*words).data["environment"][KEYRING] == str(path)
    vllmops("keys", "add")
    vllmops("keys", "add", "--keyring", str(home / "other"))
    answer = vllmops(*words, "--keyring", str(home / "other"))
    assert answer.data["environment"][KEYRING] == str(home / "other")
    alone = vllmops(*words, env={NAME: TEXT})
    assert KEYRING not in alone.data["environment"]
    assert TEXT not in alone.out


def test_serve_refuses_keys_that_are_none(vllmops: Any, path: Path, home: Path) -> None:
    words = ("serve", "org/model", "--dry-run", "--json")
    for text, code in (("x" * 64, "keys.not-hex"), ("ab" * 31, "keys.too-short")):
        answer = vllmops(*words, env={NAME: text})
        assert (answer.code, answer.error["code"]) == (1, code)
        assert text not in answer.out
    assert vllmops(*words, "--keyring", str(home / "none")).error["code"] == "keys.no-ring"
    vllmops("keys", "add")
    path.chmod(0o644)
    answer = vllmops(*words)
    assert (answer.code, answer.error["code"]) == (4, "keys.unsafe")
    answer = vllmops(*words, "--env", f"{NAME}={TEXT}")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    assert TEXT not in answer.out


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "1e308"])
def test_a_rotation_waits_for_a_time_that_is_one(vllmops: Any, path: Path, timeout: str) -> None:
    answer = vllmops("keys", "rotate", "--timeout", timeout)
    assert answer.code == 2
    assert "Traceback" not in answer.err
    assert not path.exists()


@pytest.mark.parametrize("overlap", ["nan", "inf", "-1", "1e9", "9" * 400])
def test_an_overlap_is_a_time(vllmops: Any, path: Path, overlap: str) -> None:
    vllmops("keys", "add")
    before = path.read_bytes()
    for words in (
        ("rotate",),
        ("promote", vllmops("keys", "list", "--json").data["keys"][0]["kid"]),
    ):
        assert vllmops("keys", *words, f"--overlap={overlap}").code == 2
    assert path.read_bytes() == before


def test_keys_add_and_rotate_refuse_the_keyring_none(vllmops: Any, path: Path) -> None:
    for word in ("add", "rotate"):
        answer = vllmops("keys", word, "--keyring", "none", "--json")
        assert (answer.code, answer.error["code"]) == (2, "usage")
    answer = vllmops("keys", "list", "--json", env={"VLLMOPS_KEYRING": "none"})
    assert (answer.data["keyring"], answer.data["keys"]) == ("none", [])


@pytest.mark.parametrize("words", [("add",), ("retire", "k"), ("rotate",)])
def test_no_lock_beside_what_is_no_file(vllmops: Any, home: Path, words: tuple[str, ...]) -> None:
    (home / "folder").mkdir()
    os.mkfifo(home / "fifo")
    for place in (home / "folder", home / "fifo", Path("/")):
        answer = vllmops("keys", *words, "--keyring", str(place), "--json")
        assert answer.code == 4
        assert "is not a file" in answer.error["message"]
    assert {entry.name for entry in home.iterdir()} == {"folder", "fifo"}
