"""Items that vLLM does not render, as items that it does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseInputItemParam
from pydantic import TypeAdapter
from pydantic_core import PydanticCustomError
from tests.support.items import FILE, ITEMS

from vllmops_responses.server import item_rendering
from vllmops_responses.server.item_rendering import AGENT_MESSAGE, render_item

TEXT: dict[str, Any] = {"type": "input_text", "text": "hi"}


def test_there_is_an_item_of_every_type() -> None:
    others = {item["type"] for item in ITEMS}
    assert others | item_rendering.RENDERED == item_rendering.KNOWN
    typed: Any = TypeAdapter(ResponseInputItemParam)
    for item in ITEMS:
        if item["type"] != AGENT_MESSAGE:
            typed.validate_python(item)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["type"])
def test_every_item_becomes_one_that_vllm_renders(item: dict[str, Any]) -> None:
    item_rendering.validate_types([item], None)
    made = render_item(item)
    assert made["type"] in {"message", "function_call", "function_call_output"}
    if item["type"] in item_rendering.SKIPPED:
        assert made["content"] == []
        return
    assert render_item(made) == made
    said = json.dumps(made)
    named = (item.get("call_id"), item["type"], item.get("id"), AGENT_MESSAGE)
    assert any(name and name in said for name in named) or item["type"] == AGENT_MESSAGE
    assert "AAAA" not in said
    assert ("(a file)" in said) == (FILE in json.dumps(item) or "AAAA" in json.dumps(item))
    assert item.get("status") != "completed" or "completed" not in said


def test_calls_and_outputs_of_built_in_tools_are_those_of_functions() -> None:
    by_type = {item["type"]: render_item(item) for item in ITEMS}
    assert by_type["shell_call"] == {
        "type": "function_call",
        "call_id": "call_4",
        "name": "shell",
        "arguments": '{"action":{"commands":["ls"]}}',
    }
    assert "exit_code" in by_type["shell_call_output"]["output"]
    assert by_type["local_shell_call_output"] == {
        "type": "function_call_output",
        "call_id": "call_3",
        "output": "lamp.txt",
    }
    assert by_type["local_shell_call"]["call_id"] == "call_3"


def test_who_said_it_is_told() -> None:
    by_type = {item["type"]: render_item(item) for item in ITEMS}
    told = by_type[AGENT_MESSAGE]
    assert (told["role"], told["content"][0]["text"]) == (
        "user",
        "Message from /root/reader to /root: the lamp is on",
    )
    assert by_type["web_search_call"]["role"] == "assistant"
    assert by_type["mcp_approval_response"]["role"] == "user"


def test_what_failed_or_was_denied_is_told() -> None:
    denied = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False}
    assert "false" in render_item(denied)["content"][0]["text"]
    asked = next(item for item in ITEMS if item["type"] == "mcp_approval_request")
    assert "mcpr_1" in render_item(asked)["content"][0]["text"]
    for status in ("completed", "failed"):
        patched = {"type": "apply_patch_call_output", "call_id": "c", "status": status}
        assert status in render_item(patched)["output"]
    hosted: dict[str, Any] = {
        "type": "tool_search_output",
        "id": "ts_1",
        "call_id": None,
        "tools": [],
    }
    assert render_item(hosted)["type"] == "message"


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ({"type": "wobble", "content": [TEXT]}, "'wobble'"),
        ({"type": 5}, "5"),
        ({"type": ["message"]}, "message"),
        ({"type": "message", "role": "tool", "content": "x"}, "'tool'"),
        ({"role": ["user"], "content": "x"}, "user"),
        ({"content": "x"}, "neither a type nor a role"),
        ({}, "neither a type nor a role"),
    ],
)
def test_an_unknown_item_is_named(item: Any, what: str) -> None:
    with pytest.raises(PydanticCustomError) as refused:
        item_rendering.validate_types([{"role": "user", "content": "x"}, item], "x")
    assert refused.value.context == {
        "place": "input[1]",
        "what": refused.value.message().split(" ", 1)[1],
    }
    assert what in refused.value.message()


@pytest.mark.parametrize(
    ("item", "is_one"),
    [
        ({"type": "item_reference", "id": "msg_1"}, True),
        ({"type": None, "id": "msg_1"}, True),
        ({"id": "msg_1"}, True),
        ({"type": "compaction_trigger", "id": "ct_1"}, False),
        ({"id": "msg_1", "role": "user", "content": "x"}, False),
        ("msg_1", False),
    ],
)
def test_what_stands_for_a_stored_item(item: Any, is_one: bool) -> None:
    assert item_rendering.is_reference(item) == is_one


@pytest.mark.parametrize("tool", [{"type": "wobble"}, {}, {"type": ["function"]}])
def test_an_unknown_tool_is_named(tool: Any) -> None:
    with pytest.raises(PydanticCustomError, match=r"tools\[1\] is of type "):
        item_rendering.validate_types("x", [{"type": "web_search"}, tool])


def test_several_texts_are_one() -> None:
    parts: list[Any] = [{"type": "output_text", "text": text, "annotations": []} for text in "ab"]
    assert item_rendering.join_texts(parts, " ") == [{**parts[0], "text": "a b"}]
    assert item_rendering.join_texts(parts[:1], " ") == parts[:1]
    assert item_rendering.join_texts([*parts, {"type": "image"}], " ")[2:] == [{"type": "image"}]
