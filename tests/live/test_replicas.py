"""Two servers on one store, by OpenAI's client and by its Agents SDK; and what kill -9 leaves.

All connections of a client go to the replica that it was made for: what one has made is looked at
from the other.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import websockets.sync.client
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    function_tool,
)
from pydantic import BaseModel

from vllmops_responses.store.backend import GONE

from ..support.databases import Server, Servers, folder_for_servers, postgres_parts
from ..support.extent import combinations, long
from ..support.waiting import until
from .clients import (
    CARRY,
    ENDLESS,
    LENGTH,
    MODEL,
    QUESTIONS,
    SPEAKS,
    STOPPED_S,
    WAYS,
    Load,
    Told,
    background,
    base,
    connect,
    count,
    fetch_stored_responses,
    list_responses,
    reach,
    run_carrier_conversation,
    say,
    sealed_in,
    send_responses_request,
    start_background_stream,
    talkative,
    wait_until_response_ends,
)
from .conftest import Cli, Live, kill, make_keyring_options, side_by_side
from .foreground import Foreground

# How long a call to a store that is down may take: the store's own deadline, and a busy machine.
BOUND_S = 10
# After that nobody renews a run any more, or its store has just been restarted.
LEASE_S = 30
# Longer than a test looks at it.
LONG = {"max_output_tokens": 3900}
# How a response has ended that came to nothing bad.
WELL = {"completed", "incomplete"}


def patient(base: str) -> Any:
    """A client that tries again, as it does by default: on a busy machine a store may be slow."""
    return connect(base, retries=3)


@pytest.fixture(scope="module")
def databases() -> Iterator[Servers]:
    folder = folder_for_servers()
    made = Servers(postgres_parts(folder))
    yield made
    made.end()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def postgres(databases: Servers) -> Server:
    return databases.add("postgresql")


@pytest.fixture(scope="module")
def valkey(databases: Servers) -> Server:
    return databases.add("redis")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return talkative(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keyring.json"


@pytest.fixture(scope="module")
def keys(cli: Cli, keyring: Path) -> tuple[str, ...]:
    """Options for each server: all have one ring."""
    return make_keyring_options(cli, keyring)


@pytest.fixture(scope="module")
def pair(
    cli: Cli, postgres: Server, shape: tuple[str, ...], keys: tuple[str, ...]
) -> Iterator[tuple[Live, Foreground]]:
    """West is detached, east in the foreground."""

    def start(serve: Callable[..., Any]) -> Any:
        # With vLLM's own grammar for a choice of tools a random model would only call tools.
        free = "VLLM_ENFORCE_STRICT_TOOL_CALLING=0"
        # Threads of two replicas that wait for each other by spinning leave two cores to nobody.
        one_thread = ("VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1")
        environment = [word for item in (free, *one_thread) for word in ("--env", item)]
        words = (*environment, "--demo", "text", "--", *LENGTH, *shape)
        return serve("--store", postgres.url, *keys, *words)

    both: list[Callable[..., Any]] = [
        partial(cli.serve, "west"),
        partial(Foreground, cli, "east"),
    ]
    try:
        west, east = side_by_side(start, both)
        yield west, east
    finally:
        for name in ("west", "east"):
            cli("stop", name, "--force")


@pytest.fixture(scope="module")
def west(pair: tuple[Live, Foreground]) -> Live:
    return pair[0]


@pytest.fixture(scope="module")
def west_client(west: Live) -> Any:
    return patient(base(west))


@pytest.fixture(scope="module")
def east(pair: tuple[Live, Foreground]) -> str:
    return base(pair[1].live)


@pytest.fixture(scope="module")
def east_client(east: str) -> Any:
    return patient(east)


@pytest.fixture(scope="module")
def south(
    cli: Cli, valkey: Server, shape: tuple[str, ...], keys: tuple[str, ...]
) -> Iterator[Live]:
    words = (*keys, "--carrier", "signed-v1", "--demo", "text", "--", *LENGTH, *shape)
    try:
        yield cli.serve("south", "--store", valkey.url, *words)
    finally:
        cli("stop", "south", "--force")


def test_a_replica_serves_responses_of_the_other_replica(
    west_client: Any, east_client: Any, east: str
) -> None:
    made = say(west_client, "one")
    assert east_client.responses.retrieve(made.id) == made
    (item,) = east_client.responses.input_items.list(made.id)
    assert item.content[0].text == "one"
    assert send_responses_request(east, "?limit=1").json()["first_id"] == made.id
    second = say(east_client, "two", previous_response_id=made.id)
    third = say(west_client, "three", previous_response_id=second.id)
    words: list[Any] = [{"role": "user", "content": "one"}, *made.output]
    words += [{"role": "user", "content": "two"}, *second.output]
    whole = say(west_client, [*words, {"role": "user", "content": "three"}], store=False)
    assert third.usage.input_tokens == whole.usage.input_tokens
    east_client.responses.delete(made.id)
    for client in (west_client, east_client):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            say(client, previous_response_id=third.id)


def test_the_turns_of_a_kept_conversation_are_made_by_either_replica(
    west_client: Any, east_client: Any
) -> None:
    first = [{"role": "user", "content": "begin"}]
    conversation = west_client.conversations.create(items=first)
    said: list[Any] = [*first]
    for turn, client in zip(range(4), itertools.cycle([east_client, west_client]), strict=False):
        answer = say(client, f"turn {turn}", conversation=conversation.id, **SPEAKS)
        said += [{"role": "user", "content": f"turn {turn}"}, *answer.output]
        whole = say(
            west_client if client is east_client else east_client,
            said[: -len(answer.output)],
            store=False,
        )
        assert answer.usage.input_tokens == whole.usage.input_tokens
    kept = [turns(client, conversation.id) for client in (west_client, east_client)]
    assert kept[0] == kept[1]
    texts = [item.content[0].text for item in kept[0] if item.role == "user"]
    assert texts == ["begin", *(f"turn {turn}" for turn in range(4))]
    assert [item.id for item in kept[0] if item.role == "assistant"] == [
        item.id for item in said if not isinstance(item, dict)
    ]


def turns(client: Any, conversation: str) -> list[Any]:
    return list(client.conversations.items.list(conversation, order="asc", limit=100))


def test_a_run_is_stopped_from_the_other_replica(
    west: Live, west_client: Any, east_client: Any
) -> None:
    (engine,) = reach(west, "engine")
    run, deleted = background(west_client, **LONG), background(west_client, **LONG)
    stream, streamed = start_background_stream(west_client, **LONG)
    until(lambda: engine.fetch_engine_state().running == 3)
    for item in (run.id, streamed):
        assert east_client.responses.cancel(item).status == "cancelled"
    east_client.responses.delete(deleted.id)
    until(lambda: engine.fetch_engine_state().running == 0, STOPPED_S)
    assert list(stream)[-1].type == "response.cancelled"
    for client in (west_client, east_client):
        for item in (run.id, streamed):
            assert client.responses.retrieve(item).status == "cancelled"
            assert client.responses.cancel(item).status == "cancelled"
        assert list(client.responses.retrieve(streamed, stream=True))[-1].type == (
            "response.cancelled"
        )
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(deleted.id)


def test_a_stream_is_resumed_on_the_other_replica(west_client: Any, east_client: Any) -> None:
    stream, response_id = start_background_stream(west_client, max_output_tokens=300)
    stream.close()
    begun = east_client.responses.retrieve(response_id, stream=True)
    first = next(iter(begun))
    assert east_client.responses.retrieve(response_id).status == "in_progress"
    events = [first, *begun]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    assert list(west_client.responses.retrieve(response_id, stream=True)) == events
    for after in (0, 9, len(events) - 2):
        rest = east_client.responses.retrieve(response_id, stream=True, starting_after=after)
        assert list(rest) == events[after + 1 :]


def test_a_websocket_goes_on_on_the_other_replica(west_client: Any, east_client: Any) -> None:
    event = {"type": "response.create", "model": MODEL, "input": "hello", "background": True}
    with socket(west_client) as first:
        first.send(json.dumps({**event, **ENDLESS["extra_body"], "max_output_tokens": 300}))
        heard = [json.loads(first.recv(60)) for _ in range(4)]
    response_id, after = heard[0]["response"]["id"], heard[-1]["sequence_number"]
    event = {"type": "response.resume", "response_id": response_id, "starting_after": after}
    with socket(east_client) as second:
        second.send(json.dumps(event))
        while "response" not in heard[-1] or heard[-1]["response"]["status"] == "in_progress":
            heard.append(json.loads(second.recv(60)))
    assert [one["sequence_number"] for one in heard] == list(range(len(heard)))
    kept = httpx.get(f"{west_client.base_url}responses/{response_id}", headers=header(west_client))
    assert heard[-1]["response"] == kept.json()


def socket(client: Any) -> Any:
    """A WebSocket of the replica that a client was made for."""
    url = f"{client.base_url}responses".replace("http", "ws", 1)
    return websockets.sync.client.connect(url, additional_headers=header(client))


def header(client: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {client.api_key}"}


@pytest.mark.parametrize("route", ["cancel", "delete"])
def test_a_follower_on_the_other_replica_sees_the_stream_end(
    west_client: Any, east_client: Any, route: str
) -> None:
    stream, response_id = start_background_stream(west_client, **LONG)
    followed = east_client.responses.retrieve(response_id, stream=True, starting_after=0)
    assert next(iter(followed)).sequence_number == 1
    getattr(west_client.responses, route)(response_id)
    for item in (followed, stream):
        if route == "cancel":
            assert list(item)[-1].type == "response.cancelled"
        else:
            with pytest.raises(openai.APIError, match="was deleted"):
                list(item)


# -- agents -----------------------------------------------------------------------------


class Report(BaseModel):
    """What an agent is to say: a random model comes to no end but where a schema has one."""

    done: bool


def no_blanks(server: Live) -> dict[str, int]:
    """What keeps a random model from filling JSON with blanks for ever."""
    question = {"model": MODEL, "prompt": " \n\r\t", "add_special_tokens": False}
    tokens = httpx.post(f"{server.url}/tokenize", json=question, timeout=60).json()["tokens"]
    return {str(item): -100 for item in tokens}


class Balanced(openai.AsyncOpenAI):
    """Sends each request to another replica than the one before."""

    def __init__(self, bases: list[str]) -> None:
        super().__init__(base_url=bases[0], api_key="none", max_retries=3)
        self.ports = itertools.cycle(urlsplit(item).port for item in bases)
        self.asked: list[int] = []

    async def _prepare_request(self, request: Any) -> None:
        request.url = request.url.copy_with(port=next(self.ports))
        self.asked.append(request.url.port)


def as_given(item: Any) -> Any:
    """An item as a client has sent it."""
    return item.model_dump(exclude={"id"}, exclude_none=True)


def test_an_agent_with_a_tool_over_several_turns(west: Live, east: str, west_client: Any) -> None:
    switched: list[bool] = []

    @function_tool  # type: ignore[untyped-decorator]
    def lamp(on: bool) -> str:
        """Switch the lamp."""
        switched.append(on)
        return "it is done"

    async def converse() -> tuple[list[RunResult], list[int]]:
        client = Balanced([base(west), east])
        # Once the tool was called, the SDK leaves the choice to the model again.
        settings = ModelSettings(
            tool_choice="lamp",
            max_tokens=300,
            store=True,
            extra_body={"logit_bias": no_blanks(west)},
        )
        agent = Agent(
            name="keeper",
            instructions="you keep a lamp",
            tools=[lamp],
            output_type=Report,
            model=OpenAIResponsesModel(MODEL, client),
            model_settings=settings,
        )
        quiet, results, last = RunConfig(tracing_disabled=True), list[RunResult](), None
        for text in ("switch it on", "and off again", "thanks"):
            results.append(
                await Runner.run(
                    agent,
                    text,
                    previous_response_id=last,
                    auto_previous_response_id=True,
                    run_config=quiet,
                )
            )
            last = results[-1].last_response_id
        await client.close()
        return results, client.asked

    results, asked = asyncio.run(converse())
    assert len(switched) == 3
    assert asked == asked[:2] * 3
    assert len(set(asked)) == 2
    ids = [str(entry.response_id) for result in results for entry in result.raw_responses]
    made = [west_client.responses.retrieve(entry) for entry in ids]
    assert [entry.previous_response_id for entry in made] == [None, *ids[:-1]]
    brought = [
        [item.type for item in west_client.responses.input_items.list(entry)] for entry in ids
    ]
    assert brought == [["message"], ["function_call_output"]] * 3
    # The last turn was told what all before it had said, and no more.
    items: list[Any] = []
    for turn, response in enumerate(made[:-1]):
        given = west_client.responses.input_items.list(ids[turn], order="asc")
        items += [as_given(entry) for entry in given]
        items += response.output
    items += map(as_given, west_client.responses.input_items.list(ids[-1]))
    whole = say(
        west_client, items, store=False, instructions="you keep a lamp", tools=made[-1].tools
    )
    assert made[-1].usage.input_tokens == whole.usage.input_tokens
    for result, response in zip(results, made[1::2], strict=True):
        assert result.final_output == Report.model_validate_json(response.output_text)


# -- the store goes, and comes back ------------------------------------------------------


def endure(database: Server, *bases: str) -> None:
    """Kill a store under load, start it again, and see what clients were told meanwhile."""
    with Load(*bases) as load:
        load.wait()
        database.kill()
        down = time.monotonic()

        def answers() -> list[Told]:
            return [item for item in list(load.told) if item.began > down]

        until(lambda: {(item.base, item.kind) for item in answers()} == set(load.each))
        time.sleep(2)
        meanwhile = answers()
        database.start()
        load.wait()
    for item in meanwhile:
        assert not item.stored
        # A stream that begins before its server knows ends with an error.
        wanted = {"unstored": {200}, "stream": {200, 503}}.get(item.kind, {503})
        assert item.status in wanted
        assert item.over - item.began < BOUND_S
        if item.status == 503:
            assert int(item.retry_after) >= 1
    assert {item.status for item in load.told if item.kind == "unstored"} == {200}
    assert {item.status for item in load.told} == {200, 503}

    def is_every_response_finished() -> Any:
        kept = fetch_stored_responses(bases[-1], load.stored_ids)
        return {item["status"] for item in kept.values()} <= WELL and kept

    until(is_every_response_finished)
    for place in bases:
        fetch_stored_responses(place, load.stored_ids)


def test_the_store_is_restarted_under_load(
    west: Live, east: str, west_client: Any, east_client: Any, postgres: Server
) -> None:
    stream, response_id = start_background_stream(west_client, max_output_tokens=900)
    followed = east_client.responses.retrieve(response_id, stream=True)
    next(iter(followed))
    endure(postgres, base(west), east)
    for item in (stream, followed):
        events = list(item)
        assert events[-1].type == "response.incomplete"
        assert (
            events[-1].response.output_text
            == west_client.responses.retrieve(response_id).output_text
        )


def test_a_replica_and_its_store_are_killed(
    west: Live, east: str, west_client: Any, east_client: Any, postgres: Server, request: Any
) -> None:
    """Every process of both, under load. It is that replica's last test."""
    pids = [west.supervisor(), *(process["pid"] for process in west.row["processes"])]
    last: list[Any] = []

    def follow(stream: Any) -> None:
        last.extend(list(stream)[-1:])

    conversation = east_client.conversations.create(items=[{"role": "user", "content": "begin"}])
    say(west_client, "before", conversation=conversation.id)
    before = turns(east_client, conversation.id)
    with Load(base(west)) as load:
        load.wait()
        run = background(west_client, conversation=conversation.id, **LONG)
        _, streamed = start_background_stream(west_client, **LONG)
        followed = east_client.responses.retrieve(streamed, stream=True)
        next(iter(followed))
        follower = threading.Thread(target=follow, args=[followed])
        follower.start()
        for pid in pids:
            kill(pid)
        postgres.kill()
    postgres.start()
    lost = [run.id, streamed]
    kept = fetch_stored_responses(east, {*load.stored_ids, *lost})
    assert [kept[item]["status"] for item in lost] == ["in_progress"] * 2
    # What the next tests want takes about as long to start as the lease lasts.
    request.getfixturevalue("south")
    for item in lost:
        failed = wait_until_response_ends(east_client, item, LEASE_S + 15)
        assert (failed.status, failed.error.message) == ("failed", GONE)
    follower.join(15)
    assert last[0].type == "response.failed", last
    assert last[0].response.error.message == GONE
    for found in fetch_stored_responses(east, load.stored_ids).values():
        assert found["status"] in WELL or found["error"]["message"] == GONE
    assert turns(east_client, conversation.id) == before
    say(east_client, "after", conversation=conversation.id)
    assert turns(east_client, conversation.id)[: len(before)] == before


