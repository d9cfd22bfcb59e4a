"""What vLLM's renderers make of the turns before, for chat models and for gpt-oss."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from typing import Any

import pytest

from vllmops_responses.server import wire_format
from vllmops_responses.server.carriers import carrier_merge
from vllmops_responses.server.conversations.turn_history import HistoryReader
from vllmops_responses.store.backend import Response
from vllmops_responses.store.compression import deflate

pytestmark = pytest.mark.usefixtures("imported_vllm")

RESPONSES = "vllm.entrypoints.openai.responses"

OUTPUT: list[dict[str, Any]] = [
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
TEXT = {"type": "output_text", "text": "", "annotations": []}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "it is on"}


def turn(given: Any, output: list[Any]) -> Response:
    items = deflate(wire_format.extract_input_items(json.dumps({"input": given}).encode()))
    body = deflate(json.dumps({"output": output}).encode())
    return Response(id="r", owner="", model="m", status="completed", body=body, input=items)


def vllm(module: str) -> Any:
    """A module of vLLM's; whoever only collects tests need not wait for it."""
    return import_module(f"{RESPONSES}.{module}")


def read_stored_items(*, harmony: bool) -> list[Any]:
    """What a store holds of the turns."""
    turns = [turn("light, please", OUTPUT), turn([RESULT], [])]
    return list(asyncio.run(HistoryReader(list, harmony=harmony).read_turns(turns)).items)


def make_sealed_items(*, harmony: bool) -> list[Any]:
    """What a carrier holds of them."""
    words = map(
        carrier_merge.drop_unneeded_fields,
        wire_format.select_history_items(OUTPUT, harmony=harmony),
    )
    return [{"role": "user", "content": "light, please"}, *words, RESULT]


def make_signed_items(*, harmony: bool) -> list[Any]:
    """What a carrier of format 1 holds of them."""
    messages = import_module("vllmops_responses.server.item_conversion").convert_items_to_messages(
        make_sealed_items(harmony=harmony)
    )
    return carrier_merge.convert_messages_to_items(json.loads(json.dumps(messages)))


WAYS = [read_stored_items, make_sealed_items, make_signed_items]


def parse_items(items: list[Any]) -> list[Any]:
    found: list[Any] = import_module("vllmops_responses.server.item_conversion").parse_items(items)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_for_a_chat_model(way: Any) -> None:
    construct = vllm("utils").construct_input_messages
    messages = construct(request_input=parse_items(way(harmony=False)))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[0]["content"] == "light, please"
    words = messages[1]
    assert (words["reasoning"], words["content"]) == ("it is dark", "on it")
    assert [call["function"]["name"] for call in words["tool_calls"]] == ["lamp"]
    assert (messages[2]["tool_call_id"], messages[2]["content"]) == ("c", "it is on")


@pytest.mark.parametrize("way", WAYS)
def test_for_gpt_oss(way: Any) -> None:
    before: list[Any] = []
    messages = []
    for item in parse_items(way(harmony=True)):
        messages.append(vllm("harmony").response_input_to_harmony(item, before))
        before.append(item)
    shown = [(m.author.role.value, m.channel, m.recipient, m.content[0].text) for m in messages]
    assert shown == [
        ("user", None, None, "light, please"),
        ("assistant", "analysis", None, "it is dark"),
        ("assistant", "final", None, "on it"),
        ("assistant", "commentary", "functions.lamp", "{}"),
        ("tool", "commentary", "assistant", "it is on"),
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
def test_images_and_sounds_come_as_they_were(part: Any) -> None:
    item = {"role": "user", "content": [part, {"type": "input_text", "text": "what is it?"}]}
    messages = import_module("vllmops_responses.server.item_conversion").convert_items_to_messages(
        [item]
    )
    for items in ([item], carrier_merge.convert_messages_to_items(messages)):
        (made,) = vllm("utils").construct_input_messages(request_input=parse_items(items))
        was, words = made["content"]
        assert was == ({"detail": "auto", **part} if part["type"] == "input_image" else part)
        assert words == item["content"][1]


def test_an_answer_of_no_words_is_left_out() -> None:
    words = {"id": "msg_1", "role": "assistant", "status": "completed"}
    empty = {**words, "type": "message", "content": []}
    items = [{"role": "user", "content": "well?"}, empty, {**empty, "content": [TEXT]}]
    for given in (items, parse_items(items)):
        assert [wire_format.is_empty_answer(item) for item in given] == [False, True, False]
