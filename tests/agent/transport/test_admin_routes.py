"""The routes for admins, in a process with an app that has vLLM's order of things, and no vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from vllmops.model.admin_api import GETS, KEYS, PROCESSES, TIMEOUT
from vllmops.model.agent_socket import BODY_BYTES
from vllmops.model.agent_state import SCHEMA
from vllmops.model.environment import ADMIN_TOKEN_FILE, KEYRING, SIGNING_KEY
from vllmops.support.secret_files import MOST_BYTES
from vllmops_responses.keys import keyring_file
from vllmops_responses.keys.carrier import seal_history, unseal_carrier
from vllmops_responses.keys.keyring import Key, KeyStatus, generate_secret

from ...responses.server.keyring.test_keyring_follower import (
    check_keys_often,
    fetch_key_statuses,
    grow,
)
from ...support.fleet import TOKEN, Fleet
from ...support.waiting import until

Spawn = Callable[..., Any]
# To read the certificates for each request takes longer than all else.
CLIENT_CONTEXT = httpx.create_ssl_context(verify=False)
CLIENT = httpx.Client(verify=CLIENT_CONTEXT, timeout=60)
SERVING = """
import socket, threading, uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
app = FastAPI()
@app.middleware("http")
async def authenticate(request, call_next):
    if request.headers.get("authorization") != "Bearer user":
        return JSONResponse({"error": "Unauthorized"}, 401)
    return await call_next(request)
listening = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_config=None))
threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
out = listening.getsockname()[1]
"""


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "admin.token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def local_keyring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A keyring with a primary."""
    for name in (ADMIN_TOKEN_FILE, KEYRING, SIGNING_KEY, "VLLMOPS_TARGET"):
        monkeypatch.delenv(name, raising=False)
    grow(path := tmp_path / "here", KeyStatus.PRIMARY)
    return path


@pytest.fixture
def server_keyring(tmp_path: Path) -> Path:
    return tmp_path / "there"


def serve(spawn: Spawn, ring: Path, token: Path) -> tuple[Any, str]:
    child = spawn(**{KEYRING: str(ring), ADMIN_TOKEN_FILE: str(token)})
    return child, f"http://127.0.0.1:{child.run(SERVING)}"


def build_push_arguments(token: Path, keyring: Path, url: str) -> tuple[str, ...]:
    return "keys", "push", "-t", url, "--admin-token", str(token), "--keyring", str(keyring)


def statuses(path: Path) -> dict[str, str]:
    return {key.kid: key.status.value for key in keyring_file.load_keyring(path).keys}


def send_admin_request(
    url: str, given: str = TOKEN, content: bytes | None = None
) -> httpx.Response:
    headers = [(TIMEOUT.encode(), b"60")]  # a busy machine
    if given:
        headers.append((b"authorization", f"Bearer {given}".encode()))
    return CLIENT.request(
        "GET" if content is None else "POST", url, headers=headers, content=content
    )


def test_a_ring_is_taken_by_every_process_that_follows_the_file(
    vllmops: Any, spawn: Spawn, local_keyring: Path, server_keyring: Path, token: Path
) -> None:
    child, url = serve(spawn, server_keyring, token)
    beside = check_keys_often(spawn(**{KEYRING: str(server_keyring)}))
    words = build_push_arguments(token, local_keyring, url)
    for _ in range(3):  # a key, one that is next, and that one as the primary
        answer = vllmops(*words, "--json")
        assert answer.code == 0, answer
        assert {key["kid"]: key["status"] for key in answer.data["keys"]} == statuses(local_keyring)
        assert keyring_file.load_keyring(server_keyring) == keyring_file.load_keyring(local_keyring)
        assert server_keyring.stat().st_mode & 0o777 == 0o600
        assert fetch_key_statuses(child) == statuses(local_keyring)
        until(lambda: fetch_key_statuses(beside) == statuses(local_keyring))
        if coming := keyring_file.load_keyring(local_keyring).next_key:
            keyring_file.change_keyring(
                local_keyring, lambda ring: ring.promote(coming.kid, time.time(), 3600)
            )
        else:
            grow(local_keyring)
    answer = vllmops(*words)
    assert (
        f"seals with {keyring_file.load_keyring(local_keyring).require_primary().kid}" in answer.out
    )
    secrets = [key.secret.reveal().hex() for key in keyring_file.load_keyring(local_keyring).keys]
    log = child.end()
    assert "POST /v1/vllmops/keys" in log
    assert not [item for item in (TOKEN, *secrets) if item in log + answer.out + answer.err]


