"""Stored responses of a real vLLM with two API servers, by OpenAI's own client.

Each connection may reach either server, so what is asked a few times has been asked of both.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesCompactionSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
)

from vllmops_responses.keys import carrier
from vllmops_responses.keys import keyring_file as file
from vllmops_responses.keys.keyring import KeyRing, Secret, make_single_key_ring
from vllmops_responses.server.item_rendering import SKIPPED

from ..support.extent import combinations, long
from ..support.fleet import TOKEN
from ..support.items import ITEMS
from ..support.versions import INSTALLED
from ..support.waiting import until
from . import clients, strict
from .clients import (
    CARRY,
    ENDLESS,
    MODEL,
    SPEAKS,
    STOPPED_S,
    WAYS,
    Load,
    background,
    connect,
    count,
    count_input_tokens,
    reach,
    request_carrier_answer,
    run_carrier_conversation,
    say,
    sealed_in,
    send_responses_request,
    start_background_stream,
    wait_until_response_ends,
)
from .conftest import Cli, Live, kill

TOOL = {
    "type": "function",
    "name": "lamp",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}
# Nothing can be generated so, which vLLM notices once it has answered.
HOPELESS = {"extra_body": {"logit_bias": {"99999999": 1}}}


@pytest.fixture(scope="module")
def keyring(responses_server: Live) -> Path:
    """What a server makes that nobody gave a key."""
    return responses_server.home / "keyring.json"


@pytest.fixture(scope="module")
def responses_server(text_pair: Live) -> Live:
    """The server that keeps them."""
    return text_pair


@pytest.fixture(scope="module")
def base(responses_server: Live) -> str:
    return clients.base(responses_server)


@pytest.fixture(scope="module")
def client(base: str) -> Any:
    return connect(base)


@pytest.fixture(scope="module")
def stranger(base: str) -> Any:
    return connect(base, "two")


# -- what a response has ----------------------------------------------------------------

SCHEMA = {"type": "json_schema", "name": "lamp", "schema": TOOL["parameters"]}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
    "tool": {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200},
    "schema": {"text": {"format": SCHEMA}, "max_output_tokens": 60},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "failing": HOPELESS["extra_body"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_responses_and_events_conform_to_strict_types(base: str, shape: str) -> None:
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 4, **SHAPES[shape]}
    ran = send_responses_request(
        base, "", "POST", json={**asked, "background": True, "stream": True}
    ).text
    *_, last = strict.events(ran)
    made = last["response"]
    path = f"/{made['id']}"
    assert strict.events(send_responses_request(base, f"{path}?stream=true").text)[-1] == last
    assert send_responses_request(base, path).json() == made
    (listed,) = [
        one for one in send_responses_request(base, "").json()["data"] if one["id"] == made["id"]
    ]
    assert listed == made
    strict.events(send_responses_request(base, "", "POST", json={**asked, "stream": True}).text)
    if shape != "failing":
        foreground = send_responses_request(base, "", "POST", json=asked).json()
        strict.response(foreground)
        assert send_responses_request(base, f"/{foreground['id']}").json() == foreground
        assert (foreground["completed_at"] is None) == (foreground["status"] != "completed")
    queued = send_responses_request(base, "", "POST", json={**asked, "background": True}).json()
    strict.response(queued)
    assert made["store"] is True
    for name in {"safety_identifier", "prompt_cache_key", "metadata"} & asked.keys():
        assert made[name] == queued[name] == asked[name]


@pytest.mark.parametrize(
    "given",
    [
        {"client_metadata": {"installation": "x"}},
        {"moderation": {"model": "m"}},
        {"text.verbosity": "high"},
        {"reasoning.mode": "pro"},
        {"reasoning.summary": "detailed"},
        {"prompt_cache_options.ttl": "12h"},
        {"prompt_cache_retention": "24h"},
        {"background_options.completion_window": "2h"},
        {"stream_options": {"include_usage": True}},
        {"tools.web_search": [{"type": "web_search", "external_web_access": True}]},
        {"include.web_search_call.results": ["web_search_call.results"]},
    ],
    ids=lambda given: next(iter(given)),
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_parameter_that_has_no_effect_is_named(
    base: str, given: dict[str, Any], stream: bool
) -> None:
    ((name, value),) = given.items()
    outer, _, inner = name.partition(".")
    asked = {outer: {inner: value} if inner and isinstance(value, str) else value}
    made = send_responses_request(
        base,
        "",
        "POST",
        json={"model": MODEL, "input": "x", "max_output_tokens": 2, "stream": stream, **asked},
    )
    assert made.status_code == 200, made.text
    assert made.headers["vllmops-ignored"] == (
        "stream_options.include_usage" if stream and name == "stream_options" else name
    )
    if outer == "tools":  # openresponses' types know no others than functions
        return
    answer = strict.events(made.text)[-1]["response"] if stream else made.json()
    strict.response(answer)
    if name in {"text.verbosity", "reasoning.summary"}:
        assert answer[outer][inner] == value
    if name == "prompt_cache_retention":
        assert answer[name] == value


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search_preview"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_would_make_the_answer_another_one_is_refused(
    base: str, asked: dict[str, Any], param: str
) -> None:
    refused = send_responses_request(base, "", "POST", json={"model": MODEL, "input": "x", **asked})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param, refused.text


def test_of_allowed_tools_the_model_gets_those_alone(client: Any) -> None:
    tools = [{**TOOL, "name": name} for name in ("lamp", "door")]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "door"}],
    }
    made = say(client, tools=tools, tool_choice=choice, max_output_tokens=200)
    assert {item.name for item in made.output if item.type == "function_call"} == {"door"}
    assert made.tool_choice.model_dump() == choice
    assert [tool.name for tool in made.tools] == ["lamp", "door"]


def test_a_prewarmed_prompt_is_in_the_prefix_cache(client: Any) -> None:
    prompt = f"{time.time()} " + "a prompt of several blocks, " * 20
    options = {"extra_body": {"prompt_cache_options": {"prewarm": True}}}
    warm = say(client, prompt, **options)
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    # Both servers reach the same engine.
    assert say(client, prompt).usage.input_tokens_details.cached_tokens > 0


def test_events_are_padded_where_that_is_asked_for(client: Any) -> None:
    asked = {"stream": True, "background": True, "stream_options": {"include_obfuscation": True}}

    def pads(events: Any) -> set[int | None]:
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert deltas
        return {
            (len(event.delta.encode()) + len(event.obfuscation)) % 32
            if hasattr(event, "obfuscation")
            else None
            for event in deltas
        }

    events = list(say(client, **asked, max_output_tokens=20, **ENDLESS))
    assert pads(events) == {0}
    made = events[0].response.id
    assert pads(client.responses.retrieve(made, stream=True)) == {0}
    bare = client.responses.retrieve(made, stream=True, include_obfuscation=False)
    assert pads(bare) == {None}
    plain = client.responses.retrieve(made, include=["file_search_call.results"])
    assert plain == client.responses.retrieve(made)
    with pytest.raises(openai.BadRequestError, match="created without it") as caught:
        client.responses.retrieve(made, include=["message.output_text.logprobs"])
    assert caught.value.param == "include"


# -- what an input has ------------------------------------------------------------------


def test_items_of_every_type_reach_the_prompt(base: str, client: Any) -> None:
    least = count(client, [{"role": "user", "content": "on"}])
    for item in ITEMS:
        given = [item, {"role": "user", "content": "on"}]
        asked = {"model": MODEL, "input": given, "max_output_tokens": 2}
        made = send_responses_request(base, "", "POST", json=asked)
        assert made.status_code == 200, (item, made.text)
        tokens, skipped = made.json()["usage"]["input_tokens"], item["type"] in SKIPPED
        assert (tokens == least) == skipped, item
        assert (made.headers.get("vllmops-ignored") == f"input.{item['type']}") == skipped
        after = say(client, "on", previous_response_id=made.json()["id"])
        assert after.usage.input_tokens > tokens


def test_every_text_of_an_answer_and_of_reasoning_reaches_the_prompt(client: Any) -> None:
    def measure(texts: list[str]) -> int:
        parts = [{"type": "output_text", "text": text} for text in texts]
        thought = [{"type": "reasoning_text", "text": text} for text in texts]
        return count(
            client,
            [
                {"role": "user", "content": "on"},
                {"type": "reasoning", "summary": [], "content": thought},
                {"type": "message", "role": "assistant", "content": parts},
                {"role": "user", "content": "on"},
            ],
        )

    one, two, three = (measure(["one two three"] * number) for number in (1, 2, 3))
    assert one < two < three


def test_a_reference_stands_for_an_item_of_a_stored_response(
    base: str, client: Any, stranger: Any
) -> None:
    events = list(say(client, stream=True))
    first = events[-1].response
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {
        item.id for item in first.output
    }
    (item,) = first.output
    whole = [
        {"role": "user", "content": "hello"},
        item.model_dump(mode="json"),
        {"role": "user", "content": "on"},
    ]
    given = [whole[0], {"type": "item_reference", "id": item.id}, whole[2]]
    for options in ({}, {"store": False}, {"background": True}):
        made = say(client, given, **options)
        if options.get("background"):
            made = wait_until_response_ends(client, made.id)
        assert made.usage.input_tokens == count(client, whole) == count(client, given)
    listed = client.responses.input_items.list(say(client, given).id, order="asc").data
    assert [one.type for one in listed] == ["message"] * 3
    assert listed[1].id == item.id
    # A reference to an item of an earlier turn of the chain adds nothing to the prompt.
    after = say(client, given[1:], previous_response_id=first.id)
    assert (
        after.usage.input_tokens
        == say(client, whole[2:], previous_response_id=first.id).usage.input_tokens
    )
    for who, name in ((stranger, item.id), (client, "msg_unknown_0")):
        with pytest.raises(openai.BadRequestError, match=name) as refused:
            say(who, [{"type": "item_reference", "id": name}])
        assert refused.value.param == "input[0]"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": [{"role": "user", "content": "x"}, {"type": "wobble"}]}, "input[1]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
        ({"tools": [{"type": "wobble"}]}, "tools[0]"),
    ],
)
def test_what_is_unknown_is_named(base: str, given: dict[str, Any], param: str) -> None:
    answer = send_responses_request(base, "", "POST", json={"model": MODEL, "input": "x", **given})
    assert answer.status_code == 400
    assert (error := answer.json()["error"])["param"] == param
    assert error["message"].startswith(f"{param} ")
    assert "does not know" in error["message"]


# -- what becomes of a response ---------------------------------------------------------


def test_both_api_servers_know_every_response(client: Any) -> None:
    made = say(client)
    for _ in range(8):
        assert client.responses.retrieve(made.id) == made
        turn = say(client, "and then?", previous_response_id=made.id)
        assert turn.previous_response_id == made.id
    run = background(client)
    for _ in range(8):
        assert client.responses.cancel(run.id).status == "cancelled"


def test_tokens_are_counted_as_for_an_answer(client: Any, stranger: Any) -> None:
    first = say(client, "one")
    asked: list[dict[str, Any]] = [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"instructions": "be brief", "previous_response_id": first.id},
        {"reasoning": {"effort": "low"}},
    ]
    for options in asked:
        tokens = count_input_tokens(client, "two", **options)
        assert tokens == say(client, "two", **options).usage.input_tokens
    words = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
    chain = {"previous_response_id": first.id}
    assert (
        count_input_tokens(client, "two", **chain)
        == count_input_tokens(client, words)
        > count_input_tokens(client, "two")
    )
    assert count_input_tokens(client, None, **chain) < count_input_tokens(client, "two", **chain)
    for given, options in (("two", chain), ("two " * 5000, {})):
        with pytest.raises(openai.APIStatusError) as refused:
            count_input_tokens(stranger, given, **options)
        assert refused.value.status_code == (404 if options else 400)


def test_a_failed_generation_is_told_as_failed(client: Any) -> None:
    run = say(client, background=True, **HOPELESS)
    failed = wait_until_response_ends(client, run.id)
    assert failed.status == "failed"
    assert "logit_bias" in failed.error.message
    last = list(say(client, background=True, stream=True, **HOPELESS))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    foreground = list(say(client, stream=True, **HOPELESS))[-1]
    assert foreground.type == "response.failed"


def test_a_response_deleted_while_it_runs_stays_deleted(client: Any, base: str) -> None:
    run = background(client, max_output_tokens=600)
    assert send_responses_request(base, f"/{run.id}", "DELETE").json() == {
        "id": run.id,
        "object": "response",
        "deleted": True,
    }
    stream, deleted = start_background_stream(client, max_output_tokens=600)
    client.responses.delete(deleted)
    with pytest.raises(openai.APIError, match="was deleted"):
        list(stream)
    time.sleep(3)  # as long as it would have run
    for _ in range(4):
        for response_id in (run.id, deleted):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)


def test_an_id_that_is_taken_is_refused(client: Any, stranger: Any) -> None:
    mine = say(client, extra_body={"request_id": "resp_mine"})
    for who in (client, stranger):
        for options in ({}, {"background": True}, {"stream": True}):
            with pytest.raises(openai.ConflictError) as caught:
                list(say(who, extra_body={"request_id": "resp_mine"}, **options))
            assert caught.value.param == "request_id"
    assert client.responses.retrieve("resp_mine") == mine


def test_another_api_key_cannot_access_a_response(client: Any, stranger: Any, base: str) -> None:
    made, run = say(client), background(client)
    attempts: list[Callable[[], Any]] = [
        lambda: stranger.responses.retrieve(made.id),
        lambda: stranger.responses.delete(made.id),
        lambda: stranger.responses.cancel(run.id),
        lambda: stranger.responses.input_items.list(made.id),
        lambda: say(stranger, previous_response_id=made.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    seen = [
        item["id"] for item in send_responses_request(base, "?limit=100", key="two").json()["data"]
    ]
    assert not {made.id, run.id} & set(seen)
    assert client.responses.retrieve(run.id).status != "cancelled"
    client.responses.cancel(run.id)


def test_cancelling_tells_what_it_can_not_cancel(responses_server: Live, client: Any) -> None:
    engine = psutil.Process(responses_server.pids()["engine"])
    engine.suspend()  # so that the run is not over before it is cancelled
    try:
        run = background(client)
        assert client.responses.cancel(run.id).status == "cancelled"
        assert client.responses.cancel(run.id).status == "cancelled"
        assert client.responses.retrieve(run.id).status == "cancelled"
    finally:
        engine.resume()
    finished = background(client, max_output_tokens=3)
    wait_until_response_ends(client, finished.id)
    with pytest.raises(openai.BadRequestError, match="incomplete"):
        client.responses.cancel(finished.id)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(say(client).id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")


def test_a_cancelled_run_stops_where_it_runs(responses_server: Live, client: Any) -> None:
    (engine,) = reach(responses_server, "engine")
    until(lambda: engine.fetch_engine_state().running == 0)  # of what others have begun
    runs = [background(client) for _ in range(4)]
    until(lambda: engine.fetch_engine_state().running == 4)
    for run in runs:
        client.responses.cancel(run.id)
    until(lambda: engine.fetch_engine_state().running == 0, STOPPED_S)


# -- streams ----------------------------------------------------------------------------


def test_a_cancelled_stream_ends(client: Any) -> None:
    stream, response_id = start_background_stream(client)
    client.responses.cancel(response_id)
    began = time.monotonic()
    last = list(stream)[-1]
    assert time.monotonic() - began < STOPPED_S
    # The client does not know this event, so its response is a plain dict.
    assert (last.type, last.response["status"]) == ("response.cancelled", "cancelled")
    for _ in range(4):
        again = list(client.responses.retrieve(response_id, stream=True))
        assert again[-1].type == "response.cancelled"


def test_a_stream_is_resumed_anywhere(client: Any) -> None:
    stream, response_id = start_background_stream(client, max_output_tokens=200)
    stream.close()
    for _ in range(4):  # while it runs, and after
        events = list(client.responses.retrieve(response_id, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        assert events[-1].type == "response.incomplete"
    whole = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == whole
    for after in (0, 7, len(events) - 2):
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=after))
        assert rest == events[after + 1 :]
    at_the_end = client.responses.retrieve(response_id, stream=True, starting_after=len(events) - 1)
    assert list(at_the_end) == []


@pytest.mark.parametrize("after", ["-1", "-3", "100000", "99999999999999999999", "x", "1.5"])
def test_a_number_to_resume_from_that_is_none(client: Any, base: str, after: str) -> None:
    stream, response_id = start_background_stream(client, max_output_tokens=5)
    list(stream)
    answer = send_responses_request(base, f"/{response_id}?stream=true&starting_after={after}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)


def test_only_background_streams_can_be_resumed(client: Any) -> None:
    run = background(client)
    for made in (say(client), run, say(client, background=True)):
        with pytest.raises(openai.BadRequestError):
            client.responses.retrieve(made.id, stream=True)
    client.responses.cancel(run.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_unknown", stream=True)


@pytest.mark.parametrize("store", [True, False])
def test_a_stream_cut_off_by_its_token_limit_ends_as_incomplete(client: Any, store: bool) -> None:
    last = list(say(client, stream=True, store=store, **ENDLESS))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_a_stream_in_the_foreground_is_kept(client: Any) -> None:
    last = list(say(client, stream=True))[-1]
    assert client.responses.retrieve(last.response.id) == last.response


# -- conversations ----------------------------------------------------------------------


def test_tool_calls_and_reasoning_stay_in_the_conversation(client: Any) -> None:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "the lamp is what is meant"}],
    }
    asked: list[Any] = [{"role": "user", "content": "on"}, thought]
    asked.append({"role": "assistant", "content": "I see"})
    asked.append({"role": "user", "content": "do it"})
    forced = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}

    def request_tool_call() -> (
        Any
    ):  # the model may fill its answer with blanks, and never come to an end
        made = say(client, asked, instructions="you are a lamp", **forced)
        return made if made.output[-1].type == "function_call" else None

    first = until(request_tool_call)
    call = first.output[-1]
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "it is on"}
    second = say(client, [done], previous_response_id=first.id, tools=[TOOL])
    third = say(client, "thanks", previous_response_id=second.id)
    sent: list[Any] = [*asked, *first.output, done, *second.output]
    thanks = {"role": "user", "content": "thanks"}
    explicit = say(client, [*sent, thanks], store=False)
    assert third.usage.input_tokens == explicit.usage.input_tokens
    listed = [item.type for item in client.responses.input_items.list(second.id)]
    assert listed == ["function_call_output"]


def test_a_turn_that_is_gone_or_not_over(client: Any) -> None:
    first = say(client)
    second = say(client, previous_response_id=first.id)
    client.responses.delete(first.id)
    for previous in (first.id, second.id):
        for options in ({}, {"store": False}, {"stream": True}):
            with pytest.raises(openai.NotFoundError):
                say(client, previous_response_id=previous, **options)
    run = background(client)
    with pytest.raises(openai.BadRequestError, match="still"):
        say(client, previous_response_id=run.id)
    client.responses.cancel(run.id)


# -- conversations that clients carry ---------------------------------------------------


def make_carrier_item(text: str) -> dict[str, Any]:
    """A carrier as an item that somebody sends."""
    return {"type": "reasoning", "id": "rs_held", "summary": [], "encrypted_content": text}


@pytest.mark.parametrize(("way", "streamed"), combinations(WAYS, (False, True)))
def test_a_client_carries_its_conversation(client: Any, way: str, streamed: bool) -> None:
    *_, answer = run_carrier_conversation([client], way, streamed=streamed)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_tool_calls_are_carried(client: Any) -> None:
    forced = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}

    def request_tool_call() -> (
        Any
    ):  # the model may fill its answer with blanks, and never come to an end
        made = say(client, "on", **CARRY, **forced)
        return made if made.output[-2].type == "function_call" else None

    first = until(request_tool_call)
    *_, call, item = first.output
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "it is on"}
    asked = {"role": "user", "content": "on"}
    plain = [asked, *first.output[:-1], done]
    tokens = say(client, plain, tools=[TOOL], store=False).usage.input_tokens
    previous = {"previous_response": first.model_dump(mode="json")}
    for given, more in (
        ([item, done], {}),
        ([asked, *first.output, done], {}),
        ([asked, item, call, done], {}),
        ([asked, call, done, item], {}),
        ([done], {"extra_body": previous}),
    ):
        second = say(client, given, tools=[TOOL], **CARRY, **more)
        assert second.usage.input_tokens == tokens
        assert call.call_id in json.dumps(sent_by(second, client))


def sent_by(response: Any, client: Any) -> Any:
    """The items that an answer's carrier holds, as a server lists them that stores a turn."""
    stored = say(client, [response.output[-1], {"role": "user", "content": "x"}])
    return [item.to_dict() for item in client.responses.input_items.list(stored.id, order="asc")]


