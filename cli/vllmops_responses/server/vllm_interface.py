"""VLLM's serving of the Responses API: what the agent imports, overrides and calls of it.

Imported only where vLLM has imported its own routes. An import that fails means another shape.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, get_args, get_origin

from openai.types.responses import ResponseContentPartAddedEvent, ResponseContentPartDoneEvent
from pydantic import PrivateAttr, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from vllm import envs
from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as Request
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.utils.api_utils import (
    listen_for_disconnect,
    load_aware_call,
    validate_json_request,
)

from ..store.ids import is_storable
from .item_rendering import (
    REASONING,
    join_texts,
    list_item_parts,
    render_item,
    validate_types,
)
from .request_parameters import restrict_tools
from .wire_format import is_empty_answer, make_item_id

try:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.exceptions import GenerationError
except ImportError:  # up to 0.28
    from vllm.entrypoints.openai.engine.protocol import ErrorResponse, GenerationError

__all__ = [
    "ENDS",
    "INVALID",
    "METHODS",
    "RENDERERS",
    "ErrorResponse",
    "GenerationError",
    "Request",
    "ResponsesRequest",
    "ResponsesResponse",
    "Serving",
    "adapt_item",
    "can_parse_tool_calls",
    "can_render_item",
    "count_reasoning_tokens",
    "find_context",
    "find_renderer",
    "is_valid_item",
    "listen_for_disconnect",
    "load_aware_call",
    "make_chat_messages",
    "name_items",
    "normalize_stream_events",
    "parse_items",
    "read_env_api_key",
    "require_known_shape",
    "serving",
    "validate_json_request",
    "was_aborted",
]

try:
    from vllm.exceptions import VLLMClientError
except ImportError:  # up to 0.28
    VLLMClientError = ValueError

# What vLLM raises for a request that is invalid or too long.
INVALID: Final = (ValueError, VLLMClientError)
# OpenAI's names of parameters that its errors call otherwise.
PARAMETERS: Final = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
Serving: Final = serving.OpenAIServingResponses

# The events that end a stream with a response: the first one for every status up to 0.32.
ENDS: Final = frozenset({"response.completed", "response.incomplete"})


def _make_part_converter(kind: Any) -> Callable[[Any], Any]:
    """Makes an event of a part of reasoning one of OpenAI's: of any part."""
    (name,) = get_args(kind.model_fields["type"].annotation)
    return lambda event: kind.model_validate({**event.model_dump(), "type": name})


PARTS: Final = {
    "response.reasoning_part.added": _make_part_converter(ResponseContentPartAddedEvent),
    "response.reasoning_part.done": _make_part_converter(ResponseContentPartDoneEvent),
}
# The methods that render a request's input after that of the previous response: one since 0.30,
# before that one for chat models and one for gpt-oss, which is not a coroutine.
RENDERERS: Final = tuple(
    name
    for name in ("_render_resolved_response_inputs", "_make_request", "_make_request_with_harmony")
    if hasattr(Serving, name)
)
# The methods that are overridden or called, with their first parameters.
METHODS: Final = {
    "create_responses": ("request", "raw_request"),
    "_check_model": ("request",),
    "_with_kv_transfer_rejection_cleanup": ("awaitable", "request", "raw_request"),
    "_validate_generator_input": ("engine_input",),
    "_extract_prompt_len": ("prompt",),
    "_run_background_request": ("request",),
    "_run_background_request_stream": ("request",),
    "responses_full_generator": ("request", "sampling_params", "result_generator", "context"),
    "responses_stream_generator": ("request",),
    **dict.fromkeys(RENDERERS, ("request", "prev_response")),
}
# What its constructor makes, and `StoreBackedServing` replaces.
ATTRIBUTES: Final = ("response_store", "msg_store", "event_store", "background_tasks")


def require_known_shape() -> None:
    """Check that the class has the known methods and attributes.

    Raises:
        Exception: it has not.
    """
    if not RENDERERS:
        raise TypeError("it has no method that renders inputs")
    for name, parameters in METHODS.items():
        names = list(inspect.signature(getattr(Serving, name)).parameters)
        if tuple(names[1 : len(parameters) + 1]) != parameters:
            raise TypeError(f"{name} takes {names}")
    source = inspect.getsource(Serving.__init__)
    for name in ATTRIBUTES:
        if name not in source:
            raise TypeError(f"there is no {name}")
    parse_items([])


