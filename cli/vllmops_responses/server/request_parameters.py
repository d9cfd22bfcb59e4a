"""Decides for each parameter of a request whether it works, has no effect, or is refused.

Whatever vLLM itself answers is answered here, too. What has no effect is named in a header of the
answer, and once in the server's log. Refused is only what would make the answer wrong: a tool that
must be called and can't be, two parameters that exclude each other.

The manual's page `parameters` has this table; a test compares them, and both with OpenAI's types.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel

from vllmops.agent.log import log

from .item_rendering import TRIGGER, get_skipped_type
from .wire_format import INCLUDED, ApiError


class ParameterSupport(StrEnum):
    """Who does what a parameter says."""

    WORKS = "works"
    VLLM = "passed to vLLM"
    ECHOED = "echoed"
    IGNORED = "ignored"
    REFUSED = "refused"


class Parameter(NamedTuple):
    """A parameter of OpenAI's API.

    Args:
        how: what becomes of it.
        note: for the manual.
        values: those that have an effect; None if any has.
        fields: the values of each of its fields that have an effect, None for any; other fields
            have none. None if it is no object, or every field of it has one.
    """

    how: ParameterSupport
    note: str = ""
    values: frozenset[Any] | None = None
    fields: Mapping[str, frozenset[Any] | None] | None = None


NO: frozenset[Any] = frozenset()
SWITCH = frozenset({True, False})
PARAMETERS: dict[str, Parameter] = {
    "access_programs": Parameter(ParameterSupport.IGNORED, "there are no access programs", NO),
    "background": Parameter(ParameterSupport.WORKS, "needs `store`"),
    "background_options": Parameter(
        ParameterSupport.WORKS,
        "each runs as soon as it can: `completion_window` is `soonest`, and there is no "
        "`continuation_id`",
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
        "images are never compressed, whatever `context_compression` is",
        fields={"context_compression": frozenset({"auto", "disabled"})},
    ),
    "include": Parameter(
        ParameterSupport.WORKS,
        "log probabilities, and with `store` false encrypted content; anything else adds nothing",
    ),
    "input": Parameter(
        ParameterSupport.WORKS,
        "items of every type of OpenAI's API: the calls of built-in tools that it has become calls "
        "of functions, or texts (for gpt-oss not those of custom tools); an `item_reference` names "
        "an item of a stored response by the id that this server gave it",
    ),
    "instructions": Parameter(ParameterSupport.VLLM),
    "max_output_tokens": Parameter(ParameterSupport.VLLM),
    "max_tool_calls": Parameter(
        ParameterSupport.WORKS,
        "it counts built-in tools alone, and nothing counts those of vLLM's `--tool-server`",
    ),
    "metadata": Parameter(ParameterSupport.ECHOED),
    "model": Parameter(ParameterSupport.VLLM),
    "moderation": Parameter(ParameterSupport.IGNORED, "there is no moderation model", NO),
    "parallel_tool_calls": Parameter(ParameterSupport.VLLM),
    "previous_response_id": Parameter(ParameterSupport.WORKS),
    "prompt": Parameter(ParameterSupport.REFUSED, "no prompt templates are stored"),
    "prompt_cache_key": Parameter(ParameterSupport.ECHOED, "the prefix cache is shared without it"),
    "prompt_cache_options": Parameter(
        ParameterSupport.WORKS,
        "`prewarm` fills the prefix cache and gives no output, without `stream`, `background` and "
        "`conversation`; `mode` is `implicit`; there is no `ttl` and no `comparison_response_id`",
        fields={
            "mode": frozenset({"implicit"}),
            "prewarm": SWITCH,
            "ttl": NO,
            "comparison_response_id": NO,
        },
    ),
    "prompt_cache_retention": Parameter(
        ParameterSupport.ECHOED, "it is always `in_memory`", frozenset({"in_memory"})
    ),
    "reasoning": Parameter(
        ParameterSupport.VLLM,
        "`effort` is passed on; no `summary` (or `generate_summary`) is made, as `auto` says; "
        "`context` is `all_turns`, and `mode` is `standard`",
        fields={
            "effort": None,
            "summary": frozenset({"auto"}),
            "generate_summary": frozenset({"auto"}),
            "context": frozenset({"auto", "all_turns"}),
            "mode": frozenset({"standard"}),
        },
    ),
    "safety_identifier": Parameter(ParameterSupport.ECHOED),
    "service_tier": Parameter(
        ParameterSupport.WORKS,
        "there is one, and the answer says so: `default`",
        frozenset({"auto", "default"}),
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
        "`format` is passed on; the model is not told the `verbosity`: `medium` is as good as none",
        fields={"format": None, "verbosity": frozenset({"medium"})},
    ),
    "tool_choice": Parameter(
        ParameterSupport.VLLM,
        "of `allowed_tools` the model gets those tools alone; `required` and the name of a tool "
        "need vLLM's `--enable-auto-tool-choice` and `--tool-call-parser`, and a tool that only "
        "OpenAI runs can't be demanded: that is refused",
    ),
    "tools": Parameter(
        ParameterSupport.VLLM,
        "functions, custom tools and namespaces of them; for gpt-oss functions alone, and others "
        "of these are refused. Of built-in tools, vLLM has "
        "`web_search_preview`, `code_interpreter` and `mcp` for gpt-oss, with its "
        "`--tool-server`; others are not offered to the model. Without "
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
# The client runs these; vLLM passes them to the model. The others vLLM runs with a tool server.
CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})
SERVER_TOOLS = frozenset({"web_search_preview", "code_interpreter", "mcp"})
SPECIAL = frozenset({"include", "input", "max_tool_calls", "stream_options", "tools"})
CHECKED = SPECIAL.union(
    name for name, one in PARAMETERS.items() if one.values is not None or one.fields is not None
)
# The fields that tell which tool it is.
IDENTITY = ("type", "name", "server_label")
# The parameters that vLLM may not know, with vllmops' own.
KNOWN = PARAMETERS.keys() | {"previous_response"}
# A header shows at most so many names of parameters; a client's text that is no name is left out.
SHOWN, MOST_SHOWN = re.compile(r"[A-Za-z0-9_.\-]{1,64}"), 20
# The names that the log has had.
reported: set[str] = set()


def list_ignored_parameters(
    request: Any, without_effect: Collection[str] = (), *, tool_server: bool
) -> list[str]:
    """List the parameters, fields and values of a request that have no effect; log each name once.

    Args:
        request: vLLM's ResponsesRequest.
        without_effect: names that are known to be among them.
        tool_server: whether vLLM has one, and runs built-in tools of this model.
    """
    unknown = request.model_extra and request.model_extra.keys() - KNOWN
    checked = request.model_fields_set & CHECKED
    if not (unknown or checked or without_effect):
        return []
    found = {*(unknown or ()), *without_effect}
    for name in checked:
        if getattr(request, name) is not None:
            found.update(find_ignored_fields(request, name, tool_server=tool_server))
    named = {name if SHOWN.fullmatch(name) else "(other)" for name in found}
    names = sorted(named)[:MOST_SHOWN]
    for name in set(names) - reported:
        if len(reported) < 10 * MOST_SHOWN:
            reported.add(name)
            log.warning("vllmops: requests have %s, which has no effect on this server", name)
    return names


def find_ignored_fields(request: Any, name: str, *, tool_server: bool) -> Iterable[str]:
    """List what of one parameter has no effect: the parameter, or fields, items or types in it."""
    value, parameter = getattr(request, name), PARAMETERS[name]
    match name:
        case "input":
            items = value if isinstance(value, list) else []
            kinds = list(map(get_skipped_type, items))
            if kinds[-1:] == [TRIGGER]:
                kinds.pop()
            return (f"{name}.{kind}" for kind in kinds if kind)
        case "tools":
            run = CLIENT_TOOLS | (SERVER_TOOLS if tool_server else NO)
            return (f"tools.{tool.type}" for tool in value if tool.type not in run)
        case "include":
            return (f"include.{one}" for one in value if one not in INCLUDED)
        case "max_tool_calls":
            counts = tool_server and any(tool.type not in CLIENT_TOOLS for tool in request.tools)
            return [name] if counts else ()
        case "stream_options" if not request.stream:
            return [name]
    if parameter.values is not None and not is_among(value, parameter.values):
        return [name]
    if parameter.fields is None:
        return ()
    if not isinstance(value, dict | BaseModel):
        return [name]
    return (
        f"{name}.{field}"
        for field, inner in get_given_fields(value).items()
        if inner is not None and not is_among(inner, parameter.fields.get(field, NO))
    )


def is_among(value: Any, values: frozenset[Any] | None) -> bool:
    """Whether a value of any type is one of some; each is one of None."""
    return values is None or (isinstance(value, str | bool) and value in values)


def validate_parameters(request: Any, *, tool_parser: bool) -> None:
    """Refuse what would make the answer another than the one that a request asks for.

    Args:
        request: vLLM's ResponsesRequest.
        tool_parser: whether vLLM makes calls of what the model says.

    Raises:
        ApiError: which parameter it is, and why.
    """
    # A conversation would get the input twice: from this request, and from the one it prepares.
    if is_prewarm_request(request) and (
        request.stream or request.background or get_parameter(request, "conversation")
    ):
        name = "prompt_cache_options.prewarm"
        raise ApiError(400, f"{name} can't be used with stream, background or conversation", name)
    if "tool_choice" in request.model_fields_set:
        validate_tool_choice(request, tool_parser=tool_parser)


def get_parameter(request: Any, name: str) -> Any:
    """What a request says of a parameter, whether vLLM knows it or not; None if nothing."""
    value = vars(request).get(name)
    return (request.__pydantic_extra__ or {}).get(name) if value is None else value


def get_given_fields(value: Any) -> dict[str, Any]:
    """What an object in a request was given, whether vLLM has a type for it or not."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return value if isinstance(value, dict) else {}