def test_a_conversation_goes_from_a_store_to_a_client_and_back(client: Any) -> None:
    asked = [{"role": "user", "content": entry} for entry in ("one", "two", "three", "four")]
    first = say(client, [asked[0]])
    second = say(client, [asked[1]], previous_response_id=first.id, **CARRY)
    third = say(client, [second.output[-1], asked[2]])
    fourth = say(client, [asked[3]], previous_response_id=third.id)
    sent = [asked[0], *first.output, asked[1], *second.output, asked[2], *third.output, asked[3]]
    assert fourth.usage.input_tokens == count(client, sent)
    listed = client.responses.input_items.list(third.id, order="asc")
    assert not any(getattr(item, "encrypted_content", None) for item in listed)


def test_a_carrier_replaces_the_previous_response(client: Any) -> None:
    """Codex sends both on a WebSocket, after its session was resumed."""
    asked = [{"role": "user", "content": entry} for entry in ("one", "two", "three", "four")]
    first = say(client, [asked[0]])
    second = say(client, [asked[1]], previous_response_id=first.id, **CARRY)
    for given in ([second.output[-1]], [*second.output]):
        third = say(client, [*given, asked[2]], previous_response_id=first.id)
        fourth = say(client, [asked[3]], previous_response_id=third.id)
        sent = [asked[0], *first.output, asked[1], *second.output, asked[2]]
        assert third.usage.input_tokens == count(client, sent)
        assert fourth.usage.input_tokens == count(client, [*sent, *third.output, asked[3]])