def adapt_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item as one that vLLM renders, with parts that it takes."""
    item = render_item(item)
    if isinstance(content := item.get("content"), list):
        item = {**item, "content": list(map(adapt_part, content))}
    if item.get("role") == "assistant":
        return join_item_texts(item, "content", "")
    if item.get("type") == REASONING:
        # Two parts of it are two paragraphs.
        return join_item_texts(item, "content" if item.get("content") else "summary", "\n\n")
    return item


def join_item_texts(item: dict[str, Any], field: str, between: str) -> dict[str, Any]:
    """An item whose texts are in one part, as vLLM renders the first one alone."""
    if not isinstance(parts := item.get(field), list) or len(parts) < 2:
        return item
    return {**item, field: join_texts(parts, between)}


def adapt_part(part: Any) -> Any:
    """A part of an item as vLLM's renderer takes it.

    An image needs a ``detail``, which clients may leave out, and newer request models add.
    A refusal, with which another model may have answered, is a text.
    """
    match part:
        case {"type": "input_image"}:
            return {"detail": "auto", **part}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "output_text", "text": text, "annotations": []}
    return part


def complete_input_item(item: Any) -> Any:
    """An item of a request's input with what vLLM requires, and clients may leave out.

    No version takes an answer that has parts and no type. Older ones take one whose content is a
    text for one with parts, unless it has no type.
    """
    if not isinstance(item, dict):
        return item
    if item.get("role") == "assistant":
        if isinstance(item.get("content"), str):
            return {name: value for name, value in item.items() if name != "type"}
        return {"type": "message", **adapt_item(item)}
    return adapt_item(item)


# The role of a message that vLLM leaves as it is, and the fields of it and of its parts.
ASKING: Final = frozenset({"user", "system", "developer"})
MESSAGES: Final = ({"role", "content"}, {"type", "role", "content"})
PART: Final = {"type", "text"}
# The type of a part that is valid, and that no version renders.
FILE: Final = "input_file"


def is_plain_text_message(item: Any) -> bool:
    """Whether an item of a request's input is a message that is nothing but text."""
    if not (isinstance(item, dict) and item.keys() in MESSAGES):
        return False
    role, content = item["role"], item["content"]
    if not isinstance(role, str) or role not in ASKING or item.get("type", "message") != "message":
        return False
    return is_valid_text(content) or (
        isinstance(content, list) and all(map(is_plain_text_part, content))
    )


def is_plain_text_part(part: Any) -> bool:
    """Whether a part of a message is nothing but text."""
    fits = isinstance(part, dict) and part.keys() == PART
    return fits and part["type"] == "input_text" and is_valid_text(part["text"])


def is_valid_text(value: Any) -> bool:
    """Whether a value is a text that pydantic takes; one with NUL is left to vLLM, too."""
    return isinstance(value, str) and is_storable(value)


def validate_unless_plain(item: Any, validate: Callable[[Any], Any]) -> Any:
    """An item as vLLM validates it: a message that is plain stays as it is.

    To find that out, vLLM tries some thirty types: a tenth of what a short request takes.
    """
    return item if is_plain_text_message(item) else validate(item)


def make_fast_input_type(input_type: Any) -> Any:
    """The type of an input whose plain messages are not validated; as it is if it is unknown.

    Args:
        input_type: vLLM's type, a text or a list of items.
    """
    match get_args(input_type):
        case (kind, items) if kind is str and get_origin(items) is list:
            (item,) = get_args(items)
            return str | list[Annotated[item, WrapValidator(validate_unless_plain)]]  # type: ignore[valid-type]
    return input_type


if TYPE_CHECKING:
    ResponsesRequest = Request
else:
    Input = make_fast_input_type(Request.model_fields["input"].annotation)

    class ResponsesRequest(Request):
        """VLLM's request, which also takes what OpenAI's API lets clients leave out."""

        input: Input
        # Also names that vLLM would refuse: they have no effect, and the answer's header says so.
        include: list[str] | None = None
        # The client's values of the fields that this server has changed; the answer repeats them.
        _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

        @model_validator(mode="before")
        @classmethod
        def complete(cls, given: Any) -> Any:
            if isinstance(given, Request):
                return given
            if not isinstance(given, dict):
                raise PydanticCustomError("no_object", "The request is not a JSON object")
            # Null is as if it was left out, where vLLM refuses it, or takes it for false.
            given = {name: value for name, value in given.items() if value is not None}
            validate_types(items := given.get("input"), given.get("tools"))
            if isinstance(items, list):
                try:
                    given["input"] = list(map(complete_input_item, items))
                except RecursionError as error:
                    message = "The input is nested too deeply"
                    raise PydanticCustomError("nested", message) from error
            return given

        @model_validator(mode="after")
        def restrict(self) -> Self:
            restrict_tools(self)
            return self


def parse_items(items: list[dict[str, Any]]) -> list[Any]:
    """Items as vLLM's types."""
    typed: list[Any] = ResponsesRequest.input_item_parsing({"input": items})["input"]
    return typed


def is_valid_item(item: dict[str, Any]) -> bool:
    """Whether a request can have an item in its input."""
    try:
        ResponsesRequest.model_validate({"input": [item]})
    except ValueError:
        return False
    return True


def can_render_item(item: dict[str, Any]) -> bool:
    """Whether vLLM can make a message of a valid item, as far as can be told."""
    if any(part.get("type") == FILE for part in list_item_parts(item)):
        return False
    try:
        made = make_chat_messages(parse_items([adapt_item(item)]))
    except ImportError:
        return True
    except (*INVALID, TypeError, AttributeError, LookupError):
        return False
    # Older versions leave what they do not know as it is.
    return all(one.get("role") if isinstance(one, dict) else hasattr(one, "role") for one in made)