# -- two servers that share no store, only a ring; one writes format 1, the other format 2 ----


def decode_signed_carrier(text: str, key: dict[str, Any]) -> list[dict[str, Any]]:
    """What a carrier of format 1 holds, by what #35903 says of it."""
    payload, signature = text.removeprefix("vllm:1:").split(":")
    made = hmac.new(bytes.fromhex(key["secret"]), payload.encode(), "sha256")
    assert made.hexdigest() == signature
    history: list[dict[str, Any]] = json.loads(base64.b64decode(payload, validate=True))
    return history


@pytest.mark.parametrize(
    ("first", "way", "streamed"), combinations(("v2", "signed-v1"), WAYS, (False, True))
)
def test_a_carried_conversation_alternates_between_two_servers(
    east_client: Any, south: Live, keyring: Path, first: str, way: str, streamed: bool
) -> None:
    (key,) = json.loads(keyring.read_text())["keys"]
    other = patient(base(south))
    answers = run_carrier_conversation(
        (east_client, other) if first == "v2" else (other, east_client), way, streamed=streamed
    )
    for turn, answer in enumerate(answers):
        if (turn % 2 == 0) == (first == "v2"):
            assert sealed_in(answer).startswith(f"vllm:2:{key['kid']}:")
        else:
            history = decode_signed_carrier(sealed_in(answer), key)
            asked = [item["content"] for item in history if item["role"] == "user"]
            assert asked == list(QUESTIONS[: turn + 1])


