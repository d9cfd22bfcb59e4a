"""Servers with the Python code of other versions of vLLM, over the installed compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from vllmops.agent.versions import features

from ..support.extent import EVERYTHING
from ..support.versions import RENAMED, RUN, rewritten
from .clients import (
    CARRY,
    LENGTH,
    WAYS,
    background,
    base,
    connect,
    run_carrier_conversation,
    say,
    send_responses_request,
    start_background_stream,
    wait_until_response_ends,
)
from .conftest import Cli, Live, code_of


@pytest.fixture(scope="module", params=RUN if EVERYTHING else RUN[:1])
def version(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def old_server(cli: Cli, code: Callable[[str], Path], version: str) -> Iterator[Live]:
    try:
        yield cli.serve("old", *code_of(cli, code(version)), "--demo", "text", "--", *LENGTH)
    finally:
        cli("stop", "old", "--force")


@pytest.fixture(scope="module")
def client(old_server: Live) -> Any:
    return connect(base(old_server))


def test_patches_and_cache_commands_fit_an_older_version(old_server: Live, version: str) -> None:
    found = old_server.cli("patches", "list", "-t", old_server.name, "--json").data
    assert (found["vllm_versions"], found["problems"]) == ([version], [])
    tested = features.load_tested_versions()[version]
    assert {
        row["id"]: {process["state"] for process in row["processes"]} for row in found["patches"]
    } == {name: {state} for name, state in tested.results.items() if name not in features.FEATURES}
    compared = old_server.cli("cache", "compare", "-t", old_server.name, "--json")
    assert (compared.code, compared.data["problems"]) == (0, [])
    inspected = old_server.cli("cache", "inspect", "-t", old_server.name, "--json")
    assert (inspected.code, inspected.data["problems"]) == (0, [])


def test_stored_responses(client: Any, old_server: Live) -> None:
    first = say(client)
    second = say(client, "and then?", previous_response_id=first.id)
    assert client.responses.retrieve(second.id) == second
    assert second.usage.input_tokens > first.usage.input_tokens
    assert len(client.responses.input_items.list(first.id).data) == 1
    listed = [
        response["id"] for response in send_responses_request(base(old_server), "").json()["data"]
    ]
    assert listed[:2] == [second.id, first.id]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        say(client, previous_response_id=second.id)


def test_background(client: Any) -> None:
    run = background(client)
    assert client.responses.cancel(run.id).status == "cancelled"
    assert client.responses.retrieve(run.id).status == "cancelled"
    assert wait_until_response_ends(client, say(client, background=True).id).status in {
        "completed",
        "incomplete",
    }
    stream, response_id = start_background_stream(client, max_output_tokens=20)
    stream.close()
    events = list(client.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("way", WAYS)
def test_carriers(client: Any, way: str) -> None:
    *_, answer = run_carrier_conversation([client], way, streamed=False)
    assert answer.output[-1].encrypted_content
    assert CARRY["store"] is False


if EVERYTHING:

    def test_a_version_that_fits_nothing_serves_as_it_is(cli: Cli, tmp_path: Path) -> None:
        code = rewritten(tmp_path, RENAMED, {}, shims=False)
        server = cli.serve("later", *code_of(cli, code), "--demo", "text", "--", *LENGTH)
        try:
            # Before vLLM has set up its log, a line has no level.
            ours = [line for line in log(server) if "vllmops: " in line and "INFO" not in line]
            assert len(ours) == 1
            assert "vLLM 0.34.0 is newer than" in ours[0]
            found = cli("patches", "list", "-t", server.name, "--json").data
            assert "no OpenAIServingResponses" in found["problems"][0]
            client = connect(base(server))
            # vLLM's own store.
            first = say(client)
            assert client.responses.retrieve(first.id).id == first.id
            assert (
                wait_until_response_ends(client, say(client, background=True).id).status != "failed"
            )
        finally:
            cli("stop", server.name, "--force")


def log(server: Live) -> list[str]:
    return (server.home / "instances" / server.name / "server.log").read_text().splitlines()
