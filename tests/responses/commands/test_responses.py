"""``vllmops responses`` on real stores, and over HTTP by our routes on one."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from subprocess import PIPE
from typing import Any

import httpx
import psutil
import pytest

from vllmops.collect.http.endpoint import Endpoint
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops_responses.client import HttpResponseSource
from vllmops_responses.commands.responses import response_options
from vllmops_responses.commands.responses.source_options import iterate_pages
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import EVERYBODY, Response, ResponseQuery
from vllmops_responses.store.response_defaults import fill_defaults
from vllmops_responses.store.response_store import ResponseStore
from vllmops_responses.store.store_source import DirectStore

from ...support.databases import nobodys
from ...support.extent import combinations
from ...support.ports import free_port
from ...support.waiting import until

SERVED = Path(__file__).parents[1] / "store/served.py"
ONE, TWO = (hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two"))
DAY_S = 86400.0
EVENTS = [
    b'{"type":"response.created","sequence_number":0}',
    b'{"type":"response.output_text.delta","delta":"h\xe2\x80\xa8i","sequence_number":1}',
]
GIVEN = [{"role": "user", "content": "a question"}, {"role": "user", "content": "another"}]


def response(number: int, **fields: Any) -> Response:
    """The number is its age in hours; those with a multiple of three ran in the background."""
    name = f"resp_{number:032x}"
    created_at = fields.get("created_at", time.time() - 3600 * number)
    given = {"id": name, "owner": ONE, "model": "demo", "status": "completed", **fields}
    body = {
        "id": name,
        "object": "response",
        "created_at": int(created_at),
        "model": given["model"],
        "status": given["status"],
        "previous_response_id": given.get("previous_id"),
        "background": number % 3 == 0,
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": f"answer {number}"}],
            },
            {"type": "function_call", "name": "lamp", "call_id": "c", "arguments": '{"on":1}'},
        ],
        "tools": [],
        "usage": {"input_tokens": 1200 + number, "output_tokens": 16},
    }
    return Response(
        **{
            "created_at": created_at,
            "body": json.dumps(body).encode(),
            "input": json.dumps(GIVEN).encode(),
            **given,
        }
    )


def run_with_store(url: str, work: Callable[[ResponseStore], Awaitable[Any]]) -> Any:
    """Do something with a store."""

    async def run() -> Any:
        async with ResponseStore(backend_factory.make_backend(url)) as store:
            return await work(store)

    return asyncio.run(run())


def fill(url: str, responses: list[Response]) -> list[str]:
    """Store them, those of the background with events; their ids."""

    async def store_responses(store: ResponseStore) -> list[str]:
        for item in responses:
            assert await store.create(item)
            if json.loads(item.body).get("background"):
                assert await store.append_events(item, 0, EVENTS)
        return [item.id for item in responses]

    found: list[str] = run_with_store(url, store_responses)
    return found


def make_responses(*numbers: int, **fields: Any) -> list[Response]:
    return [response(item, **fields) for item in numbers]


def ids(answer: Any) -> list[str]:
    return [item["id"] for item in answer.data["responses"]]


def read_store(url: str) -> dict[str, Any]:
    """All that a store keeps, to the byte."""

    async def run() -> dict[str, Any]:
        found = {}
        async with DirectStore(url) as store:
            for item in (await store.list_responses(ResponseQuery(limit=1000))).responses:
                events = await store.read_events(item)
                found[item.id] = item, [event for part in events for event in part.events]
        return found

    return asyncio.run(run())


# -- on the store itself ----------------------------------------------------------------


def test_list(vllmops: Any, shared_url: str) -> None:
    made = fill(
        shared_url, make_responses(0, 1, 2, 3) + make_responses(4, 5, owner=TWO, model="other")
    )
    made += fill(shared_url, [response(6, status="failed", error="it broke", owner="")])

    def list_responses(*words: str) -> Any:
        answer = vllmops("responses", "list", "--json", "--store", shared_url, *words)
        assert (answer.code, answer.err) == (0, "")
        return answer

    whole = list_responses()
    assert ids(whole) == made
    assert whole.data["next"] is None
    first, last = whole.data["responses"][0], whole.data["responses"][-1]
    assert (first["status"], first["model"], first["owner"]) == ("completed", "demo", ONE)
    assert (first["input_tokens"], first["background"]) == (1200, True)
    assert (last["status"], last["error"], last["owner"]) == ("failed", "it broke", "")
    page = list_responses("--limit", "3")
    assert (ids(page), page.data["next"]) == (made[:3], made[2])
    rest = list_responses("--limit", "4", "--after", made[2])
    assert (ids(rest), rest.data["next"]) == (made[3:], None)
    assert ids(list_responses("--status", "failed")) == made[6:]
    assert ids(list_responses("--status", "failed", "--status", "completed", "-n", "9")) == made
    assert ids(list_responses("--model", "other")) == made[4:6]
    assert ids(list_responses("--since", "210m")) == made[:4]
    assert ids(list_responses("--all", "--since", "210m", "--model", "other")) == []
    text = vllmops("responses", "list", "--store", shared_url, columns=80)
    lines = text.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(item in line for line in lines) for item in made)
    assert ONE[:8] in text.out
    more = vllmops("responses", "list", "--store", shared_url, "-n", "2", columns=80)
    assert f"--after {made[1]}" in more.out


def test_list_refuses_invalid_options(vllmops: Any, shared_url: str) -> None:
    fill(shared_url, make_responses(1))
    for words, code in (
        (("--status", "odd"), "usage"),
        (("--since", "yesterday"), "usage"),
        (("--after", "resp_unknown"), "usage"),
        (("-t", "demo"), "usage"),
    ):
        answer = vllmops("responses", "list", "--json", "--store", shared_url, *words)
        assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, code)
    answer = vllmops("responses", "list", "--json", "--store", "memory://")
    assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage")


def test_commands_do_not_create_a_missing_store(vllmops: Any, shared_url: str) -> None:
    for words in (("list",), ("stats",), ("show", "resp_1"), ("purge", "--older-than", "1d")):
        answer = vllmops("responses", *words, "--json", "--store", shared_url)
        assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "store.none")
    fill(shared_url, [])
    answer = vllmops("responses", "list", "--store", shared_url)
    assert (answer.code, answer.out) == (0, "no responses are stored\n")


def test_the_database_of_another_program_is_not_changed_by_looking(
    vllmops: Any, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "a#.db")) as file:
        file.execute("CREATE TABLE mine (a)")
    before = (tmp_path / "a#.db").read_bytes()
    url = f"sqlite:///{tmp_path}/a%23.db"
    for words in (("responses", "list"), ("responses", "stats"), ("conversations", "list")):
        answer = vllmops(*words, "--store", url, "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "store.none")
    assert (tmp_path / "a#.db").read_bytes() == before
    fill(url, make_responses(1, 2))
    assert len(ids(vllmops("responses", "list", "--json", "--store", url))) == 2
    other = vllmops("responses", "list", "--store", f"{url}?namespace=other", "--json")
    assert other.error["code"] == "store.none"


@pytest.mark.parametrize("url", ["postgresql://u:secret@127.0.0.1:1/d", "redis://127.0.0.1:1/0"])
def test_a_store_that_is_down(vllmops: Any, url: str) -> None:
    answer = vllmops("responses", "list", "--json", "--store", url)
    assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "store.unavailable")
    assert "127.0.0.1:1" in answer.error["message"]
    assert "secret" not in answer.out


def test_show(vllmops: Any, shared_url: str) -> None:
    (background, foreground) = fill(shared_url, make_responses(3, 1))

    def show_response(name: str, *words: str) -> Any:
        return vllmops("responses", "show", name, "--store", shared_url, *words)

    data = show_response(background, "--json", "--input", "--events").data
    assert data["response"]["output"][0]["content"][0]["text"] == "answer 3"
    assert data["input"] == GIVEN
    assert [item["sequence_number"] for item in data["events"]] == [0, 1]
    assert (data["owner"], data["status"]) == (ONE, "completed")
    assert show_response(foreground, "--json").data["events"] is None
    text = show_response(background, "--input", "--events").out
    for item in ("answer 3", "a question", "another", "response.created", "lamp", '{"on":1}', ONE):
        assert item in text
    assert "no stored events" in show_response(foreground, "--events").out
    assert json.loads(show_response(background, "--raw").out)["id"] == background
    assert json.loads(show_response(background, "--raw", "--input").out) == GIVEN
    assert show_response(background, "--raw", "--events").out.encode() == b"\n".join([*EVENTS, b""])
    answer = show_response("resp_unknown", "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "responses.unknown")


def test_cancel(vllmops: Any, shared_url: str) -> None:
    fill(shared_url, make_responses(1))
    runs = fill(
        shared_url, make_responses(3, 4, status="in_progress") + make_responses(9, status="queued")
    )

    def cancel(*words: str) -> Any:
        return vllmops("responses", "cancel", *words, "--json", "--store", shared_url)

    assert ids(cancel("--older-than", "200m", "--dry-run")) == [runs[2], runs[1]]
    for output in ("cancelled", "cancelled before"):  # once more does no harm
        answer = cancel(runs[0])
        assert answer.code == 0
        assert [item["result"] for item in answer.data["responses"]] == [output]
    some = cancel(runs[1], "resp_unknown", response(1).id)
    assert (some.code, some.error["code"]) == (ExitCode.FAILED, "responses.some-failed")
    done = {item["id"]: item["done"] for item in some.data["responses"]}
    assert done == {runs[1]: True, "resp_unknown": False, response(1).id: False}
    finished, unknown = cancel(response(1).id), cancel("resp_unknown")
    assert (finished.code, finished.error["code"]) == (ExitCode.FAILED, "responses.refused")
    assert (unknown.code, unknown.error["code"]) == (ExitCode.NOT_FOUND, "responses.unknown")
    answer = cancel("--all-running")
    assert (answer.code, ids(answer)) == (0, [runs[2]])
    assert cancel("--all-running").data == {"responses": [], "done": 0}
    statuses = {name: item.status for name, (item, _) in read_store(shared_url).items()}
    assert statuses == {response(1).id: "completed"} | dict.fromkeys(runs, "cancelled")
    for words in ((), ("--all-running", "resp_1")):
        assert cancel(*words).code == ExitCode.USAGE


def test_cancel_stops_a_run_of_another_process(shared_url: str, home: Path) -> None:
    async def cancel_from_command(store: ResponseStore) -> str:
        stopped = asyncio.Event()
        run = response(0, status="in_progress")
        await store.create(run)
        store.track_run(run, stopped.set)
        words = ("-m", "vllmops", "responses", "cancel", run.id, "--store", shared_url)
        command = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)
        spoken, _ = await command.communicate()
        async with asyncio.timeout(60):
            await stopped.wait()
        return spoken.decode()

    assert run_with_store(shared_url, cancel_from_command) == f"{response(0).id}  cancelled\n"


def test_delete(vllmops: Any, shared_url: str) -> None:
    made = fill(shared_url, make_responses(0, 1, 2))

    def delete(*words: str) -> Any:
        return vllmops("responses", "delete", *words, "--json", "--store", shared_url)

    assert ids(delete(made[0], made[0])) == [made[0]]
    some = delete(made[0], made[1])
    assert (some.code, some.error["code"]) == (ExitCode.NOT_FOUND, "responses.unknown")
    assert [item["done"] for item in some.data["responses"]] == [False, True]
    assert list(read_store(shared_url)) == [made[2]]
    text = vllmops("responses", "delete", "resp_unknown", made[2], "--store", shared_url)
    assert text.code == ExitCode.NOT_FOUND
    assert f"{made[2]}  deleted" in text.out
    assert "resp_unknown  there is no such response" in text.out


def test_purge(vllmops: Any, shared_url: str) -> None:
    made = fill(shared_url, make_responses(0, 1, 30) + make_responses(40, status="failed"))
    made += fill(shared_url, [response(50, status="in_progress")])
    fill(shared_url, [response(2, previous_id=made[2])])

    def purge(*words: str) -> Any:
        return vllmops("responses", "purge", *words, "--store", shared_url)

    assert purge("--json").code == ExitCode.USAGE
    trial = purge("--older-than", "1d", "--dry-run")
    assert "would delete 2 responses" in trial.out
    assert "1 remaining responses follow one of these" in trial.out
    assert ids(purge("--older-than", "1d", "--dry-run", "--json")) == [made[3], made[2]]
    unasked = purge("--older-than", "1d", "--json")
    assert (unasked.code, unasked.error["code"]) == (ExitCode.USAGE, "unconfirmed")
    assert len(read_store(shared_url)) == 6
    assert ids(purge("--status", "failed", "--yes", "--json")) == [made[3]]
    assert purge("--older-than", "1d", "--yes").out == "1 deleted\n"
    assert set(read_store(shared_url)) == {made[0], made[1], made[4], response(2).id}
    assert "nothing to delete" in purge("--older-than", "1d", "--yes").out
    assert ids(purge("--status", "in_progress", "--yes", "--json")) == [made[4]]
    assert "nothing to delete" in purge("--model", "other", "--yes").out


def test_stats(vllmops: Any, shared_url: str) -> None:
    made = make_responses(1, 3) + make_responses(2, status="failed", owner=TWO, model="other")
    fill(shared_url, made)
    data = vllmops("responses", "stats", "--json", "--store", shared_url).data
    assert data["count"] == 3
    assert data["statuses"] == {"completed": 2, "failed": 1}
    assert data["models"] == {"demo": 2, "other": 1}
    assert data["bytes"] > 100
    assert data["event_bytes"] > 10
    assert data["evictions"] == 0
    assert data["oldest"] == pytest.approx(made[1].created_at, abs=0.001)
    text = vllmops("responses", "stats", "--store", shared_url).out
    assert "3 responses" in text
    assert re.search(r"3h\d\dm ago", text)


# -- from one store to another ----------------------------------------------------------


@pytest.fixture
def other_url(shared_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of another kind, which is not there yet."""
    kind = shared_url.partition(":")[0]
    if kind == "redis":
        return f"sqlite:///{tmp_path}/other.db"
    server = request.getfixturevalue("shared_servers")
    url: str = server["redis" if kind == "postgresql" else "postgresql"].url
    return f"{url}?namespace=o{time.time_ns()}"