def test_it_is_off_unless_it_is_asked_for(client: Any) -> None:
    for options in ({"store": False}, {"include": CARRY["include"]}, {**CARRY, "store": True}):
        made = say(client, **options)
        assert not any(item.type == "reasoning" for item in made.output)


def test_encrypted_content_of_another_provider_is_ignored(client: Any) -> None:
    asked = {"role": "user", "content": "hello"}
    for options in ({"store": False}, {}, CARRY):
        made = say(client, [make_carrier_item("gAAAAABotherprovider"), asked], **options)
        assert made.usage.input_tokens == count(client, [asked])


def seeds(history: Any, secret: bytes) -> str:
    """A carrier as #35903 makes it."""
    payload = base64.b64encode(json.dumps(history).encode())
    return f"vllm:1:{payload.decode()}:{hmac.new(secret, payload, hashlib.sha256).hexdigest()}"


def test_a_carrier_of_format_1_is_taken(client: Any, keyring: Path) -> None:
    primary = file.load_keyring(keyring).require_primary()
    history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    asked = {"role": "user", "content": "three"}
    made = say(client, [make_carrier_item(seeds(history, primary.secret.reveal())), asked], **CARRY)
    assert made.usage.input_tokens == count(client, [*history, asked])
    assert sealed_in(made).startswith(f"vllm:2:{primary.kid}:")


