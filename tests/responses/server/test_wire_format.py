"""What goes over the wire: items, lists, events, and what a request adds to its conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllmops_responses.server import wire_format
from vllmops_responses.server.wire_format import ApiError
from vllmops_responses.store.backend import Response


def turn(given: list[Any], output: list[Any]) -> Response:
    body = json.dumps({"id": "resp_1", "output": output, "usage": {"input_tokens": 7}}).encode()
    items = json.dumps(given).encode()
    return Response(id="resp_1", owner="", model="m", status="completed", body=body, input=items)


USER = {"role": "user", "content": "hello"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "b"}],
}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def test_a_text_is_a_message_of_the_user() -> None:
    assert json.loads(wire_format.extract_input_items(b'{"input":"hello","model":"m"}')) == [
        {"type": "message", **USER}
    ]


def test_items_are_kept_as_they_came() -> None:
    body = json.dumps({"model": "m", "input": [USER, REASONING, CALL]}).encode()
    assert json.loads(wire_format.extract_input_items(body)) == [USER, REASONING, CALL]


def test_no_input_adds_nothing() -> None:
    assert [wire_format.extract_input_items(body) for body in (b"{}", b'{"input":null}')] == [
        b"[]",
        b"[]",
    ]


@pytest.mark.parametrize(
    "body", [b'{"input":1}', b'{"input":[1]}', b'{"input":[{"a":NaN}]}', b'{"input":']
)
def test_input_that_can_not_be_stored_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        wire_format.extract_input_items(body)
    assert (caught.value.status, caught.value.param) == (400, "input")


HALF = b'"\xed\xa0\x80"'  # as Python reads it, and no answer can have it


@pytest.mark.parametrize("text", [HALF, rb'"\ud800"', rb'"\uDC00"', rb'["\ud83d\ude00", "\ud83d"]'])
def test_a_text_that_no_answer_can_repeat_is_refused(text: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        wire_format.validate_utf8(b'{"metadata":{"a":%b}}' % text)
    assert caught.value.status == 400


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud83d\\ude00", "\\\\ud800", "a"])
def test_a_text_that_an_answer_can_repeat(text: str) -> None:
    wire_format.validate_utf8(f'{{"input":"{text}"}}'.encode())


def test_pages_of_items() -> None:
    given = turn([{"role": "user", "content": str(n)} for n in range(5)], [])

    def page(after: str | None, limit: int, descending: bool) -> Any:
        return json.loads(
            wire_format.encode_input_items(
                given, after_id=after, limit=limit, descending=descending
            )
        )

    first = page(None, 2, False)
    assert [item["content"][0]["text"] for item in first["data"]] == ["0", "1"]
    assert (first["first_id"], first["has_more"]) == (first["data"][0]["id"], True)
    rest = page(first["last_id"], 3, False)
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "3", "4"]
    assert not rest["has_more"]
    assert page(first["last_id"], 9, True)["data"] == [first["data"][0]]
    assert page(first["first_id"], 9, True) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    with pytest.raises(ApiError):
        page("resp_1", 2, False)


def test_an_item_with_an_id_keeps_it() -> None:
    found = json.loads(
        wire_format.encode_input_items(
            turn([REASONING], []), after_id=None, limit=1, descending=True
        )
    )
    assert found["data"] == [REASONING]


def test_each_item_has_an_id_that_a_page_can_begin_after() -> None:
    said = {"type": "message", "role": "user", "status": None}
    names = [None, "", 5, "mine", "mine"]
    given = turn([{**said, "id": name, "content": str(n)} for n, name in enumerate(names)], [])
    texts, after = [], None
    for _ in names:
        page = json.loads(
            wire_format.encode_input_items(given, after_id=after, limit=1, descending=False)
        )
        (item,) = page["data"]
        assert (item["id"], item["status"]) == (page["last_id"], "completed")
        texts.append(item["content"][0]["text"])
        after = page["last_id"]
    assert not page["has_more"]
    assert texts == ["0", "1", "2", "3", "4"]


def test_the_event_that_ends_a_stream() -> None:
    frame = wire_format.make_final_event("cancelled", 7, b'{"id":"resp_1","status":"cancelled"}')
    assert frame.type == "response.cancelled"
    assert json.loads(frame.data) == {
        "type": "response.cancelled",
        "sequence_number": 7,
        "response": {"id": "resp_1", "status": "cancelled"},
    }


@pytest.mark.parametrize("kind", ["function", "custom_tool", "local_shell"])
def test_an_output_needs_its_call(kind: str) -> None:
    call = {"type": f"{kind}_call", "call_id": "a"}
    output = {"type": f"{kind}_call_output", "call_id": "a"}
    wire_format.validate_tool_outputs([output], [call, output])
    wire_format.validate_tool_outputs([call, output], [call, output])
    wire_format.validate_tool_outputs([], [output])  # what is there already is not looked at
    for call_id in ("b", None):
        wrong = {**output, "call_id": call_id}
        with pytest.raises(wire_format.ApiError) as refused:
            wire_format.validate_tool_outputs([wrong], [call, wrong])
        assert (refused.value.status, refused.value.param) == (400, "input")


@pytest.mark.parametrize(
    ("item_id", "response_id"),
    [
        ("msg_8ae2_0", "resp_8ae2"),
        ("function_call_output_8ae2_12", "resp_8ae2"),
        (wire_format.make_item_id("msg_1f", "resp_a_b", 3), "resp_a_b"),
        (wire_format.make_item_id("fc_1f", "mine", 0), "mine"),
        (wire_format.make_item_id("reasoning", "resp_mine", 0), "resp_mine"),
    ],
)
def test_the_id_of_an_item_tells_its_response(item_id: str, response_id: str) -> None:
    assert response_id in wire_format.list_response_ids(item_id)


@pytest.mark.parametrize("item_id", ["", "_", "msg", "msg_8ae2", "_" * 10_000, "a_" * 10_000])
def test_the_id_of_no_item_of_ours_costs_little(item_id: str) -> None:
    assert len(wire_format.list_response_ids(item_id)) <= 2 * wire_format.WORDS
