"""Fills a store in a process of its own, and prints how its memory grew, in bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import sys

import psutil

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import EVERYBODY, Limits, Response
from vllmops_responses.store.response_store import ResponseStore

ANSWER = " and more of the answer, number %d" * 8


def response(number: int) -> Response:
    text = ANSWER % tuple(range(number, number + 8))
    message = {"type": "message", "role": "assistant", "content": [{"text": text}]}
    usage = {"input_tokens": number, "output_tokens": 3, "total_tokens": number + 3}
    name = f"resp_{number:032x}"
    body: dict[str, object] = {
        "id": name,
        "object": "response",
        "model": "demo",
        "tools": [],
        "usage": usage,
    }
    body |= {"status": "completed", "output": [message], "temperature": 1.0, "metadata": None}
    return Response(
        id=name,
        owner="a" * 64,
        model="demo",
        status="completed",
        body=json.dumps(body).encode(),
        input=json.dumps([{"role": "user", "content": f"a question, number {number}"}]).encode(),
    )


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def main(url: str, max_size: int, counts: list[int], events: int) -> None:
    store = ResponseStore(
        backend_factory.make_backend(url, Limits(max_size=max_size)), deadline_s=60
    )
    async with store:
        begun, number, words, raw = rss(), 0, [], 0
        for count in counts:
            while number < count:
                made = response(number)
                raw += len(made.body) + len(made.input)
                await store.create(made)
                for first in range(0, events, 50):
                    delta = (
                        b'{"type":"response.output_text.delta","delta":"word","sequence_number":%d}'
                    )
                    await store.append_events(made, first, [delta % (first + n) for n in range(50)])
                number += 1
                await asyncio.sleep(0)  # as between two requests
            words.append(rss() - begun)
        count = (await store.collect_stats(EVERYBODY)).response_count
    print(json.dumps({"grown": words, "count": count, "raw": raw}))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])))
