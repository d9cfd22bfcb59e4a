"""JSON on the wire and in the store: items, lists, events, refusals."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import msgspec
from openai.types.responses import ResponseIncludable

from ..store.backend import BROKEN, Response

# The items of an answer that later turns get. vLLM's renderers refuse others of its own, such as
# calls of built-in tools.
TURNS = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})

# The events that have a response that is in progress.
BEGINNINGS = frozenset({"response.created", "response.in_progress"})
# The statuses of a response that has an answer, be it cut off.
ANSWERED = frozenset({"completed", "incomplete"})


# In how many ways the id of an item may begin.
WORDS = 4
# What `include` may name, and of that what is made here.
INCLUDABLE = frozenset(get_args(ResponseIncludable))
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


class ApiError(Exception):
    """An error answer to a client.

    Args:
        status: the HTTP status.
        message: for the client.
        param: the parameter that is wrong.
        code: the error's code; the HTTP status where it has none.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class AbortError(ApiError):
    """vLLM ended an answer before it was complete; vLLM itself calls it completed."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "vLLM ended the answer before it was complete: the server was stopped or paused, or an "
            "operator ended the request.",
        )


class EncodedEvent(NamedTuple):
    """An event of a stream: its type, and all of it as JSON."""

    type: str
    data: bytes


class RequestInput(msgspec.Struct):
    """The part of a request that the store keeps."""

    input: msgspec.Raw = msgspec.Raw(b"[]")


class ResponseOutput(msgspec.Struct):
    """The part of a response that belongs to the conversation."""

    output: list[dict[str, Any]] = []


class BackgroundFlag(msgspec.Struct):
    """The part of a response that says whether it ran in the background."""

    background: bool = False


class EventType(msgspec.Struct):
    """The part of an event that says what it is."""

    type: str


REQUEST = msgspec.json.Decoder(RequestInput)
GIVEN = msgspec.json.Decoder(str | list[dict[str, Any]] | None)
ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
INPUTS = msgspec.json.Decoder(list[list[dict[str, Any]]])
ITEM = msgspec.json.Decoder(dict[str, Any])
OUTPUT = msgspec.json.Decoder(ResponseOutput)
BACKGROUND = msgspec.json.Decoder(BackgroundFlag)
KIND = msgspec.json.Decoder(EventType)
ENCODE = msgspec.json.Encoder().encode


@contextmanager
def translate_damage_errors(subject: str) -> Iterator[None]:
    """Blame the store for what can't be read back, and not the client.

    Args:
        subject: it is.

    Raises:
        ApiError: it is damaged.
    """
    try:
        yield
    except (*BROKEN, ValueError) as error:
        raise ApiError(500, f"A stored {subject} is damaged: {error}") from error


def validate_utf8(body: bytes) -> None:
    """Check that an answer can repeat the texts of a request.

    Raises:
        ApiError: one has half of a surrogate pair, which Python reads and nobody can write.
    """
    try:
        body.decode()
        if b"\\ud" in body or b"\\uD" in body:
            msgspec.json.decode(body)
    except BROKEN as error:
        raise ApiError(400, f"The request is not JSON in UTF-8: {error}") from error


def extract_input_items(body: bytes) -> bytes:
    """The items that a request adds to its conversation, a JSON array, from the request's body.

    Raises:
        ApiError: it is not strict JSON; it has ``NaN``, for example.
    """
    try:
        raw = REQUEST.decode(body).input
        given = GIVEN.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"The request can't be stored: {error}", "input") from error
    if isinstance(given, str):
        return ENCODE([{"type": "message", "role": "user", "content": given}])
    return b"[]" if given is None else bytes(raw)


def select_history_items(output: list[dict[str, Any]], *, harmony: bool) -> list[dict[str, Any]]:
    """The items of an answer that later turns can include.

    Args:
        output: the answer's items.
        harmony: whether vLLM renders them for gpt-oss, which supports fewer types.
    """
    kept = TURNS - {"custom_tool_call"} if harmony else TURNS
    return [item for item in output if is_history_item(item, kept)]


def is_history_item(item: dict[str, Any], retained_types: frozenset[str]) -> bool:
    """Whether a later turn can include an item of an answer."""
    if item.get("type") not in retained_types:
        return False
    if item["type"] in {"message", "reasoning"}:
        return bool(item.get("content")) and "text" in item["content"][0]
    return True


def is_empty_answer(item: Any) -> bool:
    """Whether an input item is an empty answer, which vLLM produces and can't render."""
    fields = item if isinstance(item, dict) else vars(item)
    empty = fields.get("content") == []
    return empty and fields.get("role") == "assistant" and fields.get("type") == "message"