def owner(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def forge_carrier(
    ring: KeyRing, *, model: str = MODEL, key: str = "one", items: Any = None, **options: Any
) -> str:
    history = [{"role": "user", "content": "hi"}] if items is None else items
    return carrier.seal_history(history, ring, model=model, owner=owner(key), **options)


BAD: dict[str, Callable[[KeyRing], str]] = {
    "tampered": lambda ring: forge_carrier(ring)[:-9] + "AAAAAAAAA",
    "malformed": lambda ring: forge_carrier(ring)[:60],
    "malformed, of a later version": lambda _: "vllm:3:x",
    "malformed, no items": lambda ring: forge_carrier(ring, items=[7]),
    "malformed, no messages": lambda ring: carrier.sign_history([7], ring),
    "unknown-key": lambda _: forge_carrier(make_single_key_ring(Secret(b"x" * 32))),
    "tampered, in format 1": lambda _: seeds([], b"x" * 32),
    "expired": lambda ring: forge_carrier(ring, now=time.time() - 3600, ttl_s=3599),
    "other-model": lambda ring: forge_carrier(ring, model="demo-texts"),
    "other-owner": lambda ring: forge_carrier(ring, key="two"),
    "too-large": lambda _: "vllm:2:k:a256gcm-zlib:" + "A" * (49 << 20),
}


@pytest.mark.parametrize("case", BAD)
def test_a_carrier_that_is_refused(client: Any, keyring: Path, case: str) -> None:
    text = BAD[case](file.load_keyring(keyring))
    asked = {"role": "user", "content": "hello"}
    for options in (CARRY, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            say(client, [make_carrier_item(text), asked], **options)
        assert caught.value.code == f"carrier.{case.partition(',')[0]}"
        assert caught.value.param == "input"
        assert len(str(caught.value)) < 400
    previous = {"output": [make_carrier_item(text)]}
    with pytest.raises(openai.BadRequestError) as caught:
        say(client, extra_body={"previous_response": previous})
    assert caught.value.param == "previous_response"


COMPACT: dict[str, Any] = {
    "extra_body": {
        "context_management": [{"type": "compaction", "compact_threshold": 50}],
        **SPEAKS["extra_body"],
    }
}


def make_compaction_item(text: str) -> dict[str, Any]:
    return {"type": "compaction", "encrypted_content": text}


# The client's type of what is left has no messages of the user, which OpenAI's API has in it, too.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
def test_a_conversation_is_compacted_on_request(client: Any, stranger: Any) -> None:
    first = say(client, "one", max_output_tokens=100)
    said: list[Any] = [{"role": "user", "content": "one"}, *first.output]
    two, three = ({"role": "user", "content": text} for text in ("two", "three"))
    asked = {"input": [*said, two]}, {"input": [two], "previous_response_id": first.id}
    for given in asked:
        made = client.responses.compact(model=MODEL, **given)
        assert made.object == "response.compaction"
        assert [item.type for item in made.output] == ["message", "message", "compaction"]
        assert [item.content[0].text for item in made.output[:2]] == ["one", "two"]
        # A random model seldom ends its summary.
        assert 0 < made.usage.output_tokens <= 512
        assert made.usage.total_tokens == made.usage.output_tokens + made.usage.input_tokens
        sizes = {
            count_input_tokens(client, [*sent, three]) for sent in (made.output, made.output[-1:])
        }
        assert len(sizes) == 1
        turn = say(client, [*made.output, three])
        assert {turn.usage.input_tokens} == sizes
        chained = say(client, "four", previous_response_id=turn.id)
        whole = [*made.output, three, *turn.output, {"role": "user", "content": "four"}]
        assert chained.usage.input_tokens == count_input_tokens(client, whole)
        with pytest.raises(openai.BadRequestError) as refused:
            say(stranger, [*made.output, three])
        assert refused.value.code == "carrier.other-owner"
    for given, status in (({"input": []}, 400), ({"previous_response_id": "resp_0"}, 404)):
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.compact(model=MODEL, **given)
        assert caught.value.status_code == status


@pytest.mark.parametrize("stored", [True, False])
def test_a_conversation_is_compacted_as_it_grows(client: Any, stored: bool) -> None:
    short = say(client, "one", store=stored, **COMPACT)
    assert [item.type for item in short.output] == ["message"]
    given: list[Any] = [{"role": "user", "content": "one"}, *short.output]
    given += [{"role": "assistant", "content": "word " * 100}, {"role": "user", "content": "two"}]
    options = {"store": stored, **COMPACT}
    events = list(say(client, given, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added, done, after = events[2:5]
    assert (added.type, done.type) == ("response.output_item.added", "response.output_item.done")
    assert (added.item.type, added.output_index, after.output_index) == ("compaction", 0, 1)
    streamed = events[-1].response
    assert streamed.output[0] == done.item
    assert {event.output_index for event in events[4:-1]} == {1}
    answers = [streamed, say(client, given, **options)]
    if stored:
        answers.append(
            wait_until_response_ends(client, say(client, given, background=True, **options).id)
        )
    for answer in answers:
        assert [item.type for item in answer.output] == ["compaction", "message"]
        more = {"role": "user", "content": "three"}
        sizes = {count_input_tokens(client, [*sent, *answer.output, more]) for sent in ([], given)}
        if stored:
            assert client.responses.retrieve(answer.id).output == answer.output
            sizes.add(count_input_tokens(client, "three", previous_response_id=answer.id))
        assert len(sizes) == 1


def fits(client: Any, items: list[Any]) -> bool:
    try:
        return bool(count_input_tokens(client, items))
    except openai.BadRequestError:
        return False


@pytest.mark.parametrize("stored", [True, False])
def test_the_oldest_items_of_what_is_too_long_are_dropped(client: Any, stored: bool) -> None:
    long = [{"role": "user", "content": f"{number} " + "word " * 400} for number in range(20)]
    rules = {"role": "developer", "content": "be brief"}
    items: list[Any] = [long[0], rules, *long[1:]]
    with pytest.raises(openai.BadRequestError):
        say(client, items)
    made = say(client, items, truncation="auto", store=stored)
    assert made.truncation == "auto"
    fitting = next(kept for kept in range(1, 20) if not fits(client, [rules, *long[-kept - 1 :]]))
    assert made.usage.input_tokens == count_input_tokens(client, [rules, *long[-fitting:]])
    assert made.usage.input_tokens == count_input_tokens(client, items, truncation="auto")
    if stored:
        after = say(client, "and then?", previous_response_id=made.id, truncation="auto")
        assert after.usage.input_tokens > count_input_tokens(client, long[-1:])
    # Of one item nothing can be dropped: vLLM cuts its beginning off.
    one = say(client, [{"role": "user", "content": "word " * 9000}], truncation="auto")
    assert 2000 < one.usage.input_tokens <= 4096


def test_a_body_that_is_no_text_is_an_error_object(base: str) -> None:
    head = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    for path in ("", "/compact", "/input_tokens"):
        made = httpx.post(f"{base}/responses{path}", headers=head, content=b"\xff")
        assert (made.status_code, list(made.json())) == (400, ["error"])


def test_an_output_of_a_tool_needs_its_call(client: Any) -> None:
    first = say(client)
    output = {"type": "function_call_output", "call_id": "nobody", "output": "on"}
    with pytest.raises(openai.BadRequestError) as refused:
        say(client, [output], previous_response_id=first.id)
    assert refused.value.param == "input"


def test_a_conversation_below_the_threshold_is_not_compacted(client: Any) -> None:
    first = say(client)
    limit = [{"type": "compaction", "compact_threshold": 2000}]
    options = {"extra_body": {"context_management": limit}}
    second = say(client, "and then?", previous_response_id=first.id, **options)
    assert "compaction" not in [item.type for item in second.output]
    assert second.usage.input_tokens > first.usage.input_tokens


# More than the model takes.
TOO_LONG = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "word " * 5000},
    {"role": "user", "content": "two"},
]


def test_input_longer_than_the_context_is_compacted(client: Any) -> None:
    made = client.responses.compact(model=MODEL, input=TOO_LONG)
    assert made.usage.output_tokens > 512


@long
def test_input_longer_than_the_context_is_compacted_before_an_answer(client: Any) -> None:
    assert say(client, TOO_LONG, **COMPACT).output[0].type == "compaction"


@pytest.mark.parametrize("store", [True, False])
def test_the_last_item_triggers_a_compaction(client: Any, store: bool) -> None:
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]
    asked = [*talk, {"type": "compaction_trigger"}]
    options: dict[str, Any] = {"store": store, **({} if store else CARRY)}
    made = say(client, asked, **options)
    events = list(say(client, asked, stream=True, **options))
    for response in (made, events[-1].response):
        (item,) = response.output
        assert (response.status, item.type) == ("completed", "compaction")
        left = [item.model_dump(mode="json"), {"role": "user", "content": "two"}]
        carried = say(client, left, **options).usage.input_tokens
        assert carried > count(client, left[1:])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    if store:
        assert client.responses.retrieve(response.id) == response
        after = say(client, "two", previous_response_id=response.id)
        assert after.usage.input_tokens == carried
    with pytest.raises(openai.BadRequestError, match="compaction_trigger"):
        say(client, asked, background=True)


@pytest.mark.parametrize("case", [case for case in BAD if "," not in case])
def test_a_compaction_item_that_is_refused(client: Any, keyring: Path, case: str) -> None:
    given = [
        make_compaction_item(BAD[case](file.load_keyring(keyring))),
        {"role": "user", "content": "hello"},
    ]
    with pytest.raises(openai.BadRequestError, match="compaction item input\\[0\\]") as caught:
        say(client, given)
    assert caught.value.code == f"carrier.{case}"


def test_a_compaction_item_of_another_provider_is_refused(client: Any) -> None:
    for text in ("gAAAAABotherprovider", ""):
        with pytest.raises(openai.BadRequestError) as caught:
            say(client, [make_compaction_item(text), {"role": "user", "content": "hello"}])
        assert caught.value.code == "carrier.foreign"


def test_a_session_of_the_agents_sdk_is_compacted(base: str) -> None:
    async def converse() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=base, api_key="one")
        session = OpenAIResponsesCompactionSession(
            *("s", SQLiteSession("s")),
            client=client,
            model="gpt-demo",
            should_trigger_compaction=lambda seen: len(seen["compaction_candidate_items"]) >= 2,
        )
        agent = Agent(
            name="keeper",
            model=OpenAIResponsesModel("gpt-demo", client),
            model_settings=ModelSettings(**SPEAKS),
        )
        for text in ("one", "two", "three"):
            await Runner.run(
                agent, text, session=session, run_config=RunConfig(tracing_disabled=True)
            )
        await client.close()
        items: list[Any] = await session.get_items()
        return items

    items = asyncio.run(converse())
    kinds = [item.get("type", "message") for item in items]
    assert kinds == ["message", "message", "compaction", "message", "message"]
    assert [item["role"] for item in items if "role" in item] == [
        "user",
        "user",
        "user",
        "assistant",
    ]


