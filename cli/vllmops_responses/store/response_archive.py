"""Stored responses as lines of JSON, to be taken from one store to another.

A line holds all that a store keeps of one response that has finished: as it was, to the byte, but
that no credentials come back which were never stored.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec

from . import response_schema
from .backend import BROKEN, FINISHED, RUNNING, Response
from .response_store import EventBatch

FORMAT = 1
# The field that a line has of each kind of archive, and the command for it.
READ_BY = {
    "response": "vllmops responses import",
    "conversation": "vllmops conversations import",
}
# An owner is a hash or nobody; anything else would be an owner that no key can be.
OWNER = re.compile("|[0-9a-f]{64}")


class VersionedLine(Protocol):
    """A line that says which format it has."""

    vllmops: int


T = TypeVar("T", bound=VersionedLine)


class ArchivedEvents(msgspec.Struct):
    """Consecutive events, and the sequence number of the first."""

    first_number: response_schema.Count = msgspec.field(name="first")
    events: list[msgspec.Raw]


class ResponseLine(response_schema.ResponseHeader, kw_only=True):
    """What a line says.

    Args:
        vllmops: the version of this format.
        response: the response object, its status and error as they were when it was written last.
        input: what the turn added to its conversation, an array.
        events: of its stream, as far as they are kept.
    """

    vllmops: int = FORMAT
    response: msgspec.Raw
    input: msgspec.Raw
    events: list[ArchivedEvents] = msgspec.field(default_factory=list)


LINE = msgspec.json.Decoder(ResponseLine)


def encode_line(response: Response, events: list[EventBatch]) -> bytes:
    """A response as one line, without its end."""
    return msgspec.json.encode(
        ResponseLine(
            id=response.id,
            owner=response.owner,
            model=response.model,
            status=response.status,
            created_at=response.created_at,
            previous_response_id=response.previous_id,
            error=response.error,
            response=remove_line_breaks(response.body),
            input=remove_line_breaks(response.input),
            events=[
                ArchivedEvents(part.first_number, list(map(remove_line_breaks, part.events)))
                for part in events
            ],
        )
    )


def remove_line_breaks(document: bytes) -> msgspec.Raw:
    """JSON as it is, where it has no line breaks; those stand between its parts only."""
    return msgspec.Raw(
        document if b"\n" not in document else msgspec.json.format(document, indent=-1)
    )


def parse_line(decoder: msgspec.json.Decoder[T], line: bytes, format_: int) -> T:
    """A line of an archive.

    Args:
        decoder: of a type with the field `vllmops`.
        line: as JSON.
        format_: which `vllmops` has to be.

    Raises:
        ValueError: what is wrong with the line, in words.
    """
    try:
        found = decoder.decode(line)
    except BROKEN as error:
        raise ValueError(describe_wrong_archive(line, decoder.type) or f"{error}") from error
    if found.vllmops != format_:
        raise ValueError(f"the line has format {found.vllmops}; this vllmops reads {format_}")
    return found


def describe_wrong_archive(line: bytes, kind: Any) -> str:
    """Says of a line that belongs into an archive of another kind; empty where it does not."""
    with suppress(*BROKEN):
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        for field, command in READ_BY.items():
            if field in found and field not in kind.__struct_fields__:
                return f"it is a {field}: {command} reads it"
    return ""


def validate_owner(owner: str) -> None:
    """Check that an owner is one that a key can be.

    Raises:
        ValueError: it is not.
    """
    if not OWNER.fullmatch(owner):
        raise ValueError(f"{owner[:300]!r} is not an owner")


def decode_line(line: bytes) -> tuple[Response, list[EventBatch]]:
    """A response and its events from a line.

    Raises:
        ValueError: what is wrong with the line, in words.
    """
    found = parse_line(LINE, line, FORMAT)
    if why := response_schema.explain_invalid_header(found):
        raise ValueError(why)
    body = response_schema.decode_json(bytes(found.response), response_schema.ArchivedResponse)
    if body.id not in {"", found.id}:
        raise ValueError(f"the response object of {found.id} has the id {body.id[:300]!r}")
    response_schema.decode_json(bytes(found.input), list[response_schema.ResponseItem])
    for part in found.events:
        for event in part.events:
            response_schema.decode_json(bytes(event), response_schema.StreamEvent)
    validate_owner(found.owner)
    if found.status in RUNNING:
        raise ValueError(f"{found.id} is {found.status}, but no server runs it")
    if found.status not in FINISHED:
        raise ValueError(f"{found.status[:300]!r} is not a status")
    response = Response(
        id=found.id,
        owner=found.owner,
        model=found.model,
        status=found.status,
        created_at=found.created_at,
        previous_id=found.previous_response_id,
        error=found.error,
        body=bytes(found.response),
        input=bytes(found.input),
    )
    events = [EventBatch(part.first_number, list(map(bytes, part.events))) for part in found.events]
    return response, events
