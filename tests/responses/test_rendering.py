"""What vLLM's renderers make of the turns before, for chat models and for gpt-oss."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from vllmops.responses import wire
from vllmops.responses.store import Response

RESPONSES = "vllm.entrypoints.openai.responses"

OUTPUT = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "it is dark"}],
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "on it", "annotations": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "lamp", "arguments": "{}"},
]
RESULT = {"type": "function_call_output", "call_id": "c", "output": "it is on"}


def turn(given: Any, output: list[Any]) -> Response:
    items = wire.added(json.dumps({"input": given}).encode())
    body = json.dumps({"output": output}).encode()
    return Response(id="r", owner="", model="m", status="completed", body=body, input=items)


def vllm(module: str) -> Any:
    """A module of vLLM's; whoever only collects tests need not wait for it."""
    return import_module(f"{RESPONSES}.{module}")


def parsed(*, harmony: bool) -> list[Any]:
    history = [turn("light, please", OUTPUT), turn([RESULT], [])]
    items = wire.earlier(history, harmony=harmony)
    request = vllm("protocol").ResponsesRequest
    found: list[Any] = request.input_item_parsing({"input": items})["input"]
    return found


def test_for_a_chat_model() -> None:
    construct = vllm("utils").construct_input_messages
    messages = construct(request_input=parsed(harmony=False))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[0]["content"] == "light, please"
    said = messages[1]
    assert (said["reasoning"], said["content"]) == ("it is dark", "on it")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["lamp"]
    assert (messages[2]["tool_call_id"], messages[2]["content"]) == ("c", "it is on")


def test_for_gpt_oss() -> None:
    before: list[Any] = []
    messages = []
    for item in parsed(harmony=True):
        messages.append(vllm("harmony").response_input_to_harmony(item, before))
        before.append(item)
    told = [(m.author.role.value, m.channel, m.recipient, m.content[0].text) for m in messages]
    assert told == [
        ("user", None, None, "light, please"),
        ("assistant", "analysis", None, "it is dark"),
        ("assistant", "final", None, "on it"),
        ("assistant", "commentary", "functions.lamp", "{}"),
        ("tool", "commentary", "assistant", "it is on"),
    ]
