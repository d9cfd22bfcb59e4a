"""Stored responses of gpt-oss, which vLLM renders and parses by other code than chat models."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.sync.client import connect as websocket

from ..support.extent import combinations, long
from .clients import (
    LENGTH,
    WAYS,
    background,
    base,
    connect,
    count_input_tokens,
    run_carrier_conversation,
    say,
    sealed_in,
    start_background_stream,
    wait_until_response_ends,
)
from .conftest import Cli, make_keyring_options
from .foreground import Foreground
from .test_websocket import create_response

pytestmark = long

FUNCTION = {"type": "function", "name": "lamp", "parameters": {"type": "object"}, "strict": True}
BUILDER = Path(__file__).with_name("harmony.py")


@pytest.fixture(scope="module")
def harmony(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreground]:
    place = tmp_path_factory.mktemp("gpt-oss")
    subprocess.run([sys.executable, str(BUILDER), str(place)], check=True, cwd=place)
    environment = {
        "TIKTOKEN_ENCODINGS_BASE": str(place),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words = [word for item in environment.items() for word in ("--env", "=".join(item))]
    keys = make_keyring_options(cli, place / "keyring.json")
    shape = (
        "--served-model-name",
        "demo-text",
        "--enforce-eager",
        *LENGTH,
        "--kv-cache-memory-bytes",
        "134217728",
    )
    try:
        yield Foreground(
            cli, "harmony", *words, *keys, str(place), "--", *shape, "--dtype", "float32"
        )
    finally:
        cli("stop", "harmony", "--force")


@pytest.fixture(scope="module")
def client(harmony: Foreground) -> Any:
    return connect(base(harmony.live), retries=3)


def test_a_conversation_stays_whole(client: Any) -> None:
    first = say(client, "one", max_output_tokens=20)
    assert client.responses.retrieve(first.id) == first
    assert "Hello there" in first.output_text
    second = say(client, "two", previous_response_id=first.id, max_output_tokens=20)
    third = say(client, "three", previous_response_id=second.id, max_output_tokens=20)
    words: list[Any] = [{"role": "user", "content": "one"}, *first.output]
    words += [{"role": "user", "content": "two"}, *second.output]
    sent = [*words, {"role": "user", "content": "three"}]
    whole = say(client, sent, store=False, max_output_tokens=20)
    assert third.usage.input_tokens == whole.usage.input_tokens
    (item,) = client.responses.input_items.list(third.id)
    assert item.content[0].text == "three"


def test_a_background_stream(client: Any) -> None:
    stream, response_id = start_background_stream(client, max_output_tokens=60)
    stream.close()
    events = list(client.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text
    assert events[-1].response.output_text == text
    rest = client.responses.retrieve(response_id, stream=True, starting_after=7)
    assert list(rest) == events[8:]


def test_runs_are_cancelled_and_deleted(client: Any) -> None:
    stream, cancelled = start_background_stream(client)
    run = background(client)
    for item in (cancelled, run.id):
        assert client.responses.cancel(item).status == "cancelled"
    assert list(stream)[-1].type == "response.cancelled"
    deleted = background(client)
    client.responses.delete(deleted.id)
    short = background(client, max_output_tokens=20)
    assert wait_until_response_ends(client, short.id).output_text
    kept = [item.status for item in map(client.responses.retrieve, (cancelled, run.id, short.id))]
    assert kept == ["cancelled", "cancelled", "incomplete"]


@pytest.mark.parametrize(("way", "streamed"), combinations(WAYS, (False, True)))
def test_a_client_carries_its_conversation(client: Any, way: str, streamed: bool) -> None:
    for answer in run_carrier_conversation([client], way, streamed=streamed, max_output_tokens=20):
        assert "Hello there" in answer.output_text
        assert sealed_in(answer).startswith("vllm:2:")


def test_a_conversation_is_compacted(client: Any) -> None:
    first = say(client, "one", max_output_tokens=20)
    said = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
    made = client.responses.compact(model="demo-text", input=said)
    assert [item.type for item in made.output] == ["message", "message", "compaction"]
    turn = say(client, [*made.output, {"role": "user", "content": "three"}], max_output_tokens=20)
    chained = say(client, "four", previous_response_id=turn.id, max_output_tokens=20)
    words = [*made.output, {"role": "user", "content": "three"}, *turn.output]
    whole = [*words, {"role": "user", "content": "four"}]
    assert chained.usage.input_tokens == count_input_tokens(client, whole)
    limit = [{"type": "compaction", "compact_threshold": 5}]
    grown = say(client, said, max_output_tokens=20, extra_body={"context_management": limit})
    assert grown.output[0].type == "compaction"


def test_a_conversation_of_the_api(client: Any) -> None:
    made = client.conversations.create(items=[{"role": "user", "content": "zero"}])
    first = say(client, "one", conversation=made.id, max_output_tokens=20)
    asked = {"input": "two", "conversation": made.id}
    counted_ = client.responses.input_tokens.count(model="demo-text", **asked).input_tokens
    second = say(client, "two", conversation=made.id, max_output_tokens=20, stream=True)
    *_, last = second
    assert last.response.usage.input_tokens == counted_
    items = list(client.conversations.items.list(made.id, order="asc"))
    spoken = [item.content[0].text for item in items if item.type == "message"]
    assert spoken == ["zero", "one", first.output_text, "two", last.response.output_text]
    words: list[Any] = [{"role": "user", "content": "zero"}, {"role": "user", "content": "one"}]
    words += [*first.output, {"role": "user", "content": "two"}]
    assert last.response.usage.input_tokens == count_input_tokens(client, words)


def test_tools_that_vllm_does_not_give_it(client: Any) -> None:
    made = say(client, tools=[{"type": "web_search"}, FUNCTION], max_output_tokens=8)
    assert [tool.type for tool in made.tools] == ["web_search", "function"]
    assert made.usage.input_tokens == say(client, tools=[FUNCTION]).usage.input_tokens
    for tool in (
        {"type": "custom", "name": "lamp"},
        {"type": "namespace", "name": "house", "description": "a house", "tools": [FUNCTION]},
    ):
        with pytest.raises(openai.BadRequestError, match="send functions") as refused:
            say(client, tools=[tool])
        assert refused.value.param == "tools[0]"


def test_a_socket(harmony: Foreground) -> None:
    url = f"{base(harmony.live)}/responses".replace("http", "ws", 1)
    with websocket(url) as opened:
        first = create_response(opened, max_output_tokens=20)
        second = create_response(opened, max_output_tokens=20, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_closed_terminal_ends_the_server(harmony: Foreground) -> None:
    """It is the server's last test."""
    # What the kernel sends when the terminal closes; its reader keeps ours open.
    harmony.end_by(signal.SIGHUP)