def test_from_one_store_to_another(
    vllmops: Any, shared_url: str, other_url: str, tmp_path: Path
) -> None:
    odd = response(7, id="odd/idé", previous_id=response(3).id, body=b'{\n "output": []\n}')
    made = (
        make_responses(*range(120, 3, -1)) + make_responses(0, 1, owner=TWO, model="other") + [odd]
    )
    fill(shared_url, made)
    fill(shared_url, [response(3, status="failed", error="it broke", owner="")])
    fill(shared_url, [response(200, status="in_progress")])
    file = tmp_path / "responses.jsonl"
    out = vllmops("responses", "export", "--store", shared_url, "-o", str(file), "--json")
    assert out.data == {"count": 121, "running": 1, "path": str(file)}
    assert file.stat().st_mode & 0o777 == 0o600
    output = vllmops("responses", "export", "--store", shared_url).err
    assert "1 running responses left out" in output
    piped = vllmops("responses", "export", "--store", shared_url).out
    assert piped.encode() == file.read_bytes()

    def take(*words: str) -> Any:
        return vllmops("responses", "import", str(file), "--store", other_url, "--json", *words)

    first = take()
    assert (first.code, first.data["count"], first.data["skipped"]) == (0, 121, 0)
    before, after = read_store(shared_url), read_store(other_url)
    del before[response(200).id]
    compact = after.pop(odd.id)
    assert json.loads(before.pop(odd.id)[0].body) == json.loads(compact[0].body)
    assert before == after
    again = take()
    assert (again.code, again.data["count"], again.data["skipped"]) == (0, 0, 121)
    run_with_store(
        other_url,
        lambda store: store.set_status(EVERYBODY, odd.id, "failed", allowed_statuses=FINISHED_),
    )
    replaced = take("--overwrite")
    assert (replaced.code, replaced.data["replaced"]) == (0, 121)
    assert read_store(other_url) == {**after, odd.id: compact}