def test_a_stranger_can_not_go_on(client: Any, stranger: Any) -> None:
    made = say(client, **CARRY)
    with pytest.raises(openai.BadRequestError) as caught:
        say(stranger, [made.output[-1], {"role": "user", "content": "go on"}])
    assert caught.value.code == "carrier.other-owner"


# The validation of 0.24 takes minutes for such an image, and all memory, with vllmops and without.
@pytest.mark.parametrize("text_pair", [INSTALLED], indirect=True)
def test_a_conversation_that_is_too_large_is_refused_before_it_is_answered(client: Any) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * (33 << 20)}
    with pytest.raises(openai.BadRequestError, match="32 MiB") as caught:
        say(client, [{"role": "user", "content": [image]}], **CARRY)
    assert caught.value.code == "carrier.too-large"


@pytest.mark.parametrize(
    ("options", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send only one of them"),
        ({"background": True}, "background", "previous_response"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages", "a carrier"),
    ],
)
def test_options_that_conflict_with_a_carrier_are_refused(
    client: Any, options: dict[str, Any], param: str, why: str
) -> None:
    made = say(client, **CARRY)
    previous = {"previous_response": made.model_dump(mode="json")}
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        say(client, extra_body={**previous, **options})
    assert caught.value.param == param


def test_a_server_that_nobody_gave_a_key(client: Any, keyring: Path) -> None:
    """It has one all the same: both API servers take what either has sealed."""
    first = say(client, "one", **CARRY)
    kid = file.load_keyring(keyring).require_primary().kid
    assert sealed_in(first).startswith(f"vllm:2:{kid}:")
    for _ in range(8):
        more = {"previous_response": first.model_dump(mode="json")}
        turn = say(client, "two", extra_body=more, **CARRY)
        assert sealed_in(turn).startswith(f"vllm:2:{kid}:")
        assert turn.usage.input_tokens > first.usage.input_tokens


def test_keys_are_rotated_while_clients_converse(cli: Cli, client: Any, keyring: Path) -> None:
    over = threading.Event()
    begun = threading.Barrier(9, timeout=60)

    def converse(number: int) -> tuple[int, set[str]]:
        sent: list[Any] = []
        kids, turns, answer = set[str](), 0, None
        while not over.is_set() or turns < 4:
            asked = {"role": "user", "content": f"{number}: {turns}"}
            if number % 2 or answer is None:
                sent = [*sent[-6:], asked]
                answer = request_carrier_answer(
                    client, sent, streamed=number % 4 > 1, max_output_tokens=2
                )
                sent += answer.output
            else:
                more = {"previous_response": answer.model_dump(mode="json")}
                answer = say(client, "on", max_output_tokens=2, extra_body=more, **CARRY)
            kids.add(sealed_in(answer).split(":")[2])
            turns += 1
            if turns == 1:
                begun.wait()
            if turns > 30:  # the context is no longer than the model's
                sent, answer, turns = [], None, 4
        return turns, kids

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(converse, number) for number in range(8)]
        begun.wait()
        try:
            for _ in range(2):
                ran = cli("keys", "rotate", "--keyring", str(keyring), "--overlap", "1h", "--json")
                assert ran.code == 0, ran.out
                assert len(ran.data["loaded"]) == 2
        finally:
            over.set()
        assert {kid for item in clients for kid in item.result()[1]} >= {ran.data["kid"]}


