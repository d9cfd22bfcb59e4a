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


def state(entry: Entry) -> str:
    """The status of a response, or that it is damaged."""
    return "damaged" if entry.damaged else entry.status


def tokens(entry: Entry) -> str:
    """Tokens in and out, a dash where there are none yet."""
    if entry.input_tokens is None:
        return "-"
    return f"{entry.input_tokens}+{entry.output_tokens}"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is listed.

    Args:
        created_at: seconds since the epoch.
        owner: a hash of the API key that made it; None from a server, which shows the responses
            of one key.
        bytes: of the response object as JSON.
        damaged: why it cannot be shown in full, in words; None if it can.
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


def entry_of(response: Response, *, whole: bool) -> Entry:
    """The listed form of a response.

    Args:
        response: as a source gives it.
        whole: whether the source knows owners.
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
    """Time since then, human-readable."""
    return span(max(0.0, time.time() - created_at))
