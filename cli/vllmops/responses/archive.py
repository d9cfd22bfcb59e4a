"""Stored responses as lines of JSON, to be taken from one store to another.

A line holds all that a store keeps of one response that has finished: as it was, to the byte, but
that no credentials come back which were never stored.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .backend import FINISHED, RUNNING, Response
from .store import Events, storable, valid

FORMAT = 1
# An owner is a hash or nobody; anything else would be an owner that no key can be.
OWNER = re.compile("|[0-9a-f]{64}")
OBJECT = msgspec.json.Decoder(dict[str, Any])
ITEMS = msgspec.json.Decoder(list[dict[str, Any]])


class Logged(msgspec.Struct):
    """Consecutive events, and the sequence number of the first."""

    first: int
    events: list[msgspec.Raw]


class Line(msgspec.Struct, kw_only=True):
    """What a line says.

    Args:
        vllmops: the version of this format.
        response: the response object, its status and error as they were when it was written last.
        input: what the turn added to its conversation, an array.
        events: of its stream, as far as they are kept.
    """

    vllmops: int = FORMAT
    id: str
    owner: str
    model: str
    status: str
    created_at: float
    previous_response_id: str | None = None
    error: str = ""
    response: msgspec.Raw
    input: msgspec.Raw
    events: list[Logged] = []


LINE = msgspec.json.Decoder(Line)


def encode(response: Response, events: list[Events]) -> bytes:
    """A response as one line, without its end."""
    return msgspec.json.encode(
        Line(
            id=response.id,
            owner=response.owner,
            model=response.model,
            status=response.status,
            created_at=response.created_at,
            previous_response_id=response.previous_id,
            error=response.error,
            response=one_line(response.body),
            input=one_line(response.input),
            events=[Logged(each.first, list(map(one_line, each.events))) for each in events],
        )
    )


def one_line(document: bytes) -> msgspec.Raw:
    """JSON as it is, where it has no line breaks; those stand between its parts only."""
    return msgspec.Raw(
        document if b"\n" not in document else msgspec.json.format(document, indent=-1)
    )


def decode(line: bytes) -> tuple[Response, list[Events]]:
    """A response and its events from a line.

    Raises:
        ValueError: what is wrong with the line, in words.
    """
    try:
        found = LINE.decode(line)
        if found.vllmops != FORMAT:
            raise ValueError(f"it is of version {found.vllmops}, and this vllmops knows {FORMAT}")
        OBJECT.decode(found.response)
        ITEMS.decode(found.input)
        for part in found.events:
            for event in part.events:
                OBJECT.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{error}") from error
    texts = (found.model, found.error, found.previous_response_id or "")
    if not valid(found.id) or not all(map(storable, texts)):
        raise ValueError(f"{found.id!r} is no id, or a text beside it can't be stored")
    if not OWNER.fullmatch(found.owner):
        raise ValueError(f"{found.owner!r} is no owner")
    if found.status in RUNNING:
        raise ValueError(f"{found.id} is {found.status}, and nobody runs it")
    if found.status not in FINISHED:
        raise ValueError(f"{found.status!r} is no status")
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
    events = [Events(part.first, list(map(bytes, part.events))) for part in found.events]
    return response, events
