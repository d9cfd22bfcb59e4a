"""What a store or a server has that is no response hides none of the others."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from vllmops.support.errors import ExitCode
from vllmops_responses.commands.responses.import_ import number_lines
from vllmops_responses.store import backend_factory, compression
from vllmops_responses.store.backend import Response

from ...support.extent import EVERYTHING, long, sample_cases

DEEP = b"[" * 100_000
GOOD = b'{"id":"resp_good","object":"response","status":"completed","output":[]}'
# By id: what was stored by a version that took everything.
BAD = {
    "resp_status": b'{"id":"resp_status","status":3}',
    "resp_type": b'{"id":"resp_type","status":"completed","output":[{"type":5}]}',
    "resp_made": b'{"id":"resp_made","status":"completed","created_at":1e308}',
    "resp_output": b'{"id":"resp_output","status":"completed","output":{"a":1}}',
    "resp_usage": b'{"id":"resp_usage","status":"completed","usage":7}',
    "resp_error": b'{"id":"resp_error","status":"completed","error":"x"}',
    "resp_list": b"[]",
    "resp_empty": b"",
    "resp_text": b"\xff\xfe",
    "resp_half": b'{"id":"resp_half","x":"\\ud800',
    "resp_deep": b'{"id":"resp_deep","x":' + DEEP,
}


def store_damaged_responses(url: str) -> None:
    """Put them past what the store checks, as an older one did."""

    async def main() -> None:
        backend = backend_factory.make_backend(url)
        await backend.open()
        for number, (name, body) in enumerate({**BAD, "resp_good": GOOD}.items()):
            made = Response(
                id=name,
                owner="",
                model="m",
                status="completed",
                created_at=1e308 if name == "resp_made" else 1e9 + number,
                body=compression.PLAIN + body,
                input=compression.PLAIN + (b"[]" if name == "resp_good" else body),
            )
            assert await backend.create(made)
        await backend.close()

    asyncio.run(main())


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/responses.db"
    if request.param == "redis":
        server = request.getfixturevalue("shared_servers")["redis"]
        url = f"{server.url}?namespace=t{tmp_path.name.replace('-', '_').lower()[-20:]}"
    store_damaged_responses(url)
    return url


def test_a_list_has_all_of_them(url: str, vllmops: Any) -> None:
    answer = vllmops("responses", "list", "--store", url, "--all")
    assert answer.code == 0, answer
    assert answer.out.count("damaged") == len(BAD)
    assert "resp_good" in answer.out
    answer = vllmops("responses", "list", "--store", url, "--all", "--json")
    found = {item["id"]: item["damaged"] for item in json.loads(answer.out)["data"]["responses"]}
    assert found.pop("resp_good") is None
    assert set(found) == set(BAD)
    assert all(found.values())


WAYS = [(), ("--input",), ("--raw",), ("--json", "--input"), ("--raw", "--input")]


def test_every_damaged_response_can_be_shown(url: str, vllmops: Any) -> None:
    for name, turn in zip(BAD, itertools.cycle(WAYS), strict=False):
        for words in WAYS if EVERYTHING else [turn]:
            answer = vllmops("responses", "show", name, "--store", url, *words)
            assert answer.code == 0, answer
            assert "--raw" in words or "damaged" in answer.out
            if "--json" in words:
                assert json.loads(answer.out)["data"]["damaged"]


def test_they_are_counted_and_left_out_and_deleted(url: str, vllmops: Any, tmp_path: Path) -> None:
    answer = vllmops("responses", "stats", "--store", url)
    assert answer.code == 0, answer
    out = tmp_path / "out.jsonl"
    answer = vllmops("responses", "export", "--store", url, "-o", str(out), "--json")
    assert (answer.code, answer.error["code"]) == (1, "responses.damaged")
    assert [json.loads(item)["id"] for item in out.read_text().splitlines()] == ["resp_good"]
    named = {item["id"] for item in json.loads(answer.out)["data"]["damaged"]}
    assert named == set(BAD)
    answer = vllmops("responses", "purge", "--store", url, "--older-than", "1s", "--yes")
    assert answer.code == 0, answer
    answer = vllmops("responses", "delete", *BAD, "--store", url)
    assert answer.code in {0, 5}, answer


def test_a_file_that_is_no_store_has_no_server_to_check(tmp_path: Path, vllmops: Any) -> None:
    (tmp_path / "a.db").write_text("no database\n" * 500)
    (tmp_path / "b").write_text("")
    for name in ("a.db", "b/c.db"):
        answer = vllmops("responses", "check-store", f"sqlite:///{tmp_path}/{name}", "--json")
        assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "store.unavailable")
        assert "server" not in answer.error["hint"]


def test_rows_of_other_types(tmp_path: Path, vllmops: Any) -> None:
    """SQLite keeps any value in any column."""
    url = f"sqlite:///{tmp_path}/responses.db"
    store_damaged_responses(url)
    with closing(sqlite3.connect(tmp_path / "responses.db")) as file:
        file.execute("UPDATE vllmops_responses SET model = x'ff00' WHERE id = 'resp_list'")
        file.execute("UPDATE vllmops_responses SET created_at = 'x' WHERE id = 'resp_usage'")
        file.execute("UPDATE vllmops_responses SET body = x'01ffff' WHERE id = 'resp_error'")
        file.execute("UPDATE vllmops_responses SET input = x'99' WHERE id = 'resp_empty'")
        file.commit()
    answer = vllmops("responses", "list", "--store", url, "--all")
    assert answer.code == 0, answer
    assert answer.out.count("damaged") == len(BAD)
    for name in BAD:
        assert vllmops("responses", "show", name, "--store", url).code == 0


def test_events_that_can_not_be_read(tmp_path: Path, vllmops: Any) -> None:
    url = f"sqlite:///{tmp_path}/responses.db"
    store_damaged_responses(url)
    for events in (
        b"\x01junk",
        compression.PLAIN + b"[1",
        compression.PLAIN + b"[[]]",
        compression.PLAIN + DEEP,
    ):
        with closing(sqlite3.connect(tmp_path / "responses.db")) as file:
            file.execute("DELETE FROM vllmops_events")
            file.execute("INSERT INTO vllmops_events VALUES ('resp_good', 0, 0, 1.0, ?)", (events,))
            file.commit()
        answer = vllmops("responses", "show", "resp_good", "--events", "--store", url, "--json")
        error = answer.error["code"] if answer.code else ""
        assert (answer.code, error) in {(0, ""), (1, "responses.damaged")}, answer


# -- a server that says what it likes


def page(*parts: bytes, more: bool = False, last: bytes = b"null") -> bytes:
    tail = b"true" if more else b"false"
    return b'{"object":"list","data":[%s],"has_more":%s,"last_id":%s}' % (
        b",".join(parts),
        tail,
        last,
    )


@pytest.fixture
def hostile() -> Iterator[Callable[..., str]]:
    """A server whose answers a test makes; gives its URL."""
    servers = []

    def serve(answer: Callable[[str, dict[str, list[str]]], bytes]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                body = answer(parts.path, parse_qs(parts.query))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for item in servers:
        item.shutdown()
        item.server_close()


def test_a_server_that_gives_what_is_no_response(hostile: Any, vllmops: Any) -> None:
    parts = [
        b
        for name, b in BAD.items()
        if name not in {"resp_empty", "resp_half", "resp_deep", "resp_text"}
    ]
    odd = [b"7", b"null", b'"x"', b'{"id":5}', b'{"id":""}', b'{"x":1}', b'{"id":"a","model":[]}']
    url = hostile(lambda *_: page(*parts, *odd, GOOD))
    answer = vllmops("responses", "list", "-t", url, "--json")
    assert answer.code == 0, answer
    found = json.loads(answer.out)["data"]["responses"]
    assert len(found) == len(parts) + len(odd) + 1
    assert [item["id"] for item in found if not item["damaged"]] == ["resp_good"]
    assert {"resp_status", "resp_type", "a"} <= {item["id"] for item in found}
    answer = vllmops("responses", "list", "-t", url)
    assert answer.code == 0, answer
    assert answer.out.count("damaged") == len(found) - 1


@pytest.mark.parametrize(
    "body",
    sample_cases(
        [
            DEEP,
            b"[" + DEEP,
            b'{"object":' + DEEP,
            page(DEEP),
            b"\xff",
            b"",
            b"{}",
            page(b'{"x":NaN}', b"x"),
        ],
        3,
    ),
    ids=["deep", "deeper", "deep list", "deep page", "no text", "nothing", "no list", "NaN"],
)
def test_a_server_that_answers_nonsense(hostile: Any, vllmops: Any, body: bytes) -> None:
    url = hostile(lambda *_: body)
    for words in (
        ("list",),
        ("show", "resp_1"),
        ("show", "resp_1", "--input"),
        ("stats",),
        ("export", "-o", "/dev/null", "--force"),
    ):
        answer = vllmops("responses", *words, "-t", url, "--json")
        assert answer.error["code"].startswith("responses."), answer


@pytest.mark.parametrize(
    "body", [b for n, b in BAD.items() if n.startswith(("resp_st", "resp_ty", "resp_ma"))]
)
def test_a_server_s_damaged_response_is_shown(hostile: Any, vllmops: Any, body: bytes) -> None:
    url = hostile(lambda path, _: page(body) if path.endswith("input_items") else body)
    for words in ((), ("--input",), ("--raw",), ("--json",)):
        answer = vllmops("responses", "show", "resp_1", "-t", url, *words)
        assert answer.code == 0, answer


def test_a_server_whose_list_goes_round(hostile: Any, vllmops: Any) -> None:
    url = hostile(lambda *_: page(GOOD, b"{}", more=True, last=b'"resp_good"'))
    for words in (("list", "--all"), ("stats",), ("purge", "--status", "failed", "--dry-run")):
        answer = vllmops("responses", *words, "-t", url, "--json", timeout_s=60)
        assert (answer.code, answer.error["code"]) == (1, "responses.refused"), answer


def test_a_server_whose_input_goes_round(hostile: Any, vllmops: Any) -> None:
    def answer(path: str, _: Any) -> bytes:
        if path.endswith("input_items"):
            return page(b'{"role":"user"}', more=True, last=b'"i"')
        return GOOD

    shown = vllmops(
        "responses", "show", "resp_good", "--input", "-t", hostile(answer), "--json", timeout_s=60
    )
    assert (shown.code, shown.error["code"]) == (1, "responses.refused"), shown


# -- lines


def line(name: str, **fields: Any) -> bytes:
    body = {"id": name, "object": "response", "status": "completed", "output": []}
    return json.dumps(
        {
            "vllmops": 1,
            "id": name,
            "owner": "",
            "model": "m",
            "status": "completed",
            "created_at": 1e9,
            "response": body,
            "input": [],
            **fields,
        }
    ).encode()


def import_lines(vllmops: Any, url: str, path: Path, content: bytes) -> tuple[int, dict[int, str]]:
    """How many were taken, and why the others were not, by their lines."""
    path.write_bytes(content)
    answer = vllmops("responses", "import", str(path), "--store", url, "--json")
    data = json.loads(answer.out)["data"]
    assert (answer.code, bool(answer.code)) == (int(bool(data["broken"])), bool(data["broken"])), (
        answer
    )
    return data["count"], {item["line"]: item["reason"] for item in data["broken"]}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
def test_bad_lines_are_named_and_the_others_taken(
    kind: str, request: Any, tmp_path: Path, vllmops: Any
) -> None:
    url = f"sqlite:///{tmp_path}/responses.db"
    if kind != "sqlite":
        server = request.getfixturevalue("shared_servers")[kind]
        url = f"{server.url}?namespace=lines"
    odd = [
        b'{"id":' + DEEP,
        DEEP,
        line("resp_2", response={"id": "resp_2", "status": 3}),
        line("resp_3", created_at=1e308),
        line("resp_4", model="a\0b"),
        line("resp_5", events=[{"first": 2**70, "events": [{"type": "a"}]}]),
        line("resp_6", input=[{"type": 5}]),
        b"\xff\xfe\0",
        line("../x"),
    ]
    lines = [line("resp_first"), *odd, line("resp_last"), line("resp_first"), b"", line("resp_end")]
    count, broken = import_lines(vllmops, url, tmp_path / "a.jsonl", b"\n".join(lines))
    assert count == 3
    assert sorted(broken) == [*range(2, 11), 12]
    assert "line 1" in broken[12]
    answer = vllmops("responses", "list", "--store", url, "--json")
    assert answer.code == 0
    assert {item["id"] for item in json.loads(answer.out)["data"]["responses"]} == {
        "resp_first",
        "resp_last",
        "resp_end",
    }


def test_a_line_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    most = 1 << 20
    path.write_bytes(b"a\n" + b"x" * (most + 5) + b"\nb\n" + b"y" * (most + 1))
    with path.open("rb") as file:
        found = list(number_lines(file, most))
    assert found == [(1, b"a\n"), (2, None), (3, b"b\n"), (4, None)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/dev/zero", "responses.unreadable"),
        pytest.param("/proc/self/mem", "responses.unreadable", marks=long),
        ("/", "file.unreadable"),
    ],
)
def test_import_refuses_special_files_and_folders(
    name: str, code: str, tmp_path: Path, vllmops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long a line really may be is seen where it comes from standard input.
    lines = import_module("vllmops_responses.commands.responses.import_")
    monkeypatch.setattr(lines, "LONGEST_LINE", 64 << 20)
    monkeypatch.setattr(lines, "ENDLESS", lines.LONGEST_LINE + 1)
    answer = vllmops("responses", "import", name, "--store", f"sqlite:///{tmp_path}/r.db", "--json")
    assert answer.error["code"] == code, answer


def test_an_export_tells_a_person_what_it_left_out(tmp_path: Path, vllmops: Any) -> None:
    url = f"sqlite:///{tmp_path}/responses.db"
    store_damaged_responses(url)
    answer = vllmops("responses", "export", "--store", url)
    assert answer.code == 1, answer
    assert [json.loads(item)["id"] for item in answer.out.splitlines()] == ["resp_good"]
    assert "left out (damaged): resp_" in answer.err
    assert "error: unexpected" not in answer.err
