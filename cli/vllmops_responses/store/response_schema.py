"""What a stored response has to look like: what comes in is checked by it, and what goes out.

`archive` takes no line that does not fit. What a store held before, or a server says, may not fit
either: that one is shown as damaged, and the others as they are.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from .backend import BROKEN, Response
from .ids import is_storable, is_valid_id

# Levels of arrays and objects: whoever reads it later may have less of a stack left than now.
DEEPEST = 200
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
OPENING, CLOSING = b"[{", b"]}"
OTHERS = bytes(set(range(256)) - set(OPENING + CLOSING))

Struct = TypeVar("Struct")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
# In seconds since the epoch, up to the last year that calendars know.
LATEST = 253_402_300_800.0
Moment = Annotated[float, msgspec.Meta(ge=0, lt=LATEST)]


class ResponseHeader(msgspec.Struct, kw_only=True):
    """What is kept beside the response object.

    Args:
        error: why it failed, where the object does not say.
    """

    id: str
    owner: str
    model: str
    status: str
    created_at: Moment
    previous_response_id: str | None = None
    error: str = ""


class TokenDetails(msgspec.Struct):
    """What kinds of tokens there are among those of an input or an output."""

    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    reasoning_tokens: Count | None = None
    tool_output_tokens: Count | None = None
    input_tokens_per_turn: list[Count] | None = None
    cached_tokens_per_turn: list[Count] | None = None
    output_tokens_per_turn: list[Count] | None = None
    tool_output_tokens_per_turn: list[Count] | None = None


class TokenUsage(msgspec.Struct):
    """Tokens."""

    input_tokens: Count = 0
    output_tokens: Count = 0
    total_tokens: Count = 0
    input_tokens_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None


class FailureReason(msgspec.Struct):
    """Why a response failed."""

    message: str | None = None


class ResponseItem(msgspec.Struct):
    """As much of an item as is shown of it; parts of what it says may be of any type."""

    id: str | None = None
    type: str | None = None
    status: str | None = None
    role: str | None = None
    name: str | None = None
    call_id: str | None = None
    content: Any = None
    summary: Any = None
    output: Any = None
    arguments: Any = None
    input: Any = None


class ResponseObject(msgspec.Struct):
    """As much of a response object as is shown, or relied on."""

    id: str = ""
    status: str | None = None
    model: str | None = None
    created_at: Moment = 0
    previous_response_id: str | None = None
    background: bool | None = None
    usage: TokenUsage | None = None
    error: FailureReason | None = None
    output: list[ResponseItem] = []


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: str | None = None


class ArchivedResponse(ResponseObject):
    """All fields of a response object whose type is known: a client reads them as they come in."""

    object: str | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[Any] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_p: float | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    text: dict[str, Any] | None = None
    top_logprobs: Count | None = None
    truncation: str | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class StreamEvent(msgspec.Struct):
    """As much of an event as a server relies on."""

    type: str
    sequence_number: Count | None = None


DOCUMENT = msgspec.json.Decoder(ResponseObject)
ITEMS = msgspec.json.Decoder(list[ResponseItem])
ANY = msgspec.json.Decoder()


def decode_json(data: bytes, kind: type[Struct]) -> Struct:
    """JSON of a type, every part of which can be read, those included that the type leaves out.

    Raises:
        ValueError: it is not, in words.
    """
    try:
        validate_depth(data)
        return msgspec.convert(ANY.decode(data), kind)
    except BROKEN as error:
        raise ValueError(f"{error}") from error


def validate_depth(data: bytes) -> None:
    """See that JSON is not nested too deeply.

    Raises:
        ValueError: it is.
    """
    if data.count(b"[") + data.count(b"{") <= DEEPEST:
        return
    depth = 0
    for byte in STRING.sub(b"", data).translate(None, OTHERS):
        depth += 1 if byte in OPENING else -1
        if depth > DEEPEST:
            raise ValueError(f"it is nested in more than {DEEPEST} levels")


def is_safe_id(response_id: str) -> bool:
    """Whether an id can be shown, and leads nowhere where it is taken for a part of a path."""
    parts = response_id.replace("\\", "//").split("/")
    return (
        is_valid_id(response_id) and response_id.isprintable() and not {"", ".", ".."} & set(parts)
    )


def explain_invalid_header(row: ResponseHeader) -> str:
    """Why what is kept beside a response object can't be, in words; empty where it can."""
    if not is_safe_id(row.id):
        return f"{row.id[:300]!r} is not an id"
    if row.previous_response_id is not None and not is_safe_id(row.previous_response_id):
        return f"{row.previous_response_id[:300]!r} is not the id of an earlier turn"
    if not (is_storable(row.model) and is_storable(row.error)):
        return "its model or error contains a character that cannot be stored"
    return ""


def parse_response(response: Response) -> ResponseObject:
    """A response's object as a source gives it, once all beside it is in order, too.

    Raises:
        ValueError: it is damaged, in words.
    """
    beside = {
        "id": response.id,
        "owner": response.owner,
        "model": response.model,
        "status": response.status,
        "created_at": response.created_at,
        "previous_response_id": response.previous_id,
        "error": response.error,
    }
    if not response.id:
        raise ValueError("it has no id")
    if not response.body:
        raise ValueError("the stored response cannot be read")
    try:
        msgspec.convert(beside, ResponseHeader)
        return DOCUMENT.decode(response.body)
    except BROKEN as error:
        raise ValueError(f"{error}") from error
