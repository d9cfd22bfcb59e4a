"""Finding what was made before the agent came; tests/live does it in a real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from vllmops.agent import attach_start
from vllmops.agent.hooks.request_gate import Gate

from ..support.waiting import until


class Thing:
    """Something that passes for vLLM's own."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def method(self) -> None: ...


Thing.__module__ = "vllm.v1.things"


class Layer(Thing): ...


Layer.__module__ = "vllm.model_executor.layers"


class Foreign:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda thing: thing,
        lambda thing: Thing(inner={"a": [(thing,)]}),
        lambda thing: thing.method,
        lambda thing: partial(print, thing, end=""),
        lambda thing: Thing(call=partial(Thing(deep=thing).method)),
    ],
)
def test_object_reachable_from_the_given_ones_is_found(wrap: Callable[[Thing], Any]) -> None:
    thing = Thing()
    assert thing in list(attach_start.find_vllm_objects([wrap(thing)]))


def test_it_does_not_look_into_everything() -> None:
    thing = Thing()
    assert thing not in list(attach_start.find_vllm_objects([Foreign(inner=thing)]))
    assert thing not in list(attach_start.find_vllm_objects([Layer(inner=thing)]))
    assert thing not in list(
        attach_start.find_vllm_objects([[*list(range(attach_start.LARGE)), thing]])
    )
    ring = Thing()
    vars(ring)["inner"] = ring
    assert list(attach_start.find_vllm_objects([ring])) == [ring]


@contextlib.contextmanager
def run_in_thread(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """A thread that is in the middle of something."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def test_variables_of_threads_and_of_suspended_coroutines() -> None:
    in_thread, in_task, in_context = Thing(), Thing(), Thing()
    ready = threading.Semaphore(0)

    def spin(over: threading.Event) -> None:
        held = in_thread  # noqa: F841 - it is looked for
        ready.release()
        over.wait()

    @contextlib.asynccontextmanager
    async def context() -> AsyncIterator[None]:
        yield

    async def serve(held: Thing, over: threading.Event) -> None:
        async with context():
            ready.release()
            await asyncio.to_thread(over.wait)

    def loop(over: threading.Event) -> None:
        async def main() -> None:
            await asyncio.gather(serve(in_task, over), serve(in_context, over))

        asyncio.run(main())

    with run_in_thread(spin), run_in_thread(loop):
        for _ in range(3):
            assert ready.acquire(timeout=60)
        held = list(attach_start.list_live_values())
    for thing in (in_thread, in_task, in_context):
        assert thing in held


def test_a_forked_process_does_not_have_its_parent_s_variables() -> None:
    of_parent = Thing()
    identity = id(of_parent)
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        of_child = Thing()
        held = list(attach_start.list_live_values())
        theirs.send((of_child in held, identity in map(id, held)))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    assert of_parent in list(attach_start.list_live_values())
    assert ours.recv() == (True, False)


def test_looking_keeps_nothing_alive() -> None:
    steps, done = threading.Semaphore(0), threading.Semaphore(0)
    gone: list[weakref.ref[Thing]] = []

    def spin(over: threading.Event) -> None:
        request = Thing()
        gone.append(weakref.ref(request))
        done.release()
        steps.acquire()
        del request
        done.release()
        over.wait()

    with run_in_thread(spin):
        done.acquire()
        found = sum(isinstance(item, Thing) for item in attach_start.list_live_values())
        steps.release()
        done.acquire()
        gc.collect()
        assert (found, gone[0]()) == (1, None)


ANSWERED = threading.Event()


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        return
    while not ANSWERED.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def test_requests_that_began_before_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(attach_start, "gate", gate)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="off"))
        serving = threading.Thread(target=server.run, args=([listener],), daemon=True)
        serving.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asking = threading.Thread(target=httpx.get, args=(url,), kwargs={"timeout": 60})
        asking.start()
        until(lambda: attach_start.select_request_tasks(attach_start.list_live_values()))
        attach_start.count_earlier_requests(
            attach_start.select_request_tasks(attach_start.list_live_values())
        )
        until(lambda: (gate.in_flight, len(gate.rendering_requests)) == (1, 1))
        ANSWERED.set()
        asking.join(60)
        until(lambda: (gate.in_flight, len(gate.rendering_requests)) == (0, 0))
        server.should_exit = True
        serving.join(60)
