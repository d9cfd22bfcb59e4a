"""Replicas: our routes and serving class on a real store, over HTTP, with a scripted engine.

Only vLLM's engine is replaced: a real one takes 30 s to start. This program imports everything once
and forks a replica for each line ``PORT URL [CLASS]`` on stdin, whose pid it prints. ``CLASS`` is a
backend of the tests'. SIGUSR1 and SIGUSR2 step a replica's clock by an hour.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any
from uuid import uuid4
from zlib import crc32

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from vllmops.model.environment import STORE_CLASS

from ..responses.store import served

KEYS = ["ann", "bob"]
LEASE_S = 1.0
STEP_S = 3600.0

# Nobody but root can step the machine's clock, and other tests need it.
stepped_s = [0.0]
_now = time.time
time.time = lambda: _now() + stepped_s[0]


class Usage(BaseModel):
    """No tokens are counted."""


class ResponsesRequest(BaseModel):
    """What our routes read of vLLM's request."""

    model_config = ConfigDict(extra="allow")
    model: str = "m"
    input: Any = None
    previous_response_id: str | None = None
    previous_input_messages: Any = None
    store: bool = True
    background: bool = False
    stream: bool = False
    include: Any = None
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[Any] = []
    max_output_tokens: int | None = None
    request_id: str = Field(default_factory=lambda: f"resp_{uuid4().hex}")
    truncation: str = "disabled"

    @staticmethod
    def input_item_parsing(values: dict[str, Any]) -> dict[str, Any]:
        return values


class ResponsesResponse(BaseModel):
    """An answer, of as many fields as the scripted engine has."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: str = "response"
    created_at: int
    model: str = "m"
    status: str
    previous_response_id: str | None = None
    output: list[Any] = []
    usage: Any = None


class Message(BaseModel):
    """An item of an answer."""

    model_config = ConfigDict(extra="allow")
    type: str = "message"
    id: str
    role: str = "assistant"
    status: str = "completed"
    content: list[Any]


class Event(BaseModel):
    """An event of a stream."""

    model_config = ConfigDict(extra="allow")
    type: str
    sequence_number: int
    response: Any = None
    delta: str | None = None


class Engine:
    """vLLM's serving class, whose model says what it was asked and what it has seen before."""

    use_harmony = False
    tool_server = None
    model_config = Namespace(max_model_len=1 << 20)
    engine_client = Namespace(errored=False)

    def __init__(self) -> None:
        self.background_tasks: dict[str, asyncio.Task[None]] = {}

    async def _check_model(self, request: Any) -> None:
        return None

    async def _with_kv_transfer_rejection_cleanup(self, awaitable: Any, *_: Any) -> Any:
        return await awaitable

    def create_error_response(self, error: Any) -> Any:
        return Namespace(error=Namespace(message=str(error)))

    async def create_responses(self, request: Any, _: Any) -> Any:
        await self._check_model(request)
        if not request.background:
            return await self.responses_full_generator(request)
        queued = response(request, "queued", [])
        self.response_store[request.request_id] = queued  # type: ignore[attr-defined]
        run = self._run_background_request
        if request.stream:
            run = self._run_background_request_stream
        task = asyncio.create_task(run(request))
        self.background_tasks[request.request_id] = task
        return queued

    async def _run_background_request(self, request: Any) -> None:
        raise NotImplementedError

    async def _run_background_request_stream(self, request: Any) -> None:
        raise NotImplementedError

    async def responses_full_generator(self, request: Any, *_: Any) -> Any:
        texts = [*map(text_of, list_input_items(request.input))]
        await asyncio.sleep(0.005 + 0.0001 * (crc32(texts[-1].encode()) % 300))
        seen = ",".join(text.partition("|")[0] for text in texts[:-1])
        part = {"type": "output_text", "text": f"re:{texts[-1]}|{seen}", "annotations": []}
        message = Message(id=f"msg_{uuid4().hex}", content=[part])
        return response(request, "completed", [message])

    async def responses_stream_generator(self, request: Any) -> AsyncGenerator[Event, None]:
        """Its answer, a letter in each event, over several of what the store writes at a time."""
        begun = response(request, "in_progress", [])
        yield Event(type="response.created", sequence_number=0, response=begun)
        answer = await self.responses_full_generator(request)
        letters = answer.output[0].content[0]["text"]
        for number, letter in enumerate(letters, 1):
            await asyncio.sleep(0.08 / len(letters))
            kind = "response.output_text.delta"
            yield Event(type=kind, sequence_number=number, delta=letter)
        yield Event(type="response.completed", sequence_number=len(letters) + 1, response=answer)


