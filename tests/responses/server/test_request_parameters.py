"""Each parameter of OpenAI's API works or is refused by name, and the manual says which."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.responses import response_create_params as official
from openai.types.responses.response import ToolChoice
from openai.types.shared import Reasoning
from pydantic import BaseModel, ConfigDict, PrivateAttr

from vllmops_responses.server import request_parameters, response_fields, wire_format
from vllmops_responses.server.request_parameters import PARAMETERS
from vllmops_responses.server.wire_format import ApiError, EncodedEvent
from vllmops_responses.store.backend import Response

PAGE = Path(request_parameters.__file__).parents[2] / "vllmops/docs/parameters.md"


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    tools: list[Tool] | None = None


class Request(BaseModel):
    """As vLLM's, whose import takes longer than all these tests; tests/live has vLLM's own."""

    model_config = ConfigDict(extra="allow")
    background: bool = False
    include: list[str] | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    tool_choice: ToolChoice = "auto"
    tools: list[Tool] = []


class Sent(Request):
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)


@pytest.fixture(autouse=True)
def log_of_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_parameters, "reported", set())


def list_named(*names: str) -> list[str]:
    """List those of some unknown parameters that the header would name."""
    request = Request.model_validate(dict.fromkeys(names, 1))
    return request_parameters.list_ignored_parameters(request, tool_server=False)


def find_refused_parameter(*, tool_parser: bool = True, **given: Any) -> str:
    """Which parameter of a request is refused; empty if none is."""
    try:
        request_parameters.validate_parameters(Request(**given), tool_parser=tool_parser)
    except ApiError as error:
        return error.param if error.status == 400 and error.message and error.param else "?"
    return ""


def list_ignored(*, tool_server: bool = False, **given: Any) -> list[str]:
    return request_parameters.list_ignored_parameters(Request(**given), tool_server=tool_server)


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
    ("given", "name"),
    [
        *(({name: {"id": "x"}}, "") for name in ("access_programs", "moderation")),
        ({"client_metadata": {"installation": "x"}}, ""),
        ({"background_options": {"completion_window": "2h"}}, ".completion_window"),
        ({"background_options": {"continuation_id": "x"}}, ".continuation_id"),
        ({"background_options": {"window": "x"}}, ".window"),
        ({"background_options": "soonest"}, ""),
        ({"image": {"context_compression": "enabled"}}, ".context_compression"),
        ({"include": ["web_search_call.results"]}, ".web_search_call.results"),
        ({"include": ["anything"]}, ".anything"),
        ({"prompt_cache_options": {"prewarm": "yes"}}, ".prewarm"),
        ({"prompt_cache_options": {"ttl": ["30m"]}}, ".ttl"),
        ({"prompt_cache_retention": "24h"}, ""),
        ({"reasoning": {"summary": "detailed"}}, ".summary"),
        ({"service_tier": "flex"}, ""),
        ({"stream_options": {"include_obfuscation": True}}, ""),
        ({"stream_options": {"include_usage": True}, "stream": True}, ".include_usage"),
        ({"text": {"verbosity": "low"}}, ".verbosity"),
        ({"tools": [{"type": "function"}, {"type": "file_search"}]}, ".file_search"),
        ({"tools": [{"type": "mcp"}], "max_tool_calls": 1}, ".mcp"),
    ],
)
def test_what_has_no_effect_is_named(given: dict[str, Any], name: str) -> None:
    assert list_ignored(**given) == [next(iter(given)) + name]
    assert find_refused_parameter(**given) == ""


@pytest.mark.parametrize(
    "given",
    [
        {"background_options": {"completion_window": "soonest", "continuation_id": None}},
        {"image": {"context_compression": "auto"}},
        {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
        {"max_tool_calls": 1, "tools": [{"type": "function"}]},
        {"metadata": {str(n): "v" * 600 for n in range(20)}},
        {"previous_response": {"id": "resp_1"}},
        {"prompt_cache_options": {"mode": "implicit", "prewarm": True}},
        {"prompt_cache_options": {"prewarm": True}, "conversation": None},
        {"prompt_cache_options": {"prewarm": False}, "conversation": "conv_1"},
        {"prompt_cache_retention": "in_memory"},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"safety_identifier": "s" * 200},
        {"stream_options": {"include_obfuscation": False}, "stream": True},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tool_choice": "required", "tools": [{"type": "function"}]},
        {"tool_choice": {"type": "function", "name": "lamp"}, "tools": [{"type": "function"}]},
        {"tool_choice": {"type": "custom", "name": "lamp"}, "tools": [{"type": "custom"}]},
    ],
)
def test_what_works_is_not_named(given: dict[str, Any]) -> None:
    assert list_ignored(**given) == []
    assert find_refused_parameter(**given) == ""


def test_a_tool_server_runs_the_tools_that_vllm_knows() -> None:
    tools = [{"type": "code_interpreter"}, {"type": "file_search"}]
    assert list_ignored(tools=tools, tool_server=True) == ["tools.file_search"]
    assert list_ignored(tools=tools[:1], tool_server=True, max_tool_calls=1) == ["max_tool_calls"]


@pytest.mark.parametrize(
    "given",
    [
        {"stream": True},
        {"background": True},
        {"conversation": "conv_1"},
    ],
)
def test_a_prewarm_that_would_add_twice_is_refused(given: dict[str, Any]) -> None:
    refused = find_refused_parameter(prompt_cache_options={"prewarm": True}, **given)
    assert refused == "prompt_cache_options.prewarm"


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "web_search_preview"}, {"type": "mcp", "server_label": "s"}],
)
def test_no_tool_is_demanded_that_nothing_here_runs(choice: Any) -> None:
    given = {"tools": [{"type": "web_search_preview"}], "tool_choice": choice}
    assert find_refused_parameter(**given) == "tool_choice"


def test_no_tool_is_demanded_where_nothing_makes_calls_of_what_the_model_says() -> None:
    demands: tuple[Any, ...] = ("required", {"type": "function", "name": "lamp"})
    for choice in ("auto", "none", *demands):
        given = {"tools": [{"type": "function"}], "tool_choice": choice}
        refused = find_refused_parameter(**given, tool_parser=False)
        assert refused == ("tool_choice" if choice in demands else "")


def test_what_a_client_calls_a_parameter_can_forge_no_header_and_flood_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert list_named("a\r\nset-cookie", "ü", "x" * 65) == ["(other)"]
    for _ in range(2):
        assert len(list_named(*(f"x{n:04}" for n in range(1000)))) == 20
    for n in range(1000):
        list_named(f"y{n}")
    assert len(caplog.records) == 200


def test_a_skipped_item_is_named_and_a_compaction_is_not() -> None:
    def make_skipped_item(kind: str) -> Any:
        return SimpleNamespace(id=f"skipped_{kind}", content=[])

    asked = {"role": "user", "content": "x"}
    items = [make_skipped_item("mcp_list_tools"), asked, make_skipped_item("compaction_trigger")]
    assert list_ignored(input=items) == ["input.mcp_list_tools"]
    assert list_ignored(input=[*items, asked]) == [
        "input.compaction_trigger",
        "input.mcp_list_tools",
    ]
    assert list_ignored(input="x") == list_ignored(input=[asked]) == []


def restrict(**given: Any) -> tuple[Request, dict[str, Any]]:
    request = Sent(**given)
    request_parameters.restrict_tools(request)
    return request, request_parameters.get_sent_fields(request)


def test_allowed_tools_are_all_that_the_model_gets() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "lamp"},
        {"type": "function", "name": "door"},
        {"type": "namespace", "name": "house", "tools": [{"type": "function", "name": "roof"}]},
    ]

    def allow(mode: str, *allowed: dict[str, Any]) -> tuple[Any, list[Any]]:
        choice = {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}
        request, sent = restrict(tools=tools, tool_choice=choice)
        assert sent["tool_choice"].model_dump() == choice
        assert [tool.name for tool in sent["tools"]] == ["lamp", "door", "house"]
        left = [tool.model_dump(exclude_unset=True) for tool in request.tools]
        return request.tool_choice, left

    assert allow("auto", {"type": "function", "name": "door"}) == ("auto", tools[1:2])
    assert allow("required", {"type": "function", "name": "roof"}) == ("required", tools[2:])
    assert allow("auto", {"type": "namespace", "name": "house"}) == ("auto", tools[2:])
    assert allow("auto", {"type": "function", "name": "cat"}) == ("none", [])
    assert allow("required", {}) == ("required", [])


def test_gpt_oss_gets_the_tools_that_vllm_gives_it() -> None:
    tools = [{"type": kind} for kind in ("function", "web_search", "code_interpreter")]
    for tool_server, kept in ((False, 1), (True, 2)):
        request = Sent.model_validate({"tools": tools})
        request_parameters.drop_unused_tools(request, tool_server=tool_server)
        assert len(request.tools) == kept
        sent = request_parameters.get_sent_fields(request)["tools"]
        assert [tool.type for tool in sent] == [tool["type"] for tool in tools]
    for kind in ("custom", "namespace"):
        request = Sent.model_validate({"tools": [*tools, {"type": kind}]})
        with pytest.raises(ApiError, match="send functions") as refused:
            request_parameters.drop_unused_tools(request, tool_server=True)
        assert (refused.value.status, refused.value.param) == (400, "tools[3]")


def test_tools_that_nothing_restricts_stay() -> None:
    request, sent = restrict(tools=[{"type": "function"}], tool_choice="required")
    assert (len(request.tools), request.tool_choice, sent) == (1, "required", {})


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