def test_carriers_sealed_with_the_servers_old_key_still_open(
    vllmops: Any, spawn: Spawn, local_keyring: Path, server_keyring: Path, token: Path
) -> None:
    own = grow(server_keyring, KeyStatus.PRIMARY).kid
    before = seal_history(["x"], keyring_file.load_keyring(server_keyring), model="m", owner="o")
    child, url = serve(spawn, server_keyring, token)
    lead = keyring_file.load_keyring(local_keyring).require_primary().kid
    words = build_push_arguments(token, local_keyring, url)
    assert vllmops(*words).code == 0
    assert fetch_key_statuses(child) == {own: "verify-only", lead: "primary"}
    assert unseal_carrier(
        before, keyring_file.load_keyring(server_keyring), model="m", owner="o"
    ).history == ["x"]
    (old,) = keyring_file.load_keyring(server_keyring).select_keys(KeyStatus.VERIFY_ONLY)
    assert old.not_after == pytest.approx(time.time() + 30 * 24 * 3600, abs=120)
    # What was revoked there stays so.
    keyring_file.change_keyring(
        server_keyring,
        lambda ring: ring.revoke(lead, Key.from_secret(generate_secret(), KeyStatus.NEXT, 1), 1),
    )
    answer = vllmops(*words, "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.not-taken")
    assert "revoked" in answer.error["message"]
    assert fetch_key_statuses(child)[lead] == "revoked"


def test_admin_requests_without_the_token_are_refused(
    vllmops: Any,
    spawn: Spawn,
    local_keyring: Path,
    server_keyring: Path,
    token: Path,
    tmp_path: Path,
) -> None:
    child, url = serve(spawn, server_keyring, token)
    ring = local_keyring.read_bytes()
    for given in ("", "user", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é"):
        for content in (None, ring):
            refused = send_admin_request(f"{url}{KEYS}", given, content)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "admin.refused")
    assert fetch_key_statuses(child) == {}
    assert not server_keyring.exists()
    assert send_admin_request(f"{url}{KEYS}").json()["keyring"] == str(server_keyring)
    # Another one, from now on.
    token.write_text("another-" * 8)
    assert send_admin_request(f"{url}{KEYS}").status_code == 401
    assert send_admin_request(f"{url}{KEYS}", "another-" * 8).status_code == 200
    words = ("keys", "push", "-t", url, "--keyring", str(local_keyring), "--json")
    (other := tmp_path / "other").write_text(TOKEN)
    other.chmod(0o600)
    answer = vllmops(*words, env={ADMIN_TOKEN_FILE: str(other)})
    assert (answer.code, answer.error["code"]) == (4, "admin.refused")
    assert (answer := vllmops(*words)).code == 2
    assert "--admin-token" in answer.error["hint"]

    def let_others_read() -> None:
        token.write_text(TOKEN)
        token.chmod(0o644)

    spoils: list[Callable[[], object]] = [
        lambda: token.write_text("short"),
        lambda: token.write_text("two words, " * 8),
        let_others_read,
        token.unlink,
    ]
    for spoil in spoils:
        spoil()
        for given in (TOKEN, "another-" * 8, "short", ""):
            assert send_admin_request(f"{url}{KEYS}", given).status_code == 401
    assert fetch_key_statuses(child) == {}
    log = child.end()
    assert "admin requests are refused" in log
    assert TOKEN not in log


def test_there_are_no_routes_where_there_is_no_token(
    vllmops: Any, spawn: Spawn, local_keyring: Path, server_keyring: Path, token: Path
) -> None:
    child = spawn(**{KEYRING: str(server_keyring)})
    url = f"http://127.0.0.1:{child.run(SERVING)}"
    assert send_admin_request(f"{url}{KEYS}").json() == {"error": "Unauthorized"}
    assert send_admin_request(f"{url}{KEYS}", "user").json() == {"detail": "Not Found"}
    words = build_push_arguments(token, local_keyring, url)
    answer = vllmops(*words, "--json")
    assert (answer.code, answer.error["code"]) == (1, "admin.no-route")
    assert "--admin-token" in answer.error["hint"]


