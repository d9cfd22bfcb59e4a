"""What comes in is checked by what goes out: no line of an archive breaks what shows it."""

from __future__ import annotations

import msgspec
import pytest

from vllmops_responses.store import compression, response_archive, response_schema
from vllmops_responses.store.backend import Response
from vllmops_responses.store.response_archive import decode_line
from vllmops_responses.store.response_store import EventBatch, encode_response

BODY = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
LINE = {
    "vllmops": 1,
    "id": "resp_1",
    "owner": "",
    "model": "m",
    "status": "completed",
    "created_at": 1e9,
    "previous_response_id": None,
    "error": "",
    "response": BODY,
    "input": [],
    "events": [],
}


def line(**fields: object) -> bytes:
    return msgspec.json.encode({**LINE, **fields})


def body(**fields: object) -> bytes:
    return line(response={**BODY, **fields})


def raw(name: str, text: bytes) -> bytes:
    """A line with a field that no encoder would write."""
    return msgspec.json.encode({**LINE, name: None}).replace(
        b'"%s":null' % name.encode(), b'"%s":%s' % (name.encode(), text)
    )


GOOD = {
    "as it is": line(),
    "all of it": line(
        response={
            **BODY,
            "background": True,
            "usage": {"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"x": 1}},
            "error": {"code": "server_error", "message": "why"},
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text"}]},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"type": "computer_call_output", "output": {"type": "screenshot"}},
                {"type": "mcp_call", "name": "n", "arguments": "{}", "output": None},
            ],
        },
        input=[{"role": "user", "content": "a"}, {"role": "user", "content": [{"text": "b"}]}],
        events=[{"first": 3, "events": [{"type": "a", "sequence_number": 3}]}],
        previous_response_id="resp_0",
    ),
    "brackets in a text": body(instructions="[{" * 1000),
    "many brackets": body(tools=[{} for _ in range(1000)]),
    "a nul in a text": raw("response", b'{"id":"resp_1","instructions":"a\\u0000b"}'),
}
DEEP = b"[" * 100_000
BAD = {
    "deep": DEEP,
    "deep in a field": b'{"id":' + DEEP,
    "deep, and whole": raw("response", b'{"id":"resp_1","x":' + b"[" * 300 + b"]" * 300 + b"}"),
    "deep input": raw("input", b"[" * 300 + b"]" * 300),
    "deep behind a text": raw("response", b'{"y":"\\"","x":' + b"[" * 300 + b"]" * 300 + b"}"),
    "status": body(status=3),
    "made": body(created_at=1e308),
    "made before": body(created_at=-5),
    "type": body(output=[{"type": 5}]),
    "role": body(output=[{"role": {}}]),
    "an item that is none": body(output=["x"]),
    "output": body(output={}),
    "usage": body(usage=7),
    "tokens": body(usage={"input_tokens": -1}),
    "tokens in all": body(usage={"input_tokens": 1, "output_tokens": 1, "total_tokens": "x"}),
    "cached tokens": body(usage={"input_tokens_details": {"cached_tokens": "x"}}),
    "kinds of tokens": body(usage={"output_tokens_details": []}),
    "tokens of turns": body(usage={"input_tokens_details": {"input_tokens_per_turn": ["x"]}}),
    "object": body(object=5),
    "incomplete": body(incomplete_details="x"),
    "instructions": body(instructions=5),
    "metadata": body(metadata=[]),
    "parallel": body(parallel_tool_calls="x"),
    "temperature": body(temperature="x"),
    "choice": body(tool_choice=5),
    "tools": body(tools={}),
    "a tool": body(tools=["x"]),
    "top_p": body(top_p="x"),
    "most tokens": body(max_output_tokens="x"),
    "most calls": body(max_tool_calls=1.5),
    "prompt": body(prompt="x"),
    "reasoning": body(reasoning="x"),
    "tier": body(service_tier=5),
    "text": body(text="x"),
    "top_logprobs": body(top_logprobs="x"),
    "truncation": body(truncation=5),
    "user": body(user=5),
    "penalty": body(presence_penalty="x"),
    "an item's id": body(output=[{"type": "message", "id": 5}]),
    "an event's own number": line(
        events=[{"first": 0, "events": [{"type": "a", "sequence_number": "x"}]}]
    ),
    "very many tokens": body(usage={"input_tokens": 10**30}),
    "error": body(error="x"),
    "background": body(background="yes"),
    "model": body(model=["m"]),
    "another's id": body(id="resp_2"),
    "no object": line(response=[]),
    "input's type": line(input=[{"type": 5}]),
    "input": line(input={}),
    "when": line(created_at=1e308),
    "when before": line(created_at=-1),
    "NaN": raw("created_at", b"NaN"),
    "infinite": raw("created_at", b"Infinity"),
    "too large": raw("created_at", b"1e999"),
    "NaN inside": raw("response", b'{"temperature":NaN}'),
    "too large inside": raw("response", b'{"temperature":1e999}'),
    "very many digits": raw("response", b'{"seed":' + b"9" * 5000 + b"}"),
    "half a character": raw("response", b'{"x":"\\ud800"}'),
    "half a character outside": raw("model", b'"\\ud800"'),
    "no UTF-8": raw("response", b'{"x":"\xff"}'),
    "no UTF-8 outside": raw("model", b'"\xff"'),
    "nul": raw("model", b'"a\\u0000b"'),
    "nul in an error": raw("error", b'"a\\u0000b"'),
    "no id": line(id=""),
    "a number": line(id=7),
    "an id of too many letters": line(id="x" * 300),
    "a path": line(id="../../etc/passwd"),
    "a path from the root": line(id="/etc/passwd"),
    "a path through a folder": line(id="a/../b"),
    "a path of a folder": line(id="a/"),
    "a dot": line(id=".."),
    "another path": line(id="a\\b"),
    "a control character": line(id="a\x1b[2Jb"),
    "a line": line(id="a\nb"),
    "right to left": line(id="a\u202eb"),
    "the turn before": line(previous_response_id="../b"),
    "a turn before that is none": line(previous_response_id=7),
    "events": line(events=[{"first": -1, "events": []}]),
    "an event's number": line(events=[{"first": 10**30, "events": []}]),
    "an event's type": line(events=[{"first": 0, "events": [{"type": 5}]}]),
    "an event that is none": line(events=[{"first": 0, "events": ["x"]}]),
    "a version": line(vllmops=2),
    "an owner": line(owner="x"),
    "it runs": line(status="queued"),
    "no status": line(status="done"),
    "a status that is none": line(status=3),
}