FINISHED_ = frozenset({"completed"})


def test_existing_files_and_running_responses_are_not_overwritten(
    vllmops: Any, tmp_path: Path
) -> None:
    store, file = f"sqlite:///{tmp_path}/a.db", tmp_path / "a.jsonl"
    fill(store, make_responses(1, 2))
    vllmops("responses", "export", "--store", store, "-o", str(file))
    exists = vllmops("responses", "export", "--store", store, "-o", str(file), "--json")
    assert (exists.code, exists.error["code"]) == (ExitCode.USAGE, "responses.exists")
    run_with_store(store, lambda item: item.delete(EVERYBODY, response(1).id))
    fill(store, [response(1, status="in_progress", owner=TWO)])
    answer = vllmops("responses", "import", str(file), "--store", store, "--overwrite", "--json")
    assert (answer.data["replaced"], answer.data["skipped"]) == (1, 1)
    assert read_store(store)[response(1).id][0].status == "in_progress"


def test_an_import_that_was_cut_off_goes_on(vllmops: Any, tmp_path: Path) -> None:
    store, other, file = (
        f"sqlite:///{tmp_path}/a.db",
        f"sqlite:///{tmp_path}/b.db",
        tmp_path / "a",
    )
    made = make_responses(3, 6)  # both ran in the background
    fill(store, made)
    vllmops("responses", "export", "--store", store, "-o", str(file))
    run_with_store(other, lambda item: item.create(made[0]))  # and then came a kill -9, say
    answer = vllmops("responses", "import", str(file), "--store", other, "--json")
    assert (answer.code, answer.data["count"], answer.data["skipped"]) == (0, 1, 1)
    assert read_store(other) == read_store(store)