def test_invalid_keyring_changes_nothing(
    spawn: Spawn, local_keyring: Path, server_keyring: Path, token: Path
) -> None:
    own = grow(server_keyring, KeyStatus.PRIMARY).kid
    child, url = serve(spawn, server_keyring, token)
    secret = keyring_file.load_keyring(local_keyring).keys[0].secret.reveal().hex()
    ring = local_keyring.read_bytes()
    for content in (
        b"",
        b"{}",
        ring[:-20],
        ring.replace(b'"version": 1', b'"version": 9'),
        ring.replace(b'"primary"', b'"odd"'),
        ring.replace(secret.encode(), b"ab" * 32),
        b" " * (MOST_BYTES + 1),
        b"[" * 100_000,
    ):
        refused = send_admin_request(f"{url}{KEYS}", content=content)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "admin.no-ring")
        assert secret not in refused.text
    for path in (f"{KEYS}/", "/v1/vllmops/", f"{KEYS}x"):
        assert send_admin_request(f"{url}{path}").status_code == 404
    assert CLIENT.delete(f"{url}{KEYS}", headers={"Authorization": f"Bearer {TOKEN}"}).is_error
    assert fetch_key_statuses(child) == {own: "primary"}
    # Its own file is broken: it keeps what it holds, and says why.
    server_keyring.write_text("{")
    refused = send_admin_request(f"{url}{KEYS}", content=ring)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "keys.broken")
    assert server_keyring.read_text() == "{"
    assert fetch_key_statuses(child) == {own: "primary"}
    assert secret not in child.end()


def test_another_key_of_a_known_kid_is_not_taken(
    vllmops: Any, spawn: Spawn, local_keyring: Path, server_keyring: Path, token: Path
) -> None:
    own = grow(server_keyring, KeyStatus.PRIMARY)
    other = Key.from_secret(generate_secret(), KeyStatus.NEXT, 1)
    keyring_file.change_keyring(
        local_keyring, lambda ring: ring.add(msgspec.structs.replace(other, kid=own.kid))
    )
    _, url = serve(spawn, server_keyring, token)
    answer = vllmops(*build_push_arguments(token, local_keyring, url), "--json")
    assert (answer.code, answer.error["code"]) == (1, "keys.same-kid")
    assert own.kid in answer.error["message"]
    assert keyring_file.load_keyring(server_keyring).keys == (own,)


def test_a_server_whose_key_is_in_its_environment_takes_none(
    spawn: Spawn, local_keyring: Path, token: Path
) -> None:
    child = spawn(**{SIGNING_KEY: "ab" * 32, ADMIN_TOKEN_FILE: str(token)})
    url = f"http://127.0.0.1:{child.run(SERVING)}"
    refused = send_admin_request(f"{url}{KEYS}", content=local_keyring.read_bytes())
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "keys.no-file")
    assert "--keyring" in refused.json()["error"]["hint"]


def test_keys_go_over_no_line_that_others_may_read(
    vllmops: Any, local_keyring: Path, token: Path, home: Path
) -> None:
    def push_keys_to(url: str, given_token: Path = token) -> Any:
        return vllmops(*build_push_arguments(given_token, local_keyring, url), "--json")

    for url in ("http://192.0.2.1:8000", "http://localhost.example", "http://127.0.0.1.example"):
        answer = push_keys_to(url)
        assert (answer.code, answer.error["code"]) == (2, "admin.plain"), url
    answer = push_keys_to("http://127.0.0.1:9")
    assert (answer.code, answer.error["code"]) == (5, "admin.unreachable")
    answer = push_keys_to("http://h", home / "none")
    assert (answer.code, answer.error["code"]) == (1, "file.unreadable")
    token.chmod(0o644)
    answer = push_keys_to("http://127.0.0.1:9")
    assert (answer.code, answer.error["code"]) == (4, "keys.unsafe")


