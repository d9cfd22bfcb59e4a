"""What a connector keeps of a request is found wherever it is, and what it forgot is not."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import permutations
from typing import Any

import msgspec
import pytest

from vllmops.agent.actions import heap_search

NAME = "chatcmpl-1"


class Holder:
    """Has one thing."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def get(self) -> Any:
        return self.thing


class Slotted:
    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def make_closure(name: str) -> Callable[[], str]:
    return lambda: name


def make_queue(*things: Any) -> Any:
    made = queue.SimpleQueue[Any]()
    for thing in things:
        made.put(thing)
    return made


def called_back(name: str) -> Future[None]:
    future = Future[None]()
    future.add_done_callback(partial(print, name))
    return future


async def receives(name: str) -> str:
    await asyncio.get_running_loop().create_future()
    return name


HELD: dict[str, Callable[[], Any]] = {
    "a key": lambda: {NAME: 1},
    "a set deep inside": lambda: [{"a": ({NAME},)}],
    "an attribute": lambda: Holder(Holder(NAME)),
    "a slot": lambda: Slotted(NAME),
    "a deque": lambda: deque([NAME]),
    "a queue": lambda: make_queue(("x", NAME)),
    "a closure": lambda: make_closure(NAME),
    "a future's callback": lambda: called_back(NAME),
    "a part of a longer name": lambda: [f"{NAME}_layer.0"],
    "a message": lambda: [b"done:" + NAME.encode()],
    "a bound method": lambda: Holder(NAME).get,
}


@pytest.mark.parametrize("name", HELD)
def test_name_that_an_object_holds_is_found(name: str) -> None:
    assert heap_search.find_mentioned_names([Holder(HELD[name]())], [NAME, "chatcmpl-2"]) == {NAME}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("u-10", {"u-10"}),
        ("u-1", {"u-1"}),
        (b"u-10", {"u-10"}),
        ("u-10_layer.0", {"u-1", "u-10"}),  # "u-1" and a number, for all that can be told
        ("u-100:u-2", {"u-1", "u-10", "u-2"}),
        (b"\xffu-100", {"u-1", "u-10"}),
        ("u-3", set()),
    ],
)
def test_a_name_that_begins_as_another_one_is_found_beside_it(
    text: str | bytes, found: set[str]
) -> None:
    for names in permutations(("u-1", "u-10", "u-2")):
        assert heap_search.find_mentioned_names([[text]], names) == found


def test_native_objects_make_the_search_inconclusive() -> None:
    native = Holder(msgspec.msgpack.Encoder())  # of any class that is not written in Python
    assert heap_search.find_mentioned_names([Holder({}), native], [NAME]) is None
    assert (
        heap_search.find_mentioned_names([Holder({}), native], [NAME], allow_native=True) == set()
    )
    assert (
        heap_search.find_mentioned_names(
            [Holder(deque()), make_queue(), asyncio.Queue[str]()], [NAME]
        )
        == set()
    )


def test_a_coroutine_that_waits_is_found() -> None:
    async def find_names_in_task() -> set[str] | None:
        task = asyncio.create_task(receives(NAME))
        await asyncio.sleep(0)
        try:
            return heap_search.find_mentioned_names([Holder(task)], [NAME])
        finally:
            task.cancel()

    assert asyncio.run(find_names_in_task()) == {NAME}


def test_name_in_a_threads_local_variables_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        heap_search, "LIMIT_S", 60
    )  # other tests have left a lot that can be reached
    begun, over = threading.Event(), threading.Event()

    def receive(name: str) -> str:
        begun.set()
        over.wait(60)
        return name

    with ThreadPoolExecutor() as pool:
        running = pool.submit(receive, NAME)
        assert begun.wait(60)
        try:
            assert heap_search.find_mentioned_names(
                heap_search.list_thread_values(), [NAME], allow_native=True
            ) == {NAME}
        finally:
            over.set()
        running.result()


def test_name_that_no_object_holds_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # A function's module knows all kinds of things.
    monkeypatch.setitem(globals(), "chatcmpl", NAME + "7")
    assert (
        heap_search.find_mentioned_names([Holder(make_closure("another")), threading], [NAME + "7"])
        == set()
    )


def test_a_connector_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_search, "OBJECTS", 50)
    assert heap_search.find_mentioned_names([[[number] for number in range(100)]], [NAME]) is None