def test_tools_and_reasoning_come_through_both_formats(east_client: Any, south: Live) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "lamp", "arguments": "{}"}
    thought: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": "the lamp is what is meant"}]
    asked = {"role": "user", "content": "on"}
    done = {"type": "function_call_output", "call_id": "call_1", "output": "it is on"}
    begun: list[Any] = [
        asked,
        thought,
        call,
        done,
        {"role": "assistant", "content": "I see"},
        asked,
    ]
    other = patient(base(south))
    for both in ((east_client, other), (other, east_client)):
        sent = begun
        answer = say(both[0], sent, **CARRY)
        for client in (both[1], both[0]):
            sent = [*sent, *answer.output, asked]
            answer = say(client, [answer.output[-1], asked], **CARRY)
            assert answer.usage.input_tokens == count(client, sent)


def test_killing_a_foreground_serve_ends_its_server(pair: tuple[Live, Foreground]) -> None:
    """It is that replica's last test."""
    pair[1].end_by(signal.SIGKILL)


# -- Valkey -------------------------------------------------------------------------------


def test_a_replica_on_valkey(south: Live) -> None:
    client = patient(base(south))
    made = say(client)
    assert client.responses.retrieve(made.id) == made
    assert say(client, previous_response_id=made.id).previous_response_id == made.id
    (engine,) = reach(south, "engine")
    run, (stream, streamed) = background(client), start_background_stream(client)
    until(lambda: engine.fetch_engine_state().running == 2)
    for item in (run.id, streamed):
        assert client.responses.cancel(item).status == "cancelled"
    until(lambda: engine.fetch_engine_state().running == 0, STOPPED_S)
    assert list(stream)[-1].type == "response.cancelled"
    stream, response_id = start_background_stream(client, max_output_tokens=100)
    stream.close()
    events = list(client.responses.retrieve(response_id, stream=True))
    assert events[-1].type == "response.incomplete"
    rest = client.responses.retrieve(response_id, stream=True, starting_after=20)
    assert list(rest) == events[21:]
    client.responses.delete(made.id)
    ids = list(list_responses(base(south)))
    assert ids[0] == response_id
    assert made.id not in ids
    conversation = client.conversations.create(metadata={"user": "ann"})
    for text in ("one", "two"):
        say(client, text, conversation=conversation.id)
    items = turns(client, conversation.id)
    assert [item.content[0].text for item in items if item.role == "user"] == ["one", "two"]


@long
def test_valkey_is_restarted_under_load(south: Live, valkey: Server) -> None:
    endure(valkey, base(south))


@long
def test_a_replica_and_valkey_are_killed(south: Live, valkey: Server) -> None:
    """Every process of both, under load. It is the last test of both."""
    pids = [south.supervisor(), *(process["pid"] for process in south.row["processes"])]
    with Load(base(south)) as load:
        load.wait()
        for pid in pids:
            kill(pid)
        valkey.kill()
    valkey.start()
    words = ("responses", "list", "--store", valkey.url, "--all", "--json")
    assert load.stored_ids <= {item["id"] for item in south.cli(*words).data["responses"]}