def response(request: Any, status: str, output: list[Any]) -> ResponsesResponse:
    made = ResponsesResponse(
        id=request.request_id,
        created_at=int(time.time()),
        status=status,
        previous_response_id=request.previous_response_id,
    )
    made.output = output
    return made


def list_input_items(given: Any) -> list[Any]:
    return [{"content": given}] if isinstance(given, str) else given


def text_of(item: dict[str, Any]) -> str:
    content = item["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def with_cancellation(handler: Any) -> Any:
    """As vLLM's: a client that leaves ends its request."""

    @functools.wraps(handler)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        raw = kwargs["raw_request"]
        work = asyncio.create_task(handler(*args, **kwargs))
        leaves = asyncio.create_task(wait_for_disconnect(raw))
        _, others = await asyncio.wait({work, leaves}, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        return None if work in others else work.result()

    return wrapper


async def wait_for_disconnect(raw: Any) -> None:
    while (await raw.receive())["type"] != "http.disconnect":
        pass


PARTS = {
    "ResponsesRequest": ResponsesRequest,
    "ResponsesResponse": ResponsesResponse,
    "serving": Namespace(OpenAIServingResponses=Engine),
    "with_cancellation": with_cancellation,
}


class Vllm(served.Vllm):
    """As `served.Vllm`, with the scripted engine."""

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: (  # type: ignore[method-assign]
            PARTS[name] if name in PARTS else served.thing(name)
        )


sys.meta_path.insert(0, Vllm())


def serve(port: int, url: str, kind: str) -> None:
    """Be a replica, until the process ends."""
    from vllmops_responses.server.http import conversation_routes, routes
    from vllmops_responses.server.serving import StoreBackedServing
    from vllmops_responses.store import backend_factory
    from vllmops_responses.store.backend import Limits
    from vllmops_responses.store.response_store import ResponseStore

    def step(number: int, _: Any) -> None:
        stepped_s[0] += STEP_S if number == signal.SIGUSR1 else -STEP_S

    signal.signal(signal.SIGUSR1, step)
    signal.signal(signal.SIGUSR2, step)
    if kind:
        os.environ[STORE_CLASS] = kind
    assert conversation_routes  # which adds to the others
    # A sweep while the clock is ahead would take the events that a client has not followed yet.
    limits = Limits(lease_s=LEASE_S, events_kept_s=2 * STEP_S)
    backend = backend_factory.make_backend(url, limits)
    StoreBackedServing.open_store = staticmethod(lambda: ResponseStore(backend))
    StoreBackedServing.get_keyring = staticmethod(lambda: None)
    app = FastAPI(lifespan=functools.partial(routes.lifespan, routes.router))
    app.include_router(routes.router)
    app.state.args = Namespace(api_key=KEYS)

    async def run() -> None:
        app.state.openai_serving_responses = StoreBackedServing()
        await uvicorn.Server(uvicorn.Config(app, port=port, log_level="error")).serve()

    asyncio.run(run())


def main() -> None:
    from vllmops_responses.server import serving
    from vllmops_responses.server.http import conversation_routes
    from vllmops_responses.store.backends import postgresql, redis, sqlite

    assert all((conversation_routes, serving, postgresql, redis, sqlite))
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        port, url, *kind = line.split()
        if pid := os.fork():
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(0)
        serve(int(port), url, "".join(kind))
        os._exit(0)


if __name__ == "__main__":
    main()