def validate_tool_choice(request: Any, *, tool_parser: bool) -> None:
    """Raise `ApiError` where the model would not be made to call what it must."""
    choice = request.tool_choice
    kind = choice if isinstance(choice, str) else get_given_fields(choice).get("type")
    if kind in {"auto", "none"}:
        return
    if kind not in {"required", *CLIENT_TOOLS}:
        message = f"tool_choice of type {kind!r} is not supported: nothing here runs such a tool"
        raise ApiError(400, message, "tool_choice")
    if not any(tool.type in CLIENT_TOOLS for tool in request.tools):
        message = f"tool_choice {kind!r} needs a tool that the model can be given, and has none"
        raise ApiError(400, message, "tool_choice")
    if not tool_parser:
        message = f"tool_choice {kind!r} needs --enable-auto-tool-choice and --tool-call-parser"
        raise ApiError(400, message, "tool_choice")


def restrict_tools(request: Any) -> None:
    """Leave a request the tools that its ``tool_choice`` allows, with the mode that it says.

    Args:
        request: vLLM's ResponsesRequest.
    """
    choice = request.tool_choice
    if getattr(choice, "type", None) != "allowed_tools":
        return
    allowed = {tuple(map(one.get, IDENTITY)) for one in choice.tools if is_identity(one)}
    tools = [part for tool in request.tools for part in reduce_tool(tool, allowed)]
    # vLLM itself changes "auto" to "none" in a request without tools.
    mode = choice.mode if tools or choice.mode != "auto" else "none"
    replace_fields(request, tools=tools, tool_choice=mode)


