"""A response as it is listed."""

from __future__ import annotations

import time

import msgspec

from vllmops.support.output import format_duration

from ...store import response_schema
from ...store.backend import Response
from ...store.response_store import encode_response

STYLES = {
    "failed": "red",
    "damaged": "red",
    "cancelled": "yellow",
    "queued": "cyan",
    "in_progress": "cyan",
}
OWNER_LETTERS = 8


def format_status(entry: ResponseEntry) -> str:
    """The status of a response, or that it is damaged."""
    return "damaged" if entry.damaged else entry.status


def format_tokens(entry: ResponseEntry) -> str:
    """Tokens in and out, a dash where there are none yet."""
    if entry.input_tokens is None:
        return "-"
    return f"{entry.input_tokens}+{entry.output_tokens}"


class ResponseEntry(msgspec.Struct, frozen=True, kw_only=True):
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


def make_entry(response: Response, *, has_owners: bool) -> ResponseEntry:
    """The listed form of a response.

    Args:
        response: as a source gives it.
        has_owners: whether the source knows owners.
    """
    try:
        head, damaged = response_schema.parse_response(response), None
    except ValueError as error:
        head, damaged = response_schema.ResponseObject(), f"{error}"
    known = 0 <= response.created_at < response_schema.LATEST
    usage = head.usage
    return ResponseEntry(
        id=response.id,
        status=response.status,
        model=response.model,
        created_at=response.created_at if known else 0.0,
        previous_response_id=response.previous_id,
        background=bool(head.background),
        input_tokens=usage.input_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        bytes=len(response.body) if damaged else len(encode_response(response)),
        error=response.error or (head.error.message if head.error else None),
        owner=response.owner if has_owners else None,
        damaged=damaged,
    )


def format_age(created_at: float) -> str:
    """Time since then, human-readable."""
    return format_duration(max(0.0, time.time() - created_at))
