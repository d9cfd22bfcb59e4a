"""The serving class on a scripted engine, without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from vllmops.model.environment import RUN

COMPACTED = """
import asyncio, json, sys
from types import SimpleNamespace
from tests.responses.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops_responses.server import vllm_interface as adapter
from vllmops_responses.server.carriers import compaction
from vllmops_responses.server.serving import StoreBackedServing
from vllmops_responses.server.conversations.turn import Turn, set_current_turn

class Engine:
    async def responses_full_generator(self, request):
        answer = adapter.ResponsesResponse()
        answer.output = [SimpleNamespace(type="message", id="msg_1")]
        answer.id, answer.usage = "resp_1", None
        return answer

    async def responses_stream_generator(self, request):
        yield SimpleNamespace(type="response.created", sequence_number=0)
        answer = await self.responses_full_generator(request)
        yield SimpleNamespace(type="response.completed", sequence_number=1, response=answer)

class Served(StoreBackedServing, Engine):
    def __init__(self):
        pass

async def main():
    found = []
    for stream in (False, True):
        request = SimpleNamespace(stream=stream, store=False)
        turn = Turn(request, "", b"[]")
        turn.compaction = compaction.make_compaction_item("sealed")
        with set_current_turn(turn):
            if stream:
                events = [event async for event in Served().responses_stream_generator(request)]
                answer = events[-1].response
            else:
                answer = await Served().responses_full_generator(request)
        found.append([item.type for item in answer.output])
    print(json.dumps(found))

asyncio.run(main())
"""

# vLLM calls an answer that it has aborted completed.
ABORTED = """
import asyncio, json, sys
from types import SimpleNamespace
from tests.histories import replica
from vllmops.agent.hooks.request_gate import gate
from vllmops_responses.server.conversations.turn import Turn, set_current_turn
from vllmops_responses.server.serving import StoreBackedServing
from vllmops_responses.server.wire_format import AbortError
from vllmops_responses.store import backend_factory as opening
from vllmops_responses.store.response_store import ResponseStore

backend = opening.make_backend("memory://")
StoreBackedServing.open_store = staticmethod(lambda: ResponseStore(backend))
StoreBackedServing.get_keyring = staticmethod(lambda: None)
harmony = SimpleNamespace(finish_reason="abort")
simple = SimpleNamespace(last_output=SimpleNamespace(outputs=[harmony]))

class Aborting(StoreBackedServing):
    context = None

    async def responses_full_generator(self, request):
        return await super().responses_full_generator(request, None, None, self.context)

async def main():
    serving = Aborting()
    async with serving.store as store:
        for serving.context in (None, simple, harmony):
            found = []
            request = replica.ResponsesRequest(input="a")
            try:
                answer = await serving.create_responses(request, None)
                found.append(answer.status)
            except AbortError as error:
                found.append(error.status)
            request = replica.ResponsesRequest(input="a", stream=True)
            ends = []
            gate.set_last_event = ends.append
            turn = Turn(request, "", b"[]")
            with set_current_turn(turn):
                events = serving.responses_stream_generator(request)
                frames = [frame async for frame in serving.stream_response(turn, request, events)]
            numbers = [json.loads(frame.data)["sequence_number"] for frame in frames]
            found += [frames[-1].type, numbers == list(range(len(frames)))]
            found.append(ends[0]().split()[1].decode())
            for stream in (False, True):
                request = replica.ResponsesRequest(input="a", background=True, stream=stream)
                turn = Turn(request, "", b"[]")
                with set_current_turn(turn):
                    await serving.create_responses(request, None)
                    run = await serving.runs.accept_run(turn, store.create, b'{"kept": 1}')
                await serving.runs.running[run.id][1]
                run = await store.get("", run.id)
                found += [run.status, b"kept" in run.body, run.error[:10]]
            print(*found)