def make_chat_messages(items: list[Any]) -> list[Any]:
    """Items of vLLM's types as messages of the Chat Completions API."""
    # Imported here, because everything else also works in a vLLM without it.
    from vllm.entrypoints.openai.responses.utils import (  # noqa: PLC0415
        construct_chat_messages_with_tool_call,
    )

    told = [item for item in items if not is_empty_answer(item)]
    return list(construct_chat_messages_with_tool_call(told))


async def normalize_stream_events(
    events: AsyncGenerator[Any, None], *, stored: bool
) -> AsyncGenerator[Any, None]:
    """The events of a stream, in which each item has one id from its first event to the last.

    Up to 0.28 the last event gives each item another id, and a streamed message has the
    summary of a reasoning item, too. Up to 0.31, the events of reasoning's parts have names that
    OpenAI's API has not.

    Args:
        events: vLLM's.
        stored: whether the response is stored, and so found by the ids of its items.
    """
    response_id, item_id = "", ""
    ids: dict[str, str] = {}  # of the streamed items in their order, by vLLM's
    async with aclosing(events):
        async for event in events:
            values = vars(event)
            if response := values.get("response"):
                response_id = response.id
                if event.type in ENDS:
                    name_items(response, ids, stored=stored)
            elif item := values.get("item"):
                if event.type == "response.output_item.added":
                    item_id = before = get_item_id(item)
                    if stored:
                        item_id = make_item_id(before, response_id, len(ids))
                    ids[before] = item_id
                elif item.type == "message" and item.model_extra:
                    item.model_extra.pop("summary", None)
                item.id = item_id
            elif item_id and "item_id" in values:
                event.item_id = item_id
            yield PARTS[event.type](event) if event.type in PARTS else event


def get_item_id(item: Any) -> str:
    """The id of an item; its type if it has none."""
    return str(getattr(item, "id", None) or item.type)


def name_items(answer: Any, ids: dict[str, str], *, stored: bool) -> None:
    """Give each item of an answer the id that was streamed, or one by which its response is found.

    Args:
        answer: vLLM's response.
        ids: of the streamed items in their order, by vLLM's.
        stored: whether the response is stored.
    """
    streamed = list(ids.values())
    for at, item in enumerate(answer.output):
        before = get_item_id(item)
        if before in ids:
            item.id = ids[before]
        elif len(streamed) == len(answer.output):
            item.id = streamed[at]
        elif stored:
            item.id = make_item_id(before, answer.id, len(streamed) + at)


def find_context(*given: Any, **options: Any) -> Any:
    """The context among the arguments of a method that makes an answer; None without one."""
    at = METHODS["responses_full_generator"].index("context")
    return options.get("context", given[at] if len(given) > at else None)


def was_aborted(context: Any) -> bool:
    """Whether vLLM has ended an answer before it was complete.

    Args:
        context: the `ConversationContext` of the answer, in which vLLM collects it.
    """
    reason = getattr(context, "finish_reason", None)
    if reason is None and (last := getattr(context, "last_output", None)) and last.outputs:
        reason = last.outputs[0].finish_reason
    return bool(reason == "abort")


def count_reasoning_tokens(context: Any, answer: Any) -> int:
    """How many tokens of an answer are reasoning, where the model's parser does not count them.

    It sees no beginning of reasoning that the prompt has already; but it knows where the content
    begins.

    Args:
        context: as for `was_aborted`.
        answer: vLLM's response.
    """
    kinds = {item.type for item in answer.output}
    if "reasoning" not in kinds or answer.usage is None:
        return 0
    made: int = answer.usage.output_tokens
    if kinds == {"reasoning"}:
        return made
    parser = getattr(getattr(context, "response_parser", None), "reasoning_parser", None)
    tokens = list(getattr(context, "_accumulated_token_ids", None) or ())
    if parser is None or len(tokens) != made:
        return 0
    try:
        return made - len(parser.extract_content_ids(tokens))
    except Exception:  # of a parser that works on texts alone: a number must not cost the answer
        return 0


def find_renderer(handler: Any) -> Any:
    """What renders inputs for a serving class; None if it can't render without the engine's cache.

    Args:
        handler: an instance of vLLM's serving class.
    """
    found = getattr(handler, "online_renderer", None)
    found = found or getattr(handler, "openai_serving_render", None)  # of 0.24
    method = getattr(found, "preprocess_chat", None)
    fits = method and "skip_mm_cache" in inspect.signature(method).parameters
    return found if fits else None


def can_parse_tool_calls(handler: Any) -> bool:
    """Whether a serving class makes calls of tools of what the model says; for gpt-oss it does."""
    parser = getattr(handler, "parser", None)
    return handler.use_harmony or getattr(parser, "tool_parser_cls", None) is not None


def read_env_api_key() -> str | None:
    """The API key of the environment."""
    key: str | None = envs.VLLM_API_KEY
    return key
