"""What goes over the wire, and into the store, as JSON: items, lists, events, refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec

from ...store.backend import Response

# What a conversation is made of. vLLM's renderers refuse other items, such as calls of tools that
# it runs by itself, which no client could have sent either.
TURNS = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})


class Refused(Exception):  # noqa: N818 - said as it is told
    """What an answer says instead of a response.

    Args:
        status: of HTTP.
        message: for the client.
        param: the parameter to blame.
        code: a word for it, where there is one; the status is told otherwise.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class Frame(NamedTuple):
    """An event of a stream: its type, and all of it as JSON."""

    type: str
    data: bytes


class Input(msgspec.Struct):
    """As much of a request as the store wants of it."""

    input: msgspec.Raw


class Output(msgspec.Struct):
    """As much of a response as belongs to the conversation."""

    output: list[dict[str, Any]] = []


class Background(msgspec.Struct):
    """As much of a response as tells how it was run."""

    background: bool = False


class Kind(msgspec.Struct):
    """As much of an event as tells what it is."""

    type: str


REQUEST = msgspec.json.Decoder(Input)
GIVEN = msgspec.json.Decoder(str | list[dict[str, Any]])
ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
OUTPUT = msgspec.json.Decoder(Output)
BACKGROUND = msgspec.json.Decoder(Background)
KIND = msgspec.json.Decoder(Kind)
ENCODE = msgspec.json.Encoder().encode


def added(body: bytes) -> bytes:
    """What a request adds to its conversation, from its body: a JSON array of items.

    Raises:
        Refused: it is JSON to some only, such as ``NaN``.
    """
    try:
        raw = REQUEST.decode(body).input
        given = GIVEN.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"The request can't be stored: {error}", "input") from error
    if isinstance(given, str):
        return ENCODE([{"type": "message", "role": "user", "content": given}])
    return bytes(raw)


def spoken(output: list[dict[str, Any]], *, harmony: bool) -> list[dict[str, Any]]:
    """The items of an answer that can be said again.

    Args:
        output: the answer.
        harmony: whether to vLLM's renderer for gpt-oss, which knows fewer.
    """
    kept = TURNS - {"custom_tool_call"} if harmony else TURNS
    return [each for each in output if speaks(each, kept)]


def speaks(item: dict[str, Any], kept: frozenset[str]) -> bool:
    """Whether an item of an answer says something that can be said again."""
    if item.get("type") not in kept:
        return False
    if item["type"] in {"message", "reasoning"}:
        return bool(item.get("content")) and "text" in item["content"][0]
    return True


def silent(item: Any) -> bool:
    """Whether an item of an input is an answer of no words, which vLLM makes and can't render."""
    fields = item if isinstance(item, dict) else vars(item)
    message = fields.get("role") == "assistant" and fields.get("type") == "message"
    return message and fields.get("content") == []


def in_background(response: Response) -> bool:
    """Whether a response was made in the background, as far as what was stored tells."""
    try:
        return BACKGROUND.decode(response.body).background
    except (msgspec.DecodeError, RecursionError):
        return False


def items(response: Response, *, after: str | None, limit: int, descending: bool) -> bytes:
    """Part of what a turn added to its conversation, as a list.

    Raises:
        Refused: `after` is the id of none of it, or what was stored is damaged.
    """
    try:
        given = ITEMS.decode(response.input)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(500, f"What was stored of the input is damaged: {error}") from error
    found = [shown(each, response.id, n) for n, each in enumerate(given)]
    if descending:
        found.reverse()
    ids = [each["id"] for each in found]
    if after is not None and after not in ids:
        raise Refused(400, f"No item with id '{after}' in this response.", "after")
    first = 0 if after is None else ids.index(after) + 1
    part = slice(first, first + limit)
    return listed(list(map(ENCODE, found[part])), ids[part], more=len(ids) > part.stop)


def shown(item: dict[str, Any], response_id: str, index: int) -> dict[str, Any]:
    """An item as it is listed: with its type, an id, and its content in parts."""
    kind = item.get("type", "message")
    found = {"id": f"{kind}_{response_id.removeprefix('resp_')}_{index}", **item, "type": kind}
    if kind == "message":
        found.setdefault("status", "completed")
        if isinstance(found.get("content"), str):
            mine = found.get("role") == "assistant"
            part = {"type": "output_text" if mine else "input_text", "text": found["content"]}
            found["content"] = [{**part, "annotations": []} if mine else part]
    return found


def listed(documents: list[bytes], ids: list[str], *, more: bool) -> bytes:
    """A page as OpenAI's lists are."""
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    tail = ENCODE({**ends, "has_more": more})[1:]
    return b'{"object":"list","data":[' + b",".join(documents) + b"]," + tail


def terminal(status: str, number: int, body: bytes) -> Frame:
    """The event that ends a stream, by the status that the response has come to."""
    kind = f"response.{status}"
    event = {"type": kind, "sequence_number": number, "response": msgspec.Raw(body)}
    return Frame(kind, ENCODE(event))


def failed(response: dict[str, Any], message: str) -> bytes:
    """A response that came to nothing."""
    error = {"code": "server_error", "message": message}
    return ENCODE({**response, "status": "failed", "error": error})


def trouble(number: int, message: str) -> Frame:
    """The event that ends a stream which has no response to tell of."""
    event = {"type": "error", "sequence_number": number, "code": "server_error"}
    return Frame("error", ENCODE({**event, "message": message, "param": None}))


def not_found(response_id: str, param: str = "response_id") -> Refused:
    return Refused(404, f"Response with id '{response_id}' not found.", param)


def taken(response_id: str) -> Refused:
    return Refused(409, f"There is a response with id '{response_id}' already.", "request_id")


async def nothing() -> AsyncIterator[Frame]:
    """A stream that is over."""
    if False:
        yield