def drop_unused_tools(request: Any, *, tool_server: bool) -> None:
    """Leave a request for gpt-oss the tools that vLLM gives it, which refuses the others.

    Args:
        request: vLLM's ResponsesRequest.
        tool_server: whether vLLM has one, and runs built-in tools.

    Raises:
        ApiError: one that the client runs is not among them.
    """
    for at, tool in enumerate(request.tools):
        if tool.type in CLIENT_TOOLS - {"function"}:
            message = f"tools[{at}] is of type {tool.type!r}, which vLLM does not give to gpt-oss"
            raise ApiError(400, f"{message}: send functions", f"tools[{at}]")
    used = {"function", *(SERVER_TOOLS if tool_server else NO)}
    kept = [tool for tool in request.tools if tool.type in used]
    if len(kept) < len(request.tools):
        replace_fields(request, tools=kept)


def drop_tools(request: Any) -> None:
    """Leave a request no tool, because nothing is called for its answer."""
    replace_fields(request, tools=[], tool_choice="none")


def replace_fields(request: Any, **values: Any) -> None:
    """Ask vLLM for other values of fields than the client; the answer repeats the client's.

    Args:
        request: our ResponsesRequest.
        values: the new value of each field.
    """
    for name, value in values.items():
        get_sent_fields(request).setdefault(name, getattr(request, name))
        setattr(request, name, value)


def get_sent_fields(request: Any) -> dict[str, Any]:
    """The client's values of the fields that `replace_fields` has changed."""
    sent: dict[str, Any] = getattr(request, "_sent", {})
    return sent


def is_identity(allowed: dict[str, Any]) -> bool:
    """Whether what `allowed_tools` says of a tool tells which one it is."""
    return all(isinstance(allowed.get(name), str | None) for name in IDENTITY)


def reduce_tool(tool: BaseModel, allowed: Set[tuple[Any, ...]]) -> Iterator[BaseModel]:
    """Yield a tool if it is allowed, or a namespace with those of its tools that are.

    Args:
        tool: of a request.
        allowed: the `IDENTITY` of each allowed tool; of all of a type, without a name.
    """
    fields = get_given_fields(tool)
    kind, *names = map(fields.get, IDENTITY)
    if not allowed.isdisjoint({(kind, *names), (kind, None, None)}):
        yield tool
    elif kept := [some for one in fields.get("tools") or () for some in reduce_tool(one, allowed)]:
        yield tool.model_copy(update={"tools": kept})


def is_prewarm_request(request: Any) -> bool:
    """Whether a request only fills the prefix cache."""
    return get_given_fields(get_parameter(request, "prompt_cache_options")).get("prewarm") is True


def should_obfuscate(request: Any) -> bool:
    """Whether the events of a request's stream are to be of like sizes."""
    options = get_given_fields(get_parameter(request, "stream_options"))
    return options.get("include_obfuscation") is True


def render_parameter_table() -> str:
    """All of it as Markdown, for the manual."""
    rows = [
        f"| `{name}` | {one.how}{one.note and ': '}{one.note} |"
        for name, one in sorted(PARAMETERS.items())
    ]
    return "\n".join(["| parameter | what becomes of it |", "|---|---|", *rows])