def test_keys_are_pushed_to_a_server(
    cli: Cli, responses_server: Live, client: Any, keyring: Path, tmp_path: Path
) -> None:
    made = say(client, **CARRY)
    elsewhere = tmp_path / "elsewhere.json"
    words = ("keys", "push", "-t", responses_server.url, "--keyring", str(elsewhere), "--json")
    kid = cli("keys", "add", "--keyring", str(elsewhere), "--json").data["kid"]
    ran = cli(*words, "--admin-token", str(cli.home / "admin.token"))
    assert ran.code == 0, ran.out
    until(lambda: sum(holds(item, kid) for item in reach(responses_server, "api")) == 2)
    for _ in range(4):
        made = say(client, [made.output[-1], {"role": "user", "content": "go on"}], **CARRY)
        assert sealed_in(made).split(":")[2] == kid
    assert file.load_keyring(keyring).require_primary().kid == kid
    # An API key is no admin's, and an admin's token no API key.
    for given, path in (("one", "vllmops/keys"), (TOKEN, "models")):
        headers = {"Authorization": f"Bearer {given}"}
        assert httpx.get(f"{responses_server.url}/v1/{path}", headers=headers).status_code == 401


def holds(process: Any, kid: str) -> bool:
    return any((key.kid, key.status) == (kid, "primary") for key in process.fetch_keys().keys)


