"""Each response and event has the fields that openresponses and the official client require."""

from __future__ import annotations

import json
import warnings
from typing import Any

import msgspec
import openresponses_types
import pytest
from openai.types import responses as official
from pydantic import TypeAdapter

from vllmops_responses.server import wire_format
from vllmops_responses.server.response_fields import encode_model
from vllmops_responses.store import response_defaults
from vllmops_responses.store.backend import Response
from vllmops_responses.store.response_store import encode_response

EVENT: TypeAdapter[Any] = TypeAdapter(official.ResponseStreamEvent)
BODY = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": []}
BODIES = [b"", b"{", *(json.dumps({**BODY, **x}).encode() for x in ({}, {"text": None}))]


def valid(found: dict[str, Any]) -> None:
    openresponses_types.ResponseResource.model_validate(found)
    official.Response.model_validate(found)


def test_each_required_field_has_a_default() -> None:
    valid({**response_defaults.DEFAULTS, **BODY, "status": "completed"})
    own = {"id", "created_at", "model", "object", "output", "status"}
    assert (
        openresponses_types.ResponseResource.model_fields.keys() - own
        == response_defaults.DEFAULTS.keys()
    )


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("status", "error"), [("completed", ""), ("failed", "why")])
def test_response_stored_by_an_older_version_is_valid(body: bytes, status: Any, error: str) -> None:
    made = Response(id="r", owner="", model="m", status=status, error=error, body=body)
    found = msgspec.json.decode(encode_response(made))
    valid(found)
    assert found["status"] == status


def test_an_error_in_a_stream_is_valid_for_both() -> None:
    event = json.loads(wire_format.make_error_event(3, "it fell over").data)
    openresponses_types.ErrorStreamingEvent.model_validate(event)
    EVENT.validate_python(event)


def test_unset_fields_of_an_item_are_left_out() -> None:
    text = official.ResponseOutputText(type="output_text", text="a", annotations=[])
    message = official.ResponseOutputMessage(
        id="m", type="message", role="assistant", status="completed", content=[text]
    )
    thought = official.ResponseReasoningItem(id="t", type="reasoning", summary=[])
    response = official.Response.model_validate(
        {**response_defaults.DEFAULTS, **BODY, "status": "completed", "output": [message, thought]}
    )
    with warnings.catch_warnings(action="error"):
        found = msgspec.json.decode(encode_model(response))
        ended = official.ResponseCompletedEvent(
            type="response.completed", response=response, sequence_number=0
        )
        done = official.ResponseOutputItemDoneEvent(
            type="response.output_item.done", item=message, output_index=0, sequence_number=1
        )
        part = official.ResponseContentPartDoneEvent(
            type="response.content_part.done",
            item_id="m",
            output_index=0,
            content_index=0,
            sequence_number=2,
            part=text,
        )
        events = [msgspec.json.decode(encode_model(one)) for one in (ended, done, part)]
    said: dict[str, Any] = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "status": "completed",
    }
    said["content"] = [{"type": "output_text", "text": "a", "annotations": []}]
    assert found["output"] == [said, {"id": "t", "type": "reasoning", "summary": []}]
    assert found["instructions"] is None
    valid(found)
    assert [events[0]["response"]["output"][0], events[1]["item"]] == [said, said]
    assert events[2]["part"] == said["content"][0]


def test_lists_of_vllms_in_the_usage_are_left_out() -> None:
    usage = {
        "input_tokens": 1,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 2,
    }
    lists: dict[str, Any] = {
        "input_tokens_details": {"input_tokens_per_turn": [1], "cached_tokens_per_turn": []},
        "output_tokens_details": {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []},
    }
    more = {name: {**usage[name], **lists[name]} for name in lists}  # type: ignore[dict-item]
    response = official.Response.model_validate(
        {**response_defaults.DEFAULTS, **BODY, "status": "completed", "usage": {**usage, **more}}
    )
    with warnings.catch_warnings(action="error"):
        found = msgspec.json.decode(encode_model(response))["usage"]
    assert not [name for fields in lists.values() for name in fields if name in str(found)]
    assert found["output_tokens_details"] == usage["output_tokens_details"]
