"""What becomes of each parameter of a request: it works, or the request is refused and says why.

The manual's page `parameters` has this table; a test compares them, and both with OpenAI's types.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel

from .wire_format import ApiError


class ParameterSupport(StrEnum):
    """Who does what a parameter says."""

    WORKS = "works"
    VLLM = "passed to vLLM"
    ECHOED = "echoed"
    REFUSED = "refused"


class Parameter(NamedTuple):
    """A parameter of OpenAI's API.

    Args:
        how: what becomes of it.
        note: for the manual.
        values: those it may have; None if it is not restricted here.
        fields: the values that each of its fields may have, None for any; other fields are
            refused. None if it is not restricted here.
    """

    how: ParameterSupport
    note: str = ""
    values: frozenset[Any] | None = None
    fields: Mapping[str, frozenset[Any] | None] | None = None


NO: frozenset[Any] = frozenset()
SWITCH = frozenset({True, False})
PARAMETERS: dict[str, Parameter] = {
    "access_programs": Parameter(ParameterSupport.REFUSED, "there are no access programs", NO),
    "background": Parameter(ParameterSupport.WORKS, "needs `store`"),
    "background_options": Parameter(
        ParameterSupport.WORKS,
        "`completion_window` can be `soonest`; `continuation_id` is refused",
        fields={"completion_window": frozenset({"soonest"}), "continuation_id": NO},
    ),
    "context_management": Parameter(
        ParameterSupport.WORKS, "one entry, of type `compaction`; not with `conversation`"
    ),
    "conversation": Parameter(
        ParameterSupport.WORKS, "its id, or an object with it; not with `previous_response_id`"
    ),
    "image": Parameter(
        ParameterSupport.WORKS,
        "images are never compressed: `context_compression` can be `auto` or `disabled`",
        fields={"context_compression": frozenset({"auto", "disabled"})},
    ),
    "include": Parameter(
        ParameterSupport.WORKS,
        "log probabilities, and with `store` false encrypted content; of images in the input and "
        "of other built-in tools it adds nothing, and results of web searches are refused",
    ),
    "input": Parameter(
        ParameterSupport.WORKS, "an `item_reference` is refused: send the item itself"
    ),
    "instructions": Parameter(ParameterSupport.VLLM),
    "max_output_tokens": Parameter(ParameterSupport.VLLM),
    "max_tool_calls": Parameter(
        ParameterSupport.WORKS,
        "it counts built-in tools alone, and is refused beside one: nothing counts them",
    ),
    "metadata": Parameter(
        ParameterSupport.ECHOED, "16 pairs; keys of 64 and values of 512 characters at most"
    ),
    "model": Parameter(ParameterSupport.VLLM),
    "moderation": Parameter(ParameterSupport.REFUSED, "there is no moderation model", NO),
    "parallel_tool_calls": Parameter(ParameterSupport.VLLM),
    "previous_response_id": Parameter(ParameterSupport.WORKS),
    "prompt": Parameter(ParameterSupport.REFUSED, "no prompt templates are stored", NO),
    "prompt_cache_key": Parameter(ParameterSupport.ECHOED, "the prefix cache is shared without it"),
    "prompt_cache_options": Parameter(
        ParameterSupport.WORKS,
        "`mode` can be `implicit`; `prewarm` fills the prefix cache and gives no output, without "
        "`stream`, `background` and `conversation`; `ttl` and `comparison_response_id` are refused",
        fields={
            "mode": frozenset({"implicit"}),
            "prewarm": SWITCH,
            "ttl": NO,
            "comparison_response_id": NO,
        },
    ),
    "prompt_cache_retention": Parameter(
        ParameterSupport.ECHOED, "can be `in_memory`", frozenset({"in_memory"})
    ),
    "reasoning": Parameter(
        ParameterSupport.VLLM,
        "`effort` is passed on; `summary` (or `generate_summary`) can be `auto`, and none is made; "
        "`context` can be `auto` or `all_turns`, `mode` can be `standard`",
        fields={
            "effort": None,
            "summary": frozenset({"auto"}),
            "generate_summary": frozenset({"auto"}),
            "context": frozenset({"auto", "all_turns"}),
            "mode": frozenset({"standard"}),
        },
    ),
    "safety_identifier": Parameter(ParameterSupport.ECHOED, "128 characters at most"),
    "service_tier": Parameter(
        ParameterSupport.WORKS, "there is one, and the answer says so: `default`"
    ),
    "store": Parameter(ParameterSupport.WORKS),
    "stream": Parameter(ParameterSupport.WORKS),
    "stream_options": Parameter(
        ParameterSupport.WORKS,
        "needs `stream`; `include_obfuscation` is off unless it is true",
        fields={"include_obfuscation": SWITCH},
    ),
    "temperature": Parameter(ParameterSupport.VLLM),
    "text": Parameter(
        ParameterSupport.VLLM,
        "`format` is passed on; `verbosity` can be `medium`",
        fields={"format": None, "verbosity": frozenset({"medium"})},
    ),
    "tool_choice": Parameter(
        ParameterSupport.VLLM,
        "`required` and the name of a tool need vLLM's `--enable-auto-tool-choice` and "
        "`--tool-call-parser`; `allowed_tools` and built-in tools are refused",
    ),
    "tools": Parameter(
        ParameterSupport.VLLM,
        "functions and custom tools; others only with vLLM's `--tool-server`. Without "
        "`--enable-auto-tool-choice` and `--tool-call-parser`, what the model calls stays text",
    ),
    "top_logprobs": Parameter(
        ParameterSupport.VLLM,
        "for the log probabilities that `include` asks for; there are none without it",
    ),
    "top_p": Parameter(ParameterSupport.VLLM),
    "truncation": Parameter(
        ParameterSupport.WORKS,
        "`auto` drops the oldest items of an input that is too long, but for those of the system "
        "and the developer; vLLM cuts the beginning off a single item that is too long",
    ),
    "user": Parameter(ParameterSupport.ECHOED),
}
# The client runs these; vLLM passes them to the model.
CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})
PAIRS, KEY, VALUE, IDENTIFIER = 16, 64, 512, 128
SPECIAL = frozenset(
    {"metadata", "safety_identifier", "max_tool_calls", "stream_options", "tools"}
    | {"prompt_cache_options", "tool_choice"}
)
CHECKED = SPECIAL.union(
    name for name, one in PARAMETERS.items() if one.values is not None or one.fields is not None
)


def validate_parameters(request: Any, *, tool_server: bool, tool_parser: bool) -> None:
    """Refuse what a request asks for and nobody here does.

    Args:
        request: vLLM's ResponsesRequest.
        tool_server: whether vLLM has one, and runs built-in tools.
        tool_parser: whether vLLM makes calls of what the model says.

    Raises:
        ApiError: which parameter it is, and why.
    """
    for name in sorted(request.model_fields_set & CHECKED):
        value = getattr(request, name)
        if value is None:
            continue
        parameter = PARAMETERS[name]
        if parameter.values is not None:
            validate_value(name, value, parameter.values, parameter.note)
        if parameter.fields is not None:
            if not isinstance(value, dict | BaseModel):
                raise ApiError(400, f"{name} must be an object", name)
            for field, inner in get_given_fields(value).items():
                if field not in parameter.fields:
                    raise ApiError(400, f"Unknown parameter: '{name}.{field}'.", f"{name}.{field}")
                allowed = parameter.fields[field]
                if inner is not None and allowed is not None:
                    validate_value(f"{name}.{field}", inner, allowed, parameter.note)
    if special := request.model_fields_set & SPECIAL:
        validate_limits(request, special)
        if not tool_server:
            validate_tools(request)
        if "tool_choice" in special:
            validate_tool_choice(request.tool_choice, tool_parser=tool_parser)


def get_parameter(request: Any, name: str) -> Any:
    """What a request says of a parameter, whether vLLM knows it or not; None if nothing."""
    value = vars(request).get(name)
    return (request.__pydantic_extra__ or {}).get(name) if value is None else value


def get_given_fields(value: Any) -> dict[str, Any]:
    """What an object in a request was given, whether vLLM has a type for it or not."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return value or {}


