"""The serving class on a scripted engine, without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys

COMPACTED = """
import asyncio, json, sys
from types import SimpleNamespace
from tests.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops.agent.adapters import responses as adapter
from vllmops.agent.responses import compaction
from vllmops.agent.responses.serving import StoredResponses
from vllmops.agent.responses.turn import Turn, working

class Engine:
    async def responses_full_generator(self, request):
        answer = adapter.ResponsesResponse()
        answer.output = [SimpleNamespace(type="message", id="msg_1")]
        return answer

    async def responses_stream_generator(self, request):
        yield SimpleNamespace(type="response.created", sequence_number=0)
        answer = await self.responses_full_generator(request)
        yield SimpleNamespace(type="response.completed", sequence_number=1, response=answer)

class Served(StoredResponses, Engine):
    def __init__(self):
        pass

async def main():
    found = []
    for stream in (False, True):
        request = SimpleNamespace(stream=stream)
        turn = Turn(request, "", b"[]")
        turn.compaction = compaction.sealed_item("sealed")
        with working(turn):
            if stream:
                events = [event async for event in Served().responses_stream_generator(request)]
                answer = events[-1].response
            else:
                answer = await Served().responses_full_generator(request)
        found.append([item.type for item in answer.output])
    print(json.dumps(found))

asyncio.run(main())
"""


def test_an_answer_in_the_background_begins_with_one_compaction() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPACTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["compaction", "message"]] * 2