asyncio.run(main())
"""


def test_an_answer_that_vllm_aborted_is_failed_and_can_run_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABORTED],
        env={**os.environ, RUN: "start"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole, simple, harmony = done.stdout.splitlines()
    assert whole.split() == [
        *("completed", "response.completed", "True", "response.failed"),
        *("completed", "False") * 2,
    ]
    failed = "failed True vLLM ended"
    assert simple == f"503 response.failed True response.failed {failed} {failed}"
    assert harmony == simple


# vLLM frees the blocks that another server has filled for a request, where it refuses that request.
REJECTED = """
import asyncio, json, sys
from types import SimpleNamespace
from typing import Any
from pydantic import BaseModel
from tests.responses.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops_responses.server.conversations import token_count as tokens
from vllmops_responses.server.serving import StoreBackedServing
from vllmops_responses.server.wire_format import ApiError

class Asked(BaseModel, extra="allow"):
    input: Any = None
    kv_transfer_params: Any = None
    previous_response_id: str | None = None
    truncation: str = "auto"

freed, asked = [], []

class Served(StoreBackedServing):
    counts, tool_server, parser, use_harmony = True, None, None, False

    def __init__(self):
        pass

    async def _with_kv_transfer_rejection_cleanup(self, awaitable, request, raw_request):
        try:
            return await awaitable
        except Exception:
            if request.kv_transfer_params:
                freed.append(raw_request)
            raise

    async def create_responses(self, request, raw_request):
        return await self._with_kv_transfer_rejection_cleanup(
            self.limited(request), request, raw_request
        )

    async def limited(self, request):
        asked.append(len(request.input))
        if len(request.input) > 2:
            raise ValueError("too long")
        return tokens.TokenCount(1)

async def main():
    items = [{"role": "user", "content": str(n)} for n in range(4)]
    request = Asked(input=items, kv_transfer_params={"do_remote_prefill": True})
    await Served().truncate_input(request)
    assert (len(request.input), freed) == (2, []) and asked, (request, freed, asked)
    choice = {"type": "file_search"}
    request = Asked(kv_transfer_params={"do_remote_prefill": True}, tool_choice=choice)
    raw = SimpleNamespace(body=lambda: asyncio.sleep(0, b"{}"))
    try:
        await Served().answer_create_request(request, raw)
    except ApiError as error:
        assert (error.param, freed) == ("tool_choice", [raw])
        print("refused")

asyncio.run(main())
"""


def test_blocks_are_freed_for_what_is_refused_and_for_nothing_that_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REJECTED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


AWAY = """
import asyncio, sys
from types import SimpleNamespace
from tests.responses.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops_responses.server.serving import StoreBackedServing
from vllmops_responses.store.backend import StoreUnavailable

class Away:
    def __init__(self, refuses):
        self.refuses = refuses

    async def get(self, owner, response_id):
        raise StoreUnavailable(f"{response_id} is not there")

async def main():
    serving = StoreBackedServing.__new__(StoreBackedServing)
    for refuses, store in ((True, True), (True, False), (False, True)):
        serving.store = Away(refuses)
        request = SimpleNamespace(
            store=store, previous_response_id=None, input="x", include=[], model_extra=None,
            previous_input_messages=None, request_id="resp_1", model_fields_set=set(),
        )
        raw = SimpleNamespace(body=lambda: asyncio.sleep(0, b'{"input": "x"}'), headers={})
        raw.app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=[])))
        try:
            turn = await serving.build_turn(request, raw)
            print("goes on", turn is not None)
        except StoreUnavailable as error:
            print(error.message)

asyncio.run(main())
"""


def test_request_is_refused_if_the_store_can_not_take_its_response() -> None:
    done = subprocess.run([sys.executable, "-c", AWAY], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "resp_1 is not there",
        "goes on False",
        "goes on True",
    ], done.stderr


def test_an_answer_in_the_background_begins_with_one_compaction() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPACTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["compaction", "message"]] * 2