@pytest.mark.parametrize("name", GOOD)
def test_valid_lines_are_decoded(name: str) -> None:
    response, events = decode_line(GOOD[name])
    again = response_archive.encode_line(response, events)
    assert decode_line(again) == (response, events)
    response_schema.parse_response(response)


@pytest.mark.parametrize("name", BAD)
def test_invalid_lines_are_refused_with_a_short_reason(name: str) -> None:
    """As ValueError, which names the line and takes the next one."""
    with pytest.raises(ValueError, match=r".") as caught:
        decode_line(BAD[name])
    assert len(f"{caught.value}") < 500


DAMAGED = [b"", b"[]", b"{", b'"x"', b'{"x":' + DEEP, b"\xff", b"null"]


@pytest.mark.parametrize("data", [*DAMAGED, b'{"status":3}', b'{"status":{}}'], ids=repr)
def test_a_server_has_an_object_for_what_is_damaged(data: bytes) -> None:
    found = msgspec.json.decode(
        encode_response(
            Response(id="r", owner="", model="m", status="failed", error="why", body=data)
        )
    )
    assert (found["status"], found["error"]["message"]) == ("failed", "why")
    found = msgspec.json.decode(
        encode_response(Response(id="r", owner="", model="m", status="completed", body=data))
    )
    assert found["status"] == "completed"


@pytest.mark.parametrize(
    "data", [b"", b"\x03x", b"\x01", b"\x02", b"\x01garbage", compression.deflate(b"a" * 200)[:-3]]
)
def test_data_that_can_not_be_inflated_raises_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="compress"):
        compression.inflate(data)


def test_data_packed_by_an_earlier_version_is_unpacked() -> None:
    packed = b"\x01C.I\x0c\x81\x91\x8e-\xc7cOU\xd8\xf3\x05Q\x96\x02\x00"
    body = (
        b'{"id":"resp_1","object":"response","status":"completed","tools":[],"top_p":1.0,'
        b'"output_messages":null,"metrics":null}'
    )
    assert compression.inflate(packed) == body


def test_events_are_as_they_were() -> None:
    made = Response(id="r", owner="", model="m", status="completed", body=b"{}")
    events = [EventBatch(2, [b'{"type":"a","x":1.50}'])]
    assert decode_line(response_archive.encode_line(made, events)) == (made, events)