def is_background_response(response: Response) -> bool:
    """Whether a response ran in the background, as far as its stored body says."""
    try:
        return BACKGROUND.decode(response.body).background
    except (msgspec.DecodeError, RecursionError):
        return False


# What a response can be asked to include, where its items are made here: the type of the part or
# item, and the field.
INCLUDED = {
    LOGPROBS: ("output_text", "logprobs"),
    ENCRYPTED: ("reasoning", "encrypted_content"),
}


def validate_include(include: Collection[str]) -> None:
    """Check what a request wants included.

    Raises:
        ApiError: OpenAI's API has nothing of that name.
    """
    if unknown := set(include) - INCLUDABLE:
        raise ApiError(400, f"include {min(unknown)!r} is unknown", "include")


def require_included_fields(response: Response, include: Collection[str]) -> None:
    """Check that a stored response has what is to be included: it can't be made afterwards.

    Raises:
        ApiError: OpenAI's API has nothing of that name, or the response was made without it.
    """
    validate_include(include)
    for name in include:
        if name not in INCLUDED or response.is_running:
            continue
        kind, field = INCLUDED[name]
        try:
            output = OUTPUT.decode(response.body).output
        except BROKEN:
            return  # `document` says that it is damaged
        parts = [part for item in output for part in (item, *(item.get("content") or ()))]
        # A text without tokens has no logprobs in any case.
        made = [
            part.get(field) for part in parts if part.get("type") == kind and part.get("text") != ""
        ]
        if made and not any(made):
            message = f"include {name!r}: the response was created without it"
            raise ApiError(400, message, "include")


def validate_tool_outputs(
    added_items: Sequence[dict[str, Any]], all_items: Sequence[dict[str, Any]]
) -> None:
    """Check that each output of a tool that a request adds has its call in the conversation.

    Args:
        added_items: the items that the request adds.
        all_items: all items of the conversation.

    Raises:
        ApiError: one has none.
    """
    outputs = [item for item in added_items if str(item.get("type")).endswith("_call_output")]
    if not outputs:
        return
    calls = {item.get("call_id") for item in all_items if str(item.get("type")).endswith("_call")}
    for item in outputs:
        if (call := item.get("call_id") or item.get("id")) not in calls:
            message = (
                f"No tool call found for {item['type'].replace('_', ' ')} with call_id {call}."
            )
            raise ApiError(400, message, "input")


def encode_input_items(
    response: Response, *, after_id: str | None, limit: int, descending: bool
) -> bytes:
    """A page of the items that a turn added to its conversation.

    Raises:
        ApiError: no item has the id `after_id`, or the stored input is damaged.
    """
    with translate_damage_errors("input"):
        given = ITEMS.decode(response.input)
    by_id: dict[str, dict[str, Any]] = {}
    for n, item in enumerate(given):
        one = build_listed_item(item, response.id, n)
        if one["id"] in by_id:  # a page could not begin after it
            one = build_listed_item({**item, "id": None}, response.id, n)
        by_id[one["id"]] = one
    ids, shown = list(by_id), list(by_id.values())
    if descending:
        ids.reverse()
        shown.reverse()
    if after_id is not None and after_id not in ids:
        raise ApiError(400, f"No item with id '{after_id}' in this response.", "after")
    first = 0 if after_id is None else ids.index(after_id) + 1
    part = slice(first, first + limit)
    return encode_list_page(
        list(map(ENCODE, shown[part])), ids[part], has_more=len(ids) > part.stop
    )