def test_a_key_is_revoked(cli: Cli, client: Any, keyring: Path) -> None:
    made = say(client, **CARRY)
    kid = sealed_in(made).split(":")[2]
    ran = cli("keys", "revoke", kid, "--yes", "--keyring", str(keyring), "--json")
    assert ran.code == 0, ran.out
    for _ in range(4):
        with pytest.raises(openai.BadRequestError) as caught:
            say(client, [made.output[-1], {"role": "user", "content": "go on"}])
        assert caught.value.code == "carrier.revoked-key"
    assert sealed_in(say(client, **CARRY)).split(":")[2] != kid


# -- lists ------------------------------------------------------------------------------


def test_lists(client: Any, base: str) -> None:
    key = "two"
    who = connect(base, key)
    mine = [say(who).id for _ in range(5)]

    def page(query: str) -> Any:
        return send_responses_request(base, f"?{query}", key=key).json()

    newest = page("limit=2")
    assert [item["id"] for item in newest["data"]] == mine[:-3:-1]
    assert (newest["object"], newest["has_more"]) == ("list", True)
    assert (newest["first_id"], newest["last_id"]) == (mine[4], mine[3])
    rest = page(f"after={newest['last_id']}&limit=2")
    assert [item["id"] for item in rest["data"]] == [mine[2], mine[1]]
    assert [item["id"] for item in page(f"order=asc&after={mine[2]}")["data"]] == mine[3:]
    assert [item["id"] for item in page(f"before={mine[2]}&limit=2")["data"]] == mine[:2:-1]
    assert page("status=failed&model=demo-text")["data"] == []
    assert page("model=demo-text&status=incomplete&limit=5")["data"][0]["id"] == mine[4]
    assert page("model=another")["data"] == []


def test_input_items(client: Any) -> None:
    given: list[Any] = [{"role": "user", "content": str(n)} for n in range(7)]
    made = say(client, given)
    found = list(client.responses.input_items.list(made.id, limit=3, order="asc"))
    assert [item.content[0].text for item in found] == [str(n) for n in range(7)]
    assert len({item.id for item in found}) == 7
    newest = client.responses.input_items.list(made.id, limit=1)
    assert newest.data[0].content[0].text == "6"
    assert newest.has_more
    (one,) = client.responses.input_items.list(say(client, "words").id)
    assert (one.role, one.content[0].type, one.content[0].text) == ("user", "input_text", "words")


@pytest.mark.parametrize(
    "path",
    [
        "?limit=0",
        "?limit=101",
        "?limit=x",
        "?order=sideways",
        "?after=resp_unknown",
        "?before=%00",
        "?status=odd",
        "/resp_unknown",
        "/%00",
        "/" + "x" * 5000,
        "/resp_unknown/input_items",
        "/resp_unknown?stream=perhaps",
        "/resp_unknown/input_items?include=odd",
    ],
)
def test_bad_questions(base: str, path: str) -> None:
    answer = send_responses_request(base, path)
    assert answer.status_code in {400, 404}
    error = answer.json()["error"]
    assert (error["code"], bool(error["message"])) == (answer.status_code, True)


@pytest.mark.parametrize(
    "body",
    [
        {"previous_response": {"id": "resp_1"}},
        {"previous_response": {"output": []}},
        {"previous_response": "resp_1"},
        {"previous_response": {}, "previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True, "store": False},
        {"background": True, "store": "false"},
        {"previous_response_id": ""},
        {"previous_response_id": "a\0b"},
        {"previous_response_id": "\ud800"},
        {"metadata": {"a": "\ud800"}},
        {"stream": True, "stream_options": {"\ud800": 1}},
        {"prompt_cache_options": {"\ud800": 1}},
        {"context_management": [{"type": "compaction", "\ud800": 1}]},
        {"previous_response_id": 7},
        {"request_id": ""},
        {"request_id": "a/b"},
        {"request_id": "a\0b"},
        {"request_id": "x" * 300},
        {"input": [{"type": "message", "role": "assistant", "content": []}]},
        {"input": [{"type": "item_reference", "id": "msg_1_0"}]},
        {"input": None},
    ],
)
def test_bad_requests(base: str, body: dict[str, Any]) -> None:
    content = json.dumps({"model": MODEL, "input": "x", **body})
    headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    answer = httpx.post(f"{base}/responses", content=content, headers=headers, timeout=60)
    assert answer.status_code in {400, 404, 422}, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content", [b'{"model": "x", "input": NaN}', b'{"\\ud800": 1}', b"[]", b""]
)
def test_a_compaction_of_what_is_no_json(base: str, content: bytes) -> None:
    headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    answer = httpx.post(f"{base}/responses/compact", content=content, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"background": "perhaps"}, "background"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 500, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": []}, "input"),
    ],
)
def test_a_wrong_parameter_is_named(base: str, given: dict[str, Any], param: str) -> None:
    answer = send_responses_request(base, "", "POST", json={"model": MODEL, "input": "x", **given})
    assert answer.status_code == 400
    assert (error := answer.json()["error"])["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("cursor", ["after", "before"])
def test_a_wrong_cursor_is_named(base: str, cursor: str) -> None:
    answer = send_responses_request(base, f"?{cursor}=resp_unknown")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, cursor)


