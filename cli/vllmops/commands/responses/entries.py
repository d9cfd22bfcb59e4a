"""A response as it is listed."""

from __future__ import annotations

import time

import msgspec

from ...output import span
from ...store import shape
from ...store.backend import Response
from ...store.store import document

STYLES = {
    "failed": "red",
    "damaged": "red",
    "cancelled": "yellow",
    "queued": "cyan",
    "in_progress": "cyan",
}
OWNER_LETTERS = 8


def state(each: Entry) -> str:
    """The status of a response, or that it is damaged."""
    return "damaged" if each.damaged else each.status


def tokens(each: Entry) -> str:
    """Tokens in and out, a dash where there are none yet."""
    if each.input_tokens is None:
        return "-"
    return f"{each.input_tokens}+{each.output_tokens}"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is listed.

    Args:
        created_at: seconds since the epoch.
        owner: a hash of the API key that made it; None where a server was asked, which shows those
            of one key.
        bytes: of the response object as JSON.
        damaged: why it can't be told in full, in words; None where it can.
    """

    id: str
    status: str
    model: str
    created_at: float
    previous_response_id: str | None
    background: bool
    input_tokens: int | None
    output_tokens: int | None
    bytes: int
    error: str | None
    owner: str | None
    damaged: str | None = None


def entry(response: Response, *, whole: bool) -> Entry:
    """What is listed of a response.

    Args:
        response: as a source gives it.
        whole: whether that tells owners.
    """
    try:
        head, damaged = shape.read(response), None
    except ValueError as error:
        head, damaged = shape.Document(), f"{error}"
    known = 0 <= response.created_at < shape.LATEST
    usage = head.usage
    return Entry(
        id=response.id,
        status=response.status,
        model=response.model,
        created_at=response.created_at if known else 0.0,
        previous_response_id=response.previous_id,
        background=bool(head.background),
        input_tokens=usage.input_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        bytes=len(response.body) if damaged else len(document(response)),
        error=response.error or (head.error.message if head.error else None),
        owner=response.owner if whole else None,
        damaged=damaged,
    )


def age(created_at: float) -> str:
    """How long ago that was, for a person."""
    return span(max(0.0, time.time() - created_at))
