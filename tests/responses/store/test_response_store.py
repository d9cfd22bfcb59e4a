"""What the store does around a backend: packing, credentials, URLs, and its weight."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmops.model.environment import STORE_CLASS
from vllmops.support.errors import VllmopsError
from vllmops.support.urls import redact_url
from vllmops_responses.store import (
    backend,
    backend_factory,
    compression,
    credential_redaction,
    response_defaults,
)
from vllmops_responses.store.backend import LastUseBuffer, Limits, Response
from vllmops_responses.store.response_store import encode_response

URLS = {
    "memory://": "Memory",
    "sqlite:///some.db": "Sqlite",
    "postgresql://u:p@h/d": "Postgresql",
    "postgres://u:p@h/d?sslmode=disable": "Postgresql",
    "redis://h:1/0": "Redis",
    "valkey://h": "Redis",
    "rediss://h": "Redis",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.text() | st.integers(-(2**53), 2**53),
    lambda item: st.lists(item, max_size=3) | st.dictionaries(st.text(), item, max_size=3),
)


@given(st.binary())
def test_inflate_restores_deflated_data(data: bytes) -> None:
    assert compression.inflate(compression.deflate(data)) == data
    assert len(compression.deflate(data)) <= len(data) + 1


def test_a_response_takes_a_quarter_of_its_json() -> None:
    message = {"id": "msg_0123456789abcdef", "content": [{"annotations": [], "text": "Hello."}]}
    body = msgspec.json.encode(
        {"id": "resp_0123456789abcdef", "created_at": 1795294950, "incomplete_details": None}
        | {"instructions": None, "metadata": None, "model": "demo", "object": "response"}
        | {"output": [message], "parallel_tool_calls": True, "temperature": 1.0, "tools": []}
        | {"top_p": 1.0, "background": False, "max_output_tokens": 100, "status": "completed"}
    )
    assert len(compression.deflate(body)) < len(body) / 4


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown compression"):
        compression.inflate(b"\x07abc")


@given(JSON)
def test_redaction_takes_any_tools(tools: object) -> None:
    body = msgspec.json.encode({"status": "completed", "tools": tools, "x": "Bearer kept"})
    assert msgspec.json.decode(credential_redaction.redact_body(body))["x"] == "Bearer kept"
    event = b'{"type":"response.created","response":%s}' % body
    assert b"response.created" in credential_redaction.redact_event(event)


def test_redaction_removes_secrets_of_tools_and_keeps_the_rest() -> None:
    schema = {"type": "object", "properties": {"token": {"type": "string", "default": "kept"}}}
    tools = [
        {"type": "function", "name": "get_token", "description": "kept", "parameters": schema},
        {
            "type": "mcp",
            "server_url": "https://u:hush@host:1/mcp?api_key=hush#hush",
            "headers": {"X-Anything": "hush", "nested": {"a": ["hush"]}},
            "authorization": "hush",
            "access_token": "hush",
            "require_approval": "never",
            "allowed_tools": ["kept"],
        },
        {"type": "shell", "environment": {"domain_secrets": [{"name": "hush", "value": "hush"}]}},
    ]
    found = credential_redaction.redact_body(msgspec.json.encode({"tools": tools}))
    assert b"hush" not in found
    function, mcp, _ = msgspec.json.decode(found)["tools"]
    assert function == tools[0]
    assert mcp["server_url"] == "https://host:1/mcp"
    assert mcp["headers"]["X-Anything"] == credential_redaction.REDACTED
    assert (mcp["require_approval"], mcp["allowed_tools"]) == ("never", ["kept"])


def test_without_tools_not_a_byte_is_touched() -> None:
    body = b'{ "status" : "completed", "tools":[],  "authorization" : "part of an answer" }'
    assert credential_redaction.redact_body(body) is body
    assert credential_redaction.redact_event(body) is body


def test_the_object_that_a_client_gets() -> None:
    body = b'{"id":"r","status":"in_progress","error":null,"completed_at":null}'
    made = Response(id="r", owner="", model="m", status="in_progress", body=body)
    assert encode_response(made) is body
    failed = msgspec.structs.replace(made, status="failed", error="it fell over")
    found = msgspec.json.decode(encode_response(failed))
    assert found["status"] == "failed"
    assert found["error"] == {"code": "server_error", "message": "it fell over"}


def test_a_stored_object_without_all_fields_gets_the_defaults() -> None:
    body = (
        b'{"id":"r","status":"completed","text":null,"top_p":0.5,"tools":[{"type":"x"}],"n":null}'
    )
    made = Response(id="r", owner="", model="m", status="completed", body=body)
    found = msgspec.json.decode(encode_response(made))
    assert found == {
        **response_defaults.DEFAULTS,
        "id": "r",
        "status": "completed",
        "top_p": 0.5,
        "tools": [{"type": "x"}],
        "n": None,
    }


def test_the_turns_before_a_turn_are_used_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []
    monkeypatch.setattr(backend, "GRAIN_S", 600.0)

    async def write(uses: list[tuple[str, float]]) -> None:
        written.append([response_id for response_id, _ in uses])

    async def main() -> None:
        uses = LastUseBuffer(write)
        for turns in ("abc", "abcd", "abcd"):
            await uses.mark_turns_used(turns)
            await uses.flush()
        await uses.mark_used("a")
        await uses.flush()
        monkeypatch.setattr(backend, "GRAIN_S", 0.0)
        await uses.mark_turns_used("abcde")
        await uses.flush()

    asyncio.run(main())
    assert written == [["a", "b", "c"], ["c", "d"], ["d"], ["a"], ["a", "b", "c", "d", "e"]]


@pytest.mark.parametrize("url", URLS)
def test_a_url_names_its_backend(url: str) -> None:
    assert type(backend_factory.make_backend(url)).__name__ == URLS[url]


@pytest.mark.parametrize(
    "url", ["", "some.db", "mysql://h", "sqlite://", "sqlite:///", "redis://h?namespace=A-b"]
)
def test_invalid_store_url_is_refused(url: str) -> None:
    with pytest.raises(VllmopsError) as output:
        backend_factory.make_backend(url)
    assert (output.value.code, output.value.exit_code) == ("usage", 2)


@pytest.mark.parametrize(
    ("url", "rest", "name"),
    [
        ("redis://h", "redis://h", "vllmops"),
        ("redis://h?namespace=blue", "redis://h", "blue"),
        ("redis://h?a=1&namespace=blue&b=2", "redis://h?a=1&b=2", "blue"),
        ("sqlite:///x?namespace=b_2", "sqlite:///x", "b_2"),
    ],
)
def test_a_namespace_is_no_part_of_what_the_driver_gets(url: str, rest: str, name: str) -> None:
    assert backend_factory.split_namespace(url) == (rest, name)


def test_a_password_is_not_told() -> None:
    assert redact_url("postgresql://ann:hush@h/d") == "postgresql://ann:…@h/d"
    assert redact_url("redis://:hush@h") == "redis://:…@h"
    with pytest.raises(VllmopsError) as output:
        backend_factory.make_backend("mysql://ann:hush@h")
    assert "hush" not in output.value.message


@pytest.mark.parametrize("named", ["nothing", "no.such.Module", "os.path.join", "json.Missing"])
def test_a_class_that_is_none(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_CLASS, named)
    with pytest.raises(VllmopsError) as output:
        backend_factory.make_backend("memory://")
    assert output.value.code == "usage"
    assert named in output.value.message


def test_a_store_for_nothing_is_refused() -> None:
    with pytest.raises(VllmopsError, match="keep none"):
        backend_factory.make_backend("memory://", Limits(max_size=0))


def test_a_driver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.delitem(sys.modules, "vllmops_responses.store.backends.postgresql", raising=False)
    with pytest.raises(VllmopsError) as output:
        backend_factory.make_backend("postgresql://h/d")
    assert (output.value.code, output.value.hint) == ("store.driver", backend_factory.EXTRA)


def test_it_imports_neither_vllm_nor_a_driver_that_nobody_asked_for() -> None:
    code = """
import sys
from vllmops_responses.store import backend_factory as opening, response_store as store
opening.make_backend("sqlite:///x.db"), opening.make_backend("memory://")
heavy = {"vllm", "torch", "asyncpg", "redis", "pydantic", "httpx", "sqlalchemy"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
