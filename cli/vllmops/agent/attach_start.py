"""Starts the agent in a process that already runs, and finds vLLM's objects there.

Their constructors have run, and ``gc`` does not list what vLLM has frozen. But objects in use can
be reached from the stack frames of the threads and of the event loop's tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    GeneratorType,
    MethodType,
)
from typing import Any

from . import instrument_vllm
from .hooks import vllm_objects
from .hooks.request_gate import Arrival, gate
from .patches import registry
from .transport import unix_socket
from .versions import module_locations

MOST = 200_000  # objects visited; usually some 5,000
LARGE = 10_000  # containers with more elements are skipped
IN_PROGRESS = "RequestResponseCycle.run_asgi"
BEGIN = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]


def attach_agent(*, patch: bool) -> None:
    """Start the agent in this process, with all objects that are already in use.

    Args:
        patch: whether to apply the patches that are safe on classes in use.

    Raises:
        RuntimeError: the agent can't start here.
    """
    roots = list(list_live_values())
    count_earlier_requests(select_request_tasks(roots))
    instrument_vllm(list_withheld_patches(patch=patch))
    track_existing_objects(roots)
    unix_socket.start_agent()
    if not unix_socket.is_running():
        raise RuntimeError("; ".join(vllm_objects.problems) or "the agent did not start")


def list_withheld_patches(*, patch: bool) -> dict[str, str]:
    """The patches that are not applied even where the defect is present, and why."""
    if not patch:
        return dict.fromkeys(registry.PATCHES, "attached without --patch")
    return {
        patch.id: "it can't be applied to a running server"
        for patch in registry.PATCHES.values()
        if not patch.live
    }


def track_existing_objects(roots: Iterable[Any]) -> None:
    """Remember the objects that the hooks of the constructors would have remembered."""
    kinds = {
        kind: cls
        for kind in vllm_objects.KINDS
        if (cls := module_locations.find_loaded_class(kind)) is not None
    }
    for instance in find_vllm_objects(roots):
        for kind, cls in kinds.items():
            # By type: reading the __class__ of a proxy can run any code.
            if issubclass(type(instance), cls):
                vllm_objects.track_object(kind, instance)


def find_vllm_objects(roots: Iterable[Any]) -> Iterator[Any]:
    """VLLM's objects that can be reached, each once, the nearest first."""
    queue, seen = deque(roots), dict[int, Any]()
    while queue and len(seen) < MOST:
        item = queue.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # keeps it alive, so that no other object gets its id
        if is_vllm_object(item):
            yield item
        queue.extend(list_referents(item))


def list_referents(item: Any) -> list[Any]:
    """What an object holds, if it is vLLM's, a container or a bound function.

    Copied in single C calls, because other threads change it meanwhile.
    """
    if isinstance(item, (dict, list, tuple, set, deque)):
        if len(item) > LARGE:
            return []
        return list(item.values() if isinstance(item, dict) else item)
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, partial):
        return [item.func, *item.args, *item.keywords.values()]
    if is_vllm_object(item):
        return list(getattr(item, "__dict__", {}).values())
    return []


def is_vllm_object(item: Any) -> bool:
    """Whether it is an instance of one of vLLM's classes, and no layer of a model."""
    module = type(item).__module__
    return module.startswith("vllm.") and not module.startswith(module_locations.LAYERS)


def list_live_values() -> Iterator[Any]:
    """The values of the variables of all running functions and suspended tasks.

    Below the frame where a forked process began are functions of its parent, with the parent's
    objects: an API server's caches would be taken for the engine's.
    """
    loops: dict[int, asyncio.AbstractEventLoop] = {}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None and frame.f_code is not BEGIN:
            held = list_frame_values(frame)
            yield from held
            for value in held:
                if (loop := find_event_loop(value)) is not None:
                    loops[id(loop)] = loop
            frame = frame.f_back
    for loop in loops.values():
        for task in asyncio.all_tasks(loop):
            yield task
            yield from list_awaited_values(task.get_coro())


def find_event_loop(value: Any) -> asyncio.AbstractEventLoop | None:
    """The event loop of an asyncio object, None for anything else."""
    if isinstance(value, asyncio.AbstractEventLoop):
        return value
    if isinstance(value, asyncio.Runner):
        return vars(value).get("_loop")  # get_loop() would create one
    if isinstance(value, asyncio.Future):
        return value.get_loop()
    return None


def list_awaited_values(awaitable: Any) -> Iterator[Any]:
    """The values of the variables of a coroutine and of everything that it awaits."""
    while awaitable is not None:
        match awaitable:
            case CoroutineType():
                frame, awaitable = awaitable.cr_frame, awaitable.cr_await
            case GeneratorType():
                frame, awaitable = awaitable.gi_frame, awaitable.gi_yieldfrom
            case AsyncGeneratorType():
                frame, awaitable = awaitable.ag_frame, awaitable.ag_await
            case _:
                return
        if frame is not None:
            yield from list_frame_values(frame)


def list_frame_values(frame: FrameType) -> list[Any]:
    """The values of a function's variables."""
    names = frame.f_locals
    held = list(names.values())
    if has_copied_locals(frame.f_code):
        # The frame would keep the copy, and so keep a request alive as long as a loop runs.
        names.clear()
    return held


def has_copied_locals(code: CodeType) -> bool:
    """Whether ``f_locals`` is a copy that only this module has requested."""
    optimized = bool(code.co_flags & inspect.CO_OPTIMIZED)
    return optimized and sys.version_info < (3, 13) and "locals" not in code.co_names


def select_request_tasks(roots: Iterable[Any]) -> list[asyncio.Task[Any]]:
    """The tasks that answer an HTTP request."""
    return [
        root
        for root in roots
        if isinstance(root, asyncio.Task)
        and getattr(root.get_coro(), "__qualname__", "") == IN_PROGRESS
    ]


def count_earlier_requests(requests: list[asyncio.Task[Any]]) -> None:
    """Count the requests that began before the agent started.

    Whether a request has reached the engine is unknown, so until its end it counts as not there.
    """

    def discard_arrival(arrival: Arrival, _: asyncio.Task[Any]) -> None:
        gate.arrivals.discard(arrival)

    def add_arrivals() -> None:
        for task in requests:
            if not task.done():
                arrival = Arrival(time.monotonic(), rendering=True)
                gate.arrivals.add(arrival)
                task.add_done_callback(partial(discard_arrival, arrival))

    if requests:
        # On the event loop's thread: only that thread changes the gate's arrivals.
        requests[0].get_loop().call_soon_threadsafe(add_arrivals)