def test_null_is_as_if_it_was_left_out(base: str, client: Any) -> None:
    nulls = dict.fromkeys(("tools", "tool_choice", "service_tier", "store", "metadata"))
    answer = send_responses_request(base, "", "POST", json={"model": MODEL, "input": "x", **nulls})
    assert answer.status_code == 200, answer.text
    assert client.responses.retrieve(answer.json()["id"]).store
    counted = send_responses_request(
        base, "/input_tokens", "POST", json={"model": MODEL, "input": "x", **nulls}
    )
    assert counted.status_code == 200


def test_parameters_of_openais_do_no_harm(client: Any) -> None:
    made = say(client, safety_identifier="me", prompt_cache_key="k", **ENDLESS)
    assert made.status == "incomplete"


# -- what it costs, and what goes wrong --------------------------------------------------


def test_a_server_keeps_nothing_of_what_it_has_stored(responses_server: Live, client: Any) -> None:
    list(start_background_stream(client, max_output_tokens=5)[0])
    say(client)
    held = [item.fetch_memory().store for item in reach(responses_server, "api")]
    assert len(held) == 2
    assert {(item.responses, item.messages, item.events) for item in held if item} == {(0, 0, 0)}


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def lock_database(database: Path) -> Iterator[None]:
    """Another process writes, for ever, and dies of it."""
    words = [sys.executable, "-c", LOCK, str(database)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            writer.kill()


def test_a_store_that_is_down(responses_server: Live, client: Any, base: str) -> None:
    run = background(client, max_output_tokens=100)
    stream, _ = start_background_stream(client, max_output_tokens=600)
    with lock_database(
        responses_server.home / "instances" / responses_server.name / "responses.db"
    ):
        for options in ({}, {"background": True}, {"background": True, "stream": True}):
            with pytest.raises(openai.InternalServerError) as caught:
                say(client, extra_body={"request_id": "resp_lost"}, **options)
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["Retry-After"]) >= 1
        told = send_responses_request(
            base, "", "POST", json={"model": MODEL, "input": "x", "stream": True}
        )
        if told.status_code != 503:  # which it remembers for a second
            assert "response.failed" in told.text
            assert "not stored" in told.text
        assert say(client, store=False, **ENDLESS).status == "incomplete"
        time.sleep(1)
    events = list(stream)
    assert events[-1].type == "response.incomplete"
    assert events[-1].sequence_number == len(events)
    # For a second nobody asks a store again that did not answer.
    assert wait_until_response_ends(connect(base, retries=3), run.id).status == "incomplete"
    until(
        lambda: (
            send_responses_request(
                base, "", "POST", json={"model": MODEL, "input": "x"}
            ).status_code
            == 200
        )
    )


# -- vllmops responses -------------------------------------------------------------------


def test_the_command_sees_and_ends_what_runs(
    responses_server: Live, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "one")
    store = (
        "--store",
        f"sqlite:///{responses_server.home}/instances/{responses_server.name}/responses.db",
    )
    here = ("-t", responses_server.name)

    def command(*words: str) -> Any:
        ran = responses_server.cli("responses", *words, "--json")
        assert ran.code == 0, ran
        return ran.data

    (engine,) = reach(responses_server, "engine")
    process = psutil.Process(responses_server.pids()["engine"])
    made = say(client, "a question", **ENDLESS)  # or it could say nothing
    for way, named in ((here, False), (store, True), (here, True)):
        run = background(client)
        # Or it could be over before a command on a busy machine has begun.
        process.suspend()
        try:
            newest = command("list", "-n", "2", *way)["responses"]
            assert [item["id"] for item in newest] == [run.id, made.id]
            assert newest[0]["status"] in {"queued", "in_progress"}
            command("cancel", run.id if named else "--all-running", *way)
        finally:
            process.resume()
        # Less than the run itself takes; how soon it is, the stores' conformance says.
        until(lambda: engine.fetch_engine_state().running == 0, 10)
        assert client.responses.retrieve(run.id).status == "cancelled"
        command("delete", run.id, *way)
    shown = command("show", made.id, "--input", *here)
    assert shown["response"]["output"][0]["type"] == "message"
    assert shown["input"][0]["content"][0]["text"] == "a question"
    assert command("stats", *here)["count"] <= command("stats", *store)["count"]
    monkeypatch.delenv("VLLM_API_KEY")
    ran = responses_server.cli("responses", "list", "--json", *here)
    assert (ran.code, ran.error["code"]) == (4, "responses.not-authorised")
    assert store[1] in ran.error["hint"]


def test_responses_move_to_another_store(
    responses_server: Live, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "two")
    who = connect(f"{responses_server.url}/v1", "two")
    first = say(who, "a question")
    for _ in range(3):  # an answer of the model may end with its first words
        stream, _ = start_background_stream(who, max_output_tokens=20)
        list(stream)
    file, other = str(tmp_path / "responses.jsonl"), f"sqlite:///{tmp_path}/other.db"
    cli, here = responses_server.cli, ("-t", responses_server.name, "--json")
    count = cli("responses", "export", "-o", file, *here).data["count"]
    assert cli("responses", "import", file, "--store", other, "--json").data["count"] == count >= 2
    # Its server's store has them, and keeps them.
    assert cli("responses", "import", file, *here).data["skipped"] == count
    who.responses.delete(first.id)
    by_url = ("-t", responses_server.url, "--json")
    assert cli("responses", "import", file, *by_url).data["count"] == 1
    assert who.responses.retrieve(first.id).output == first.output
    assert say(who, "and then?", previous_response_id=first.id).previous_response_id == first.id
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    # On a busy machine each event is a part of its own.
    assert any(sum(len(part["events"]) for part in line["events"]) > 10 for line in lines)


@pytest.mark.ends
def test_every_process_is_killed(responses_server: Live, base: str) -> None:
    """Of a server under load; what was acknowledged is in its file."""
    pids = [
        responses_server.supervisor(),
        *(process["pid"] for process in responses_server.row["processes"]),
    ]
    with Load(base) as load:
        load.wait()
        for pid in pids:
            kill(pid)
    store = (
        f"sqlite:///{responses_server.home / 'instances' / responses_server.name / 'responses.db'}"
    )
    listed = responses_server.cli("responses", "list", "--store", store, "--all", "--json").data[
        "responses"
    ]
    assert load.stored_ids <= {item["id"] for item in listed}
    assert not [item for item in load.told if item.status not in {0, 200}]