def validate_value(name: str, value: Any, allowed_values: frozenset[Any], note: str) -> None:
    """Raise Refused where a value is not among those that are allowed."""
    if isinstance(value, str | bool) and value in allowed_values:
        return
    shown = f" {value!r}" if isinstance(value, str | bool) and allowed_values else ""
    raise ApiError(400, f"{name}{shown} is not supported: {note}", name)


def validate_limits(request: Any, names: set[str]) -> None:
    """Raise Refused where a value is too large, or needs another one."""
    if "metadata" in names and request.metadata:
        if len(request.metadata) > PAIRS:
            raise ApiError(400, f"metadata has more than {PAIRS} pairs", "metadata")
        for key, value in request.metadata.items():
            if len(key) > KEY:
                raise ApiError(400, f"a key of metadata has more than {KEY} characters", "metadata")
            if len(value) > VALUE:
                message = f"a value of metadata has more than {VALUE} characters"
                raise ApiError(400, message, "metadata")
    identifier = request.safety_identifier if (name := "safety_identifier") in names else None
    if not isinstance(identifier, str | None) or len(identifier or "") > IDENTIFIER:
        raise ApiError(400, f"{name} must be a string of at most {IDENTIFIER} characters", name)
    if "stream_options" in names and request.stream_options and not request.stream:
        raise ApiError(400, "stream_options needs stream", "stream_options")
    # Its input would be added to a conversation, and once more by the request that it prepares.
    alone = not (request.stream or request.background or get_parameter(request, "conversation"))
    if is_prewarm_request(request) and not alone:
        name = "prompt_cache_options.prewarm"
        raise ApiError(400, f"{name} can't be used with stream, background or conversation", name)
    if (limit := request.max_tool_calls) is not None:
        if limit < 1:
            raise ApiError(400, "max_tool_calls must be at least 1", "max_tool_calls")
        if any(tool.type not in CLIENT_TOOLS for tool in request.tools):
            message = f"max_tool_calls is not supported: {PARAMETERS['max_tool_calls'].note}"
            raise ApiError(400, message, "max_tool_calls")