def test_failed_overwrite_keeps_the_old_response(
    vllmops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one gives way first, and the new one may be too large for the disk."""
    store, file = f"sqlite:///{tmp_path}/a.db", tmp_path / "a.jsonl"
    (made,) = make_responses(1)
    fill(store, [made])
    vllmops("responses", "export", "--store", store, "-o", str(file))
    before, create, calls = read_store(store), ResponseStore.create, itertools.count(1)

    async def fail_second_create(self: ResponseStore, response: Response) -> bool:
        if next(calls) == 2:
            raise VllmopsError("store.unavailable", "the disk is full", "make room")
        return await create(self, response)

    monkeypatch.setattr(ResponseStore, "create", fail_second_create)
    answer = vllmops("responses", "import", str(file), "--store", store, "--overwrite", "--json")
    assert answer.error["code"] == "store.unavailable", answer
    assert read_store(store) == before


def test_broken_lines_are_named(vllmops: Any, tmp_path: Path) -> None:
    store, file = f"sqlite:///{tmp_path}/a.db", tmp_path / "a.jsonl"
    fill(store, make_responses(1, 2, 4, 5))
    vllmops("responses", "export", "--store", store, "-o", str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["status"] = "in_progress"
    lines[1]["owner"] = "me"
    lines[2]["response"] = []
    broken = [json.dumps(line) for line in lines[:3]]
    broken += ["", "{", "[]", json.dumps({**lines[3], "vllmops": 2})]
    broken += [json.dumps({**lines[3], "id": ""}), json.dumps({**lines[3], "id": "\ud800"})]
    broken += [json.dumps({**lines[3], "input": "x"}), "\xff", json.dumps(lines[3])]
    file.write_text("\n".join(broken), encoding="latin-1")
    answer = vllmops(
        "responses", "import", str(file), "--store", f"sqlite:///{tmp_path}/b.db", "--json"
    )
    assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "responses.broken")
    assert [item["line"] for item in answer.data["broken"]] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert all(item["reason"] for item in answer.data["broken"])
    assert answer.data["count"] == 1
    text = vllmops("responses", "import", str(file), "--store", f"sqlite:///{tmp_path}/b.db")
    assert "line 2: 'me' is not an owner" in text.out
    assert "10 of 11 lines are broken" in text.err
    missing = vllmops("responses", "import", "/none", "--store", store, "--json")
    assert (missing.code, missing.error["code"]) == (ExitCode.FAILED, "file.unreadable")


def test_from_stdin(tmp_path: Path, home: Path) -> None:
    store, other = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    fill(store, make_responses(1, 3))
    program = f"{sys.executable} -m vllmops responses"
    script = f"{program} export --store {store} | {program} import - --store {other}"
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == f"2 responses imported into {other}\n"
    assert read_store(store) == read_store(other)


def test_credentials_do_not_come_in(vllmops: Any, tmp_path: Path) -> None:
    store, file = f"sqlite:///{tmp_path}/a.db", tmp_path / "a.jsonl"
    fill(store, make_responses(1))
    line = json.loads(vllmops("responses", "export", "--store", store).out)
    line["response"]["tools"] = [{"type": "mcp", "headers": {"x": "hunter2"}}]
    file.write_text(json.dumps(line))
    vllmops("responses", "import", str(file), "--store", store, "--overwrite")
    assert b"hunter2" not in read_store(store)[line["id"]][0].body


def test_pages_though_their_last_ones_go(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    made = fill(url, make_responses(*range(30)))

    async def run() -> list[str]:
        found: list[str] = []
        async with DirectStore(url) as responses:
            async for page in iterate_pages(responses, ResponseQuery(limit=10)):
                found += [item.id for item in page]
                for item in page[-3:]:
                    await responses.delete(item.id)
        return found

    assert asyncio.run(run()) == made


def test_the_store_of_an_instance(lab: Any, vllmops: Any, tmp_path: Path) -> None:
    record = lab.serve("kept")
    store = record.environment["VLLMOPS_RESPONSES_STORE"]
    fill(f"sqlite:///{tmp_path}/a.db", make_responses(1, 2))
    file = tmp_path / "a.jsonl"
    vllmops("responses", "export", "--store", f"sqlite:///{tmp_path}/a.db", "-o", str(file))
    answer = vllmops("responses", "import", str(file), "-t", "kept", "--json")
    assert (answer.data["store"], answer.data["count"]) == (store, 2)
    # The stand-in answers, and has none of these routes.
    answer = vllmops("responses", "list", "-t", "kept", "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "responses.no-route")
    assert "vllmops patches list -t kept" in answer.error["hint"]
    vllmops("stop", "kept", "--force")
    for words in ((), ("-t", "kept")):
        answer = vllmops("responses", "list", "--json", *words)
        assert answer.code == ExitCode.NOT_FOUND
        assert answer.error["code"] in {"target.none", "target.over"}
        assert f"--store {store}" in answer.error["hint"]
    assert len(ids(vllmops("responses", "list", "--json", "--store", store))) == 2


def test_it_works_without_vllm(home: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    fill(url, make_responses(1))
    # None in the place of a module is as if it were not installed.
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['fastapi'] = None; "
        f"sys.argv = ['vllmops', 'responses', 'list', '--json', '--store', {url!r}]; "
        "from vllmops.app import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["data"]["responses"][0]["id"] == response(1).id


# -- over HTTP --------------------------------------------------------------------------


class Server:
    """A server in a process of its own."""

    def __init__(self, *words: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        program = [sys.executable, str(SERVED), str(port), *words]
        self.process = psutil.Popen(program, env=nobodys())
        until(self.is_up)

    def is_up(self) -> bool:
        assert self.process.poll() is None
        return self.answers()

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/docs", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def stock() -> Iterator[Server]:
    made = Server("stock")
    yield made
    made.process.kill()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Server]:
    made = Server("gateway")
    yield made
    made.process.kill()


class Ours(Server):
    """Our routes, and the URL of their store."""

    def __init__(self, folder: Path) -> None:
        self.store = f"sqlite:///{folder}/responses.db"
        super().__init__("ours", self.store, "one", "two")

    def clear(self) -> None:
        async def delete_all_responses(store: ResponseStore) -> None:
            for item in (
                await store.list_responses(EVERYBODY, ResponseQuery(limit=1000))
            ).responses:
                await store.delete(EVERYBODY, item.id)

        run_with_store(self.store, delete_all_responses)


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ours]:
    made = Ours(tmp_path_factory.mktemp("served"))
    yield made
    made.process.kill()


@pytest.fixture
def empty_server(running_server: Ours) -> Ours:
    """The server, with nothing in its store."""
    running_server.clear()
    return running_server


Ask = Callable[..., Any]


@pytest.fixture
def responses_command(vllmops: Any, empty_server: Ours) -> Ask:
    """Runs a command against the server, with an API key."""

    def run(*words: str, key: str = "one", **options: Any) -> Any:
        env = {"VLLM_API_KEY": key, "VLLMOPS_TARGET": empty_server.url}
        return vllmops("responses", *words, env=env, **options)

    return run


def test_a_server_shows_those_of_a_key(responses_command: Ask, empty_server: Ours) -> None:
    began = int(time.time())
    made = fill(empty_server.store, make_responses(0, 1, 2, 3) + make_responses(4, owner=TWO))
    assert ids(responses_command("list", "--json")) == made[:4]
    assert ids(responses_command("list", "--json", key="two")) == made[4:]
    page = responses_command("list", "--json", "-n", "2").data
    assert page["next"] == made[1]
    assert ids(responses_command("list", "--json", "--after", page["next"])) == made[2:4]
    assert ids(responses_command("list", "--json", "--since", "90m")) == made[:2]
    assert responses_command("list", "--status", "failed").out.startswith("no matching responses")
    first = responses_command("list", "--json").data["responses"][0]
    assert (first["owner"], first["input_tokens"]) == (None, 1200)
    assert first["created_at"] >= began
    for words in (("show", made[4]), ("delete", made[4]), ("cancel", made[4])):
        answer = responses_command(*words, "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "responses.unknown")
    assert responses_command("list", "--json", "--after", made[4]).code == ExitCode.USAGE
    for key in ("", "three"):
        answer = responses_command("list", "--json", key=key)
        assert (answer.code, answer.error["code"]) == (
            ExitCode.NOT_AUTHORISED,
            "responses.not-authorised",
        )
        assert "VLLM_API_KEY" in answer.error["hint"]


def test_show_over_http(responses_command: Ask, empty_server: Ours) -> None:
    (name, other) = fill(empty_server.store, make_responses(3, 1))
    (run,) = fill(empty_server.store, [response(6, status="in_progress")])
    data = responses_command("show", name, "--json", "--input", "--events").data
    assert [item["content"][0]["text"] for item in data["input"]] == ["a question", "another"]
    assert [item["sequence_number"] for item in data["events"]] == [0, 1]
    assert data["events"][1]["delta"] == "h\u2028i"
    assert responses_command("show", other, "--json", "--events").data["events"] == []
    text = responses_command("show", run, "--events")
    assert "response.created" in text.out
    assert "still running" in text.out
    assert json.loads(responses_command("show", name, "--raw").out)["id"] == name


def test_ending_over_http(responses_command: Ask, empty_server: Ours) -> None:
    runs = fill(empty_server.store, make_responses(0, 3, 6, status="in_progress"))
    done = fill(empty_server.store, make_responses(9, 1))
    answer = responses_command("cancel", runs[0], "--json")
    assert (answer.code, answer.data["responses"][0]["result"]) == (0, "cancelled")
    assert responses_command("cancel", runs[0], "--json").code == 0
    for item, why in zip(done, ("completed", "synchronous"), strict=True):
        answer = responses_command("cancel", item, "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "responses.refused")
        assert why in answer.error["message"]
    assert ids(responses_command("cancel", "--all-running", "--older-than", "4h", "--json")) == [
        runs[2]
    ]
    assert ids(responses_command("cancel", "--all-running", "--json")) == [runs[1]]
    answer = responses_command("delete", runs[0], "resp_unknown", "--json")
    assert [item["done"] for item in answer.data["responses"]].count(True) == 1
    assert answer.code == ExitCode.NOT_FOUND
    trial = responses_command("purge", "--older-than", "150m", "--dry-run", "--json")
    assert set(ids(trial)) == {runs[1], runs[2], done[0]}
    purged = responses_command("purge", "--older-than", "150m", "--yes", "--json")
    assert (purged.code, purged.data["done"]) == (0, 3)
    assert list(read_store(empty_server.store)) == [done[1]]


def test_stats_over_http(responses_command: Ask, empty_server: Ours) -> None:
    fill(empty_server.store, make_responses(*range(205)))
    fill(empty_server.store, [response(300, owner=TWO)])
    data = responses_command("stats", "--json").data
    assert (data["count"], data["models"]) == (205, {"demo": 205})
    assert (data["evictions"], data["event_bytes"]) == (None, None)
    assert "not available from a server" in responses_command("stats").out
    assert responses_command("stats", "--json", key="two").data["count"] == 1


def test_export_over_http(
    responses_command: Ask, empty_server: Ours, vllmops: Any, tmp_path: Path
) -> None:
    fill(empty_server.store, make_responses(*range(1, 130)))
    file, other = tmp_path / "a.jsonl", f"sqlite:///{tmp_path}/b.db"
    assert responses_command("export", "-o", str(file), "--json").data["count"] == 129
    answer = vllmops("responses", "import", str(file), "--store", other, "--json")
    assert answer.data["count"] == 129
    before, after = read_store(empty_server.store), read_store(other)
    assert before.keys() == after.keys()
    for name, (one, events) in before.items():
        same, logged = after[name]
        assert (same.owner, same.status, events) == (one.owner, one.status, logged)
        assert json.loads(same.body) == fill_defaults(json.loads(one.body))
        assert int(one.created_at) == same.created_at
        assert len(json.loads(same.input)) == 2
    refused = responses_command("import", str(file), "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "usage")
    assert "--store" in refused.error["hint"]


@pytest.mark.parametrize(
    ("kind", "words"),
    combinations(
        ("stock", "gateway"), (("list",), ("stats",), ("purge", "--older-than", "1d", "--yes"))
    ),
)
def test_without_the_route(
    vllmops: Any, request: pytest.FixtureRequest, kind: str, words: tuple[str, ...]
) -> None:
    url = request.getfixturevalue(kind).url
    answer = vllmops("responses", *words, "--json", "-t", url)
    assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "responses.no-route")
    assert url in answer.error["message"]
    spoken = {"stock": ("vLLM 0.32.0", "vllmops serve"), "gateway": ("gateway", "behind it")}
    message, hint = spoken[kind]
    assert message in answer.error["message"]
    assert hint in answer.error["hint"]


def test_stock_server_shows_a_response_and_lacks_other_routes(vllmops: Any, stock: Server) -> None:
    def run_command(*words: str) -> Any:
        return vllmops("responses", *words, "--json", "-t", f"{stock.url}/v1")

    assert run_command("show", "resp_there").data["response"]["model"] == "m"
    for words in (("show", "resp_gone"), ("show", "resp_gone", "--input")):
        answer = run_command(*words)
        assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "responses.unknown")
    for words in (
        ("show", "resp_there", "--input"),
        ("show", "resp_there", "--events"),
        ("delete", "resp_there"),
        ("cancel", "resp_there"),
    ):
        answer = run_command(*words)
        assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "responses.no-route")


def test_unreachable_server_is_reported(vllmops: Any, listener: int) -> None:
    answer = vllmops("responses", "list", "--json", "-t", f"http://127.0.0.1:{free_port()}")
    assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "responses.unreachable")
    answer = vllmops("responses", "list", "--json", "-t", "http://[bad")
    assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage")

    async def list_with_timeout() -> None:
        url = f"http://127.0.0.1:{listener}"
        async with HttpResponseSource(Endpoint(url, url), timeout_s=1) as server:
            await server.list_responses(ResponseQuery())

    with pytest.raises(VllmopsError) as caught:
        asyncio.run(list_with_timeout())
    assert (caught.value.code, caught.value.exit_code) == ("responses.timeout", ExitCode.TIMED_OUT)


def test_a_pipe_without_end_is_not_copied_for_ever(
    vllmops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = import_module("vllmops_responses.commands.responses.import_")
    monkeypatch.setattr(importing, "MOST_PIPED", 3 << 20)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["sh", "-c", f"yes '{{}}' >{fifo}"]) as endless:
        store = f"sqlite:///{tmp_path}/r.db"
        answer = vllmops("responses", "import", str(fifo), "--store", store, "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "file.too-large")
        assert "import the file" in answer.error["hint"]
        endless.wait(60)


def test_ctrl_c(empty_server: Ours, tmp_path: Path, home: Path) -> None:
    fill(empty_server.store, make_responses(1))
    os.kill(empty_server.process.pid, signal.SIGSTOP)  # so that the command waits
    try:
        for words in (("export", "-o", str(tmp_path / "a.jsonl")), ("cancel", "resp_1")):
            command = [sys.executable, "-m", "vllmops", "responses", *words, "-t", empty_server.url]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                listening = psutil.Process(process.pid)
                while not listening.net_connections():
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                _, spoken = process.communicate(timeout=60)
            assert process.returncode == ExitCode.INTERRUPTED
            assert spoken.startswith("error: interrupted: 0")
            assert "Traceback" not in spoken
    finally:
        os.kill(empty_server.process.pid, signal.SIGCONT)
    assert not list(tmp_path.iterdir())


def test_ids_are_completed(
    empty_server: Ours, vllmops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fill(empty_server.store, [*make_responses(1, 2), response(3, status="in_progress")])
    monkeypatch.setattr(response_options, "COMPLETION_S", 60)  # a busy machine is no failure

    def complete_words(words: str, key: str = "one") -> tuple[list[str], str]:
        answer = vllmops(
            env={
                "_VLLMOPS_COMPLETE": "complete_bash",
                "COMP_WORDS": f"vllmops responses {words}",
                "COMP_CWORD": str(words.count(" ") + 2),
                "VLLM_API_KEY": key,
            }
        )
        return answer.out.split(), answer.err

    assert complete_words(f"show -t {empty_server.url} resp_") == (made, "")
    assert complete_words(f"show -t {empty_server.url} {made[1]}") == ([made[1]], "")
    assert complete_words(f"cancel -t {empty_server.url} r") == ([made[2]], "")
    assert complete_words(f"delete -t {empty_server.url} {made[0]} r") == (made[1:], "")
    assert complete_words(f"list -t {empty_server.url} --status in") == (
        ["in_progress", "incomplete"],
        "",
    )
    assert complete_words(f"list -t {empty_server.url} --model d") == (["demo"], "")
    for words, key in (
        ("show -t http://127.0.0.1:1 r", "one"),
        ("show -t nobody r", "one"),
        (f"show -t {empty_server.url} r", "three"),
    ):
        assert complete_words(words, key) == ([], "")