def test_serve_says_where_the_token_is(
    vllmops: Any, token: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(token.parent)
    words = ("serve", "org/model", "--dry-run", "--json", "--admin-token")
    environment = vllmops(*words, token.name).data["environment"]
    assert environment[ADMIN_TOKEN_FILE] == str(token)
    answer = vllmops(*words, str(home / "none"))
    assert (answer.code, answer.error["hint"]) == (1, f"vllmops keygen --out {home / 'none'}")
    made = home / "made"
    assert vllmops("keygen", "--out", str(made)).code == 0
    assert vllmops(*words, str(made)).code == 0


def test_an_engine_has_no_routes(spawn: Spawn, server_keyring: Path, token: Path) -> None:
    code = (
        "import multiprocessing; multiprocessing.current_process().name = 'EngineCore'\n"
        "from vllmops.agent.transport import admin_routes as admin\n"
        "from fastapi.applications import FastAPI\n"
        "admin.install_routes(print); out = hasattr(FastAPI.__call__, '__vllmops_admin__')"
    )
    child = spawn(**{KEYRING: str(server_keyring)})
    child.run(f"import os; os.environ[{ADMIN_TOKEN_FILE!r}] = {str(token)!r}")
    assert child.run(code) == "False"


@pytest.fixture
def fleet(spawn: Spawn, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(spawn, tmp_path)
    yield made
    made.kill()


def test_processes_and_their_agents_need_the_token(fleet: Fleet) -> None:
    for path in ("", f"/{fleet.engine}/hello", f"/{fleet.engine}/drain", "/1/x"):
        for given in ("", "user", TOKEN[:-1], TOKEN + "x", "é"):
            for content in (None, b'{"on": true}'):
                refused = send_admin_request(f"{fleet.url}{PROCESSES}{path}", given, content)
                code = refused.json()["error"]["code"]
                assert (refused.status_code, code) == (401, "admin.refused")
    assert (
        send_admin_request(f"{fleet.url}{PROCESSES}/{fleet.api}/traffic").json()["draining"]
        is False
    )
    assert send_admin_request(f"{fleet.url}{PROCESSES}").status_code == 200


def test_only_listed_routes_of_this_servers_processes_are_forwarded(fleet: Fleet) -> None:
    for route in sorted(GETS):
        answer = send_admin_request(f"{fleet.url}{PROCESSES}/{fleet.engine}/{route}")
        assert answer.status_code == 200, route
        assert answer.json()["schema"] == SCHEMA
    assert (
        send_admin_request(f"{fleet.url}{PROCESSES}/{fleet.engine}/hello").json()["pid"]
        == fleet.engine
    )
    for path in (
        *(f"{fleet.engine}/{route}" for route in ("", "x", "caches?keys=2", "hello/")),
        *(f"{fleet.engine}/{route}" for route in ("../hello", "drain", "repair", "hello%3Fx")),
        *(
            "x/hello",
            "-1/hello",
            f"{fleet.engine}",
            "/hello",
            f"{fleet.engine}//hello",
            "1.0/hello",
        ),
    ):
        refused = send_admin_request(f"{fleet.url}{PROCESSES}/{path}")
        assert refused.status_code == 404, path
    assert (
        send_admin_request(
            f"{fleet.url}{PROCESSES}/{fleet.engine}/hello", content=b"{}"
        ).status_code
        == 404
    )
    # This test has an agent's process of its own below it, too.
    for pid in (1, os.getpid(), 2**31 - 1):
        refused = send_admin_request(f"{fleet.url}{PROCESSES}/{pid}/hello")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "agent.gone")


def test_actions_are_bounded_and_done(fleet: Fleet) -> None:
    drain = f"{fleet.url}{PROCESSES}/{fleet.api}/drain"
    assert send_admin_request(drain, content=b'{"on": true}').json()["draining"] is True
    assert CLIENT.get(f"{fleet.url}/health").status_code == 503
    # A server that drains still answers its operators.
    assert send_admin_request(f"{fleet.url}{PROCESSES}").status_code == 200
    assert send_admin_request(drain, content=b'{"on": false}').json()["draining"] is False
    refused = send_admin_request(drain, content=b" " * (BODY_BYTES + 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "admin.too-large")
    assert send_admin_request(drain, content=b"{}").status_code == 400  # as the agent says it


def test_agents_that_hang_hold_up_nobody(fleet: Fleet) -> None:
    os.kill(fleet.engine, signal.SIGSTOP)
    url = f"{fleet.url}{PROCESSES}/{fleet.engine}"
    headers = {"Authorization": f"Bearer {TOKEN}", TIMEOUT: "600"}

    def post() -> httpx.Response:
        return httpx.post(
            f"{url}/drain",
            content=b'{"on": false}',
            headers=headers,
            timeout=600,
            verify=CLIENT_CONTEXT,
        )

    with ThreadPoolExecutor(40) as pool:
        try:
            asked = [pool.submit(post) for _ in range(40)]
            # The others wait, side by side.
            until(lambda: sum(answer.done() for answer in asked) == 24)
            for _ in range(5):
                assert CLIENT.get(f"{fleet.url}/health").status_code == 200
            assert sum(answer.done() for answer in asked) == 24
        finally:
            os.kill(fleet.engine, signal.SIGCONT)
        answers = [answer.result() for answer in asked]
    assert Counter(answer.status_code for answer in answers) == {200: 16, 503: 24}
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert {*refused} == {"admin.busy"}

    os.kill(fleet.engine, signal.SIGSTOP)
    url = f"{url}/engine"
    headers[TIMEOUT] = "1"
    late = httpx.get(url, headers=headers, timeout=60, verify=CLIENT_CONTEXT)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "agent.timeout")
    listed = send_admin_request(f"{fleet.url}{PROCESSES}").json()
    assert {row["pid"]: row["state"] for row in listed["processes"]}[fleet.engine] == "T"
    os.kill(fleet.engine, signal.SIGCONT)
    until(lambda: send_admin_request(url).status_code == 200)
    for wrong in ("0", "-1", "nan", "x", "1e9"):  # as if it were not there
        headers[TIMEOUT] = wrong
        # Which gives the agent two seconds: on a busy machine they may be too few.
        until(lambda: CLIENT.get(url, headers=headers).status_code == 200)