def validate_tools(request: Any) -> None:
    """Raise Refused where a request has a tool that only a tool server runs."""
    for index, tool in enumerate(request.tools):
        if tool.type not in CLIENT_TOOLS:
            name = f"tools[{index}]"
            message = f"{name} is of type {tool.type!r}, and this server has no tool server"
            raise ApiError(400, message, name)


def validate_tool_choice(choice: Any, *, tool_parser: bool) -> None:
    """Raise Refused where the model would not be made to call what it must."""
    kind = choice if isinstance(choice, str) else get_given_fields(choice).get("type")
    if kind in {"auto", "none"}:
        return
    if kind not in {"required", *CLIENT_TOOLS}:
        message = f"tool_choice of type {kind!r} is not supported: vLLM does not act on it"
        raise ApiError(400, message, "tool_choice")
    if not tool_parser:
        message = f"tool_choice {kind!r} needs --enable-auto-tool-choice and --tool-call-parser"
        raise ApiError(400, message, "tool_choice")


def is_prewarm_request(request: Any) -> bool:
    """Whether a request only fills the prefix cache."""
    return bool(get_given_fields(get_parameter(request, "prompt_cache_options")).get("prewarm"))


def should_obfuscate(request: Any) -> bool:
    """Whether the events of a request's stream are to be of like sizes."""
    return bool(
        get_given_fields(get_parameter(request, "stream_options")).get("include_obfuscation")
    )


def render_parameter_table() -> str:
    """All of it as Markdown, for the manual."""
    rows = [
        f"| `{name}` | {one.how}{one.note and ': '}{one.note} |"
        for name, one in sorted(PARAMETERS.items())
    ]
    return "\n".join(["| parameter | what becomes of it |", "|---|---|", *rows])