def build_listed_item(item: dict[str, Any], response_id: str, index: int) -> dict[str, Any]:
    """An item as lists show it: with its type, an id, and its content in parts."""
    listed_item = {name: value for name, value in item.items() if value is not None}
    kind = listed_item.setdefault("type", "message")
    if not (isinstance(name := item.get("id"), str) and name):
        listed_item["id"] = f"{kind}_{response_id.removeprefix('resp_')}_{index}"
    if kind == "message":
        listed_item.setdefault("status", "completed")
        if isinstance(listed_item.get("content"), str):
            mine = listed_item.get("role") == "assistant"
            part = {"type": "output_text" if mine else "input_text", "text": listed_item["content"]}
            listed_item["content"] = [{**part, "annotations": []} if mine else part]
    return listed_item


def make_item_id(item_id: str, response_id: str, index: int) -> str:
    """The id of an item of an answer, by which its response is found.

    Args:
        item_id: vLLM's, which begins with a word for its type.
        response_id: of the response.
        index: of the item in its output.
    """
    return f"{item_id.partition('_')[0]}_{response_id.removeprefix('resp_')}_{index}"


def list_response_ids(item_id: str) -> list[str]:
    """The ids of the responses that may have an item, by its id.

    As `make_item_id` and `build_listed_item` make it; the word before the response's may have
    underscores.
    """
    words = item_id.split("_")
    tails = ["_".join(words[at:-1]) for at in range(1, min(len(words) - 1, WORDS + 1))]
    return [response_id for tail in tails for response_id in (f"resp_{tail}", tail)]


def list_items_by_id(response: Response) -> dict[str, dict[str, Any]]:
    """The items of a response's input, as lists show them, and of its output, by their ids.

    Raises:
        ApiError: what is stored of it is damaged.
    """
    with translate_damage_errors("response"):
        items = ITEMS.decode(response.input)
        shown = [build_listed_item(item, response.id, n) for n, item in enumerate(items)]
        shown += OUTPUT.decode(response.body).output
    return {str(item.get("id")): item for item in shown}


def encode_list_page(documents: list[bytes], ids: list[str], *, has_more: bool) -> bytes:
    """A page in the format of OpenAI's lists."""
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    tail = ENCODE({**ends, "has_more": has_more})[1:]
    return b'{"object":"list","data":[' + b",".join(documents) + b"]," + tail


def encode_sse(frame: EncodedEvent) -> bytes:
    """An event as a server-sent one."""
    return b"event: %b\ndata: %b\n\n" % (frame.type.encode(), frame.data)


def make_final_event(status: str, number: int, body: bytes) -> EncodedEvent:
    """The event that ends a stream, by the final status of the response."""
    kind = f"response.{status}"
    event = {"type": kind, "sequence_number": number, "response": msgspec.Raw(body)}
    return EncodedEvent(kind, ENCODE(event))


def encode_failed_response(response: dict[str, Any], message: str) -> bytes:
    """A response that failed."""
    error = {"code": "server_error", "message": message}
    return ENCODE({**response, "status": "failed", "error": error})


def make_error_event(number: int, message: str) -> EncodedEvent:
    """The event that ends a stream without a response.

    OpenAI's types have the error's fields in the event, those of openresponses in `error`.
    """
    error = {"code": "server_error", "message": message, "param": None}
    event = {"type": "error", "sequence_number": number, **error}
    return EncodedEvent("error", ENCODE({**event, "error": {"type": "server_error", **error}}))


def make_not_found_error(response_id: str, param: str = "response_id") -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", param)


def make_id_taken_error(response_id: str) -> ApiError:
    return ApiError(409, f"There is a response with id '{response_id}' already.", "request_id")


async def make_empty_stream() -> AsyncGenerator[EncodedEvent, None]:
    """An empty stream."""
    if False:
        yield
