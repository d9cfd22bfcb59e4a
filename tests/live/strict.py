"""Validates what a server says of responses, by openresponses' types and by the official client's.

Both are stricter than the client is at run time: each field that they require has to be there.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import openresponses_types
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def kinds() -> dict[str, Any]:
    """The events that openresponses has, by their type; it has fewer than OpenAI."""
    found = {}
    for name, model in vars(openresponses_types).items():
        if name.endswith("StreamingEvent"):
            annotation = model.model_fields["type"].annotation
            (kind,) = get_args(annotation) or [member.value for member in annotation]
            found[kind] = model
    return found


KINDS = kinds()


def response(found: dict[str, Any]) -> None:
    """Raise ValidationError where a response is not as the types say."""
    Response.model_validate(found)
    openresponses_types.ResponseResource.model_validate(drop_format_schema(found))


def drop_format_schema(found: dict[str, Any]) -> dict[str, Any]:
    """Without the schema of the answer's format: openresponses wants null, OpenAI an object."""
    form = (found.get("text") or {}).get("format", {})
    if form.get("type") != "json_schema":
        return found
    return {**found, "text": {**found["text"], "format": {**form, "schema": None}}}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; raises ValidationError where one is not as the types say."""
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        OFFICIAL.validate_python(event)
        if "response" in event:
            response(event["response"])
        elif model := KINDS.get(event["type"]):
            model.model_validate(event)
    return found
