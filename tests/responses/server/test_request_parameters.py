"""Each parameter of OpenAI's API works or is refused by name, and the manual says which."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import response_create_params as official
from openai.types.responses.response import ToolChoice
from openai.types.shared import Reasoning
from pydantic import BaseModel, ConfigDict

from vllmops_responses.server import request_parameters, response_fields, wire_format
from vllmops_responses.server.request_parameters import PARAMETERS, ParameterSupport
from vllmops_responses.server.wire_format import ApiError, EncodedEvent
from vllmops_responses.store.backend import Response

PAGE = Path(request_parameters.__file__).parents[2] / "vllmops/docs/parameters.md"


class Tool(BaseModel):
    type: str


class Request(BaseModel):
    """As vLLM's, whose import takes longer than all these tests; tests/live has vLLM's own."""

    model_config = ConfigDict(extra="allow")
    background: bool = False
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    tool_choice: ToolChoice = "auto"
    tools: list[Tool] = []


def find_refused_parameter(**given: Any) -> str:
    """Which parameter of a request is refused; empty if none is."""
    return refused_of(Request(**given), tool_parser=True)


def refused_of(request: Request, *, tool_parser: bool) -> str:
    try:
        request_parameters.validate_parameters(request, tool_server=False, tool_parser=tool_parser)
    except ApiError as error:
        return error.param if error.status == 400 and error.message and error.param else "?"
    return ""


def test_the_table_has_what_the_official_client_sends() -> None:
    known = {*official.ResponseCreateParamsBase.__annotations__, "stream"}
    assert PARAMETERS.keys() == known
    for name, kind in {
        "background_options": official.BackgroundOptions,
        "image": official.Image,
        "prompt_cache_options": official.PromptCacheOptions,
        "reasoning": Reasoning,
        "stream_options": official.StreamOptions,
    }.items():
        inner = getattr(kind, "model_fields", None) or kind.__annotations__
        assert (PARAMETERS[name].fields or {}).keys() == inner.keys(), name


def test_the_manual_has_the_table() -> None:
    assert request_parameters.render_parameter_table() in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    "name", [name for name, one in PARAMETERS.items() if one.how == ParameterSupport.REFUSED]
)
def test_unsupported_parameter_is_refused_by_name(name: str) -> None:
    assert find_refused_parameter(**{name: {"id": "x"}}) == name
    assert find_refused_parameter(**{name: None}) == ""


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"background_options": {"completion_window": "2h"}}, ".completion_window"),
        ({"background_options": {"continuation_id": "x"}}, ".continuation_id"),
        ({"background_options": {"window": "x"}}, ".window"),
        ({"background_options": "soonest"}, ""),
        ({"image": {"context_compression": "enabled"}}, ".context_compression"),
        ({"max_tool_calls": 0}, ""),
        ({"max_tool_calls": 1, "tools": [{"type": "code_interpreter"}]}, ""),
        ({"metadata": {str(n): "" for n in range(17)}}, ""),
        ({"metadata": {"k" * 65: ""}}, ""),
        ({"metadata": {"k": "v" * 513}}, ""),
        ({"prompt_cache_options": {"prewarm": True}, "stream": True}, ".prewarm"),
        ({"prompt_cache_options": {"prewarm": True}, "background": True}, ".prewarm"),
        ({"prompt_cache_options": {"prewarm": True}, "conversation": "conv_1"}, ".prewarm"),
        ({"prompt_cache_options": {"prewarm": "yes"}}, ".prewarm"),
        ({"prompt_cache_options": {"ttl": ["30m"]}}, ".ttl"),
        ({"prompt_cache_retention": "24h"}, ""),
        ({"reasoning": {"summary": "detailed"}}, ".summary"),
        ({"safety_identifier": "s" * 129}, ""),
        ({"safety_identifier": 5}, ""),
        ({"stream_options": {"include_obfuscation": True}}, ""),
        ({"stream_options": {"include_usage": True}, "stream": True}, ".include_usage"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, ""),
        ({"tool_choice": {"type": "file_search"}}, ""),
        ({"tool_choice": {"type": "mcp", "server_label": "s"}}, ""),
        ({"tools": [{"type": "function"}, {"type": "file_search"}]}, "[1]"),
    ],
)
def test_a_value_that_nobody_acts_on_is_refused(given: dict[str, Any], param: str) -> None:
    assert find_refused_parameter(**given) == next(iter(given)) + param


@pytest.mark.parametrize(
    "given",
    [
        {"background_options": {"completion_window": "soonest", "continuation_id": None}},
        {"image": {"context_compression": "auto"}},
        {"max_tool_calls": 1, "tools": [{"type": "function"}]},
        {"metadata": {"k" * 64 if n == 0 else str(n): "v" * 512 for n in range(16)}},
        {"prompt_cache_options": {"mode": "implicit", "prewarm": True}},
        {"prompt_cache_options": {"prewarm": True}, "conversation": None},
        {"prompt_cache_options": {"prewarm": False}, "conversation": "conv_1"},
        {"prompt_cache_retention": "in_memory"},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"safety_identifier": "s" * 128},
        {"stream_options": {"include_obfuscation": False}, "stream": True},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "lamp"}},
        {"tool_choice": {"type": "custom", "name": "lamp"}},
    ],
)
def test_a_value_that_works_is_taken(given: dict[str, Any]) -> None:
    assert find_refused_parameter(**given) == ""


def test_no_tool_is_demanded_where_nothing_makes_calls_of_what_the_model_says() -> None:
    demands: tuple[Any, ...] = ("required", {"type": "function", "name": "lamp"})
    for choice in ("auto", "none", *demands):
        found = refused_of(Request(tool_choice=choice), tool_parser=False)
        assert found == ("tool_choice" if choice in demands else "")


def test_padding_is_put_into_stored_events_and_taken_out() -> None:
    async def generate_events() -> AsyncIterator[EncodedEvent]:
        for delta in ("a", "a longer one", "ü" * 40):
            event = {"type": "response.output_text.delta", "delta": delta, "obfuscation": "xx"}
            yield EncodedEvent(event["type"], json.dumps(event).encode())
        yield EncodedEvent("response.completed", b'{"response":{}}')

    async def read(*, wanted: bool) -> list[dict[str, Any]]:
        return [
            json.loads(f.data)
            async for f in response_fields.obfuscate_events(generate_events(), should_pad=wanted)
        ]

    bare = asyncio.run(read(wanted=False))
    assert not any("obfuscation" in event for event in bare)
    *padded, last = asyncio.run(read(wanted=True))
    assert "obfuscation" not in last
    sizes = [len(event["delta"].encode()) + len(event["obfuscation"]) for event in padded]
    assert sizes == [response_fields.STEP, response_fields.STEP, 3 * response_fields.STEP]


def test_include_of_fields_that_a_response_lacks_is_refused() -> None:
    part: dict[str, Any] = {"type": "output_text", "text": "a", "annotations": [], "logprobs": None}
    body = json.dumps({"output": [{"type": "message", "content": [part]}]}).encode()
    made = Response(id="r", owner="", model="m", status="completed", body=body)
    wire_format.require_included_fields(
        made, ["file_search_call.results", "reasoning.encrypted_content"]
    )
    for name in ("message.output_text.logprobs", "other"):
        with pytest.raises(ApiError) as caught:
            wire_format.require_included_fields(made, [name])
        assert (caught.value.status, caught.value.param) == (400, "include")
    with_them = body.replace(b"null", b'[{"token": "a"}]')
    made = Response(id="r", owner="", model="m", status="completed", body=with_them)
    wire_format.require_included_fields(made, ["message.output_text.logprobs"])


def test_an_answer_without_tokens_has_all_the_logprobs_that_there_are() -> None:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
    body = json.dumps({"output": [{"type": "message", "content": [part]}]}).encode()
    made = Response(id="r", owner="", model="m", status="completed", body=body)
    wire_format.require_included_fields(made, ["message.output_text.logprobs"])
