"""Finds vLLM's objects in a process that ran long before the agent came.

Their constructors are done, and ``gc`` does not show what vLLM has frozen. What is in use can be
reached, though, from the frames of the threads and of the event loop's tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    GeneratorType,
    MethodType,
)
from typing import Any

from . import objects, observe, service
from .gate import Arrival, gate
from .patches import registry

MOST = 200_000  # objects looked at; some 5,000 as a rule
LARGE = 10_000  # elements of a container that is not looked into
# Weights and layers, and nothing that is looked for.
LAYERS = "vllm.model_executor"
IN_PROGRESS = "RequestResponseCycle.run_asgi"


def start(*, patch: bool) -> None:
    """Bring the agent up in this process, with everything that is in use already.

    Args:
        patch: whether to apply those patches that are safe on classes in use.

    Raises:
        RuntimeError: it can't come up here.
    """
    roots = list(values())
    count(tasks(roots))
    observe(withheld(patch=patch))
    adopt(roots)
    service.start()
    if not service.running():
        raise RuntimeError("; ".join(objects.problems) or "it did not start")


def withheld(*, patch: bool) -> dict[str, str]:
    """The patches that are not applied though their defect is there, and why."""
    if not patch:
        return dict.fromkeys(registry.PATCHES, "attached without --patch")
    return {
        each.id: "it can't be applied to what is in use"
        for each in registry.PATCHES.values()
        if not each.live
    }


def adopt(roots: Iterable[Any]) -> None:
    """Remember what the constructors' hooks would have."""
    kinds = {
        kind: cls
        for kind, (module, older, name) in objects.HOOKS.items()
        if (cls := vars(sys.modules.get(module) or sys.modules.get(older) or object).get(name))
    }
    for each in reachable(roots):
        for kind, cls in kinds.items():
            # By type: asking a proxy for its class can do anything.
            if issubclass(type(each), cls):
                objects.remember(kind, each)


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """The objects of vLLM's that can be reached, each once, the nearest first."""
    queue, seen = deque(roots), dict[int, Any]()
    while queue and len(seen) < MOST:
        each = queue.popleft()
        if id(each) in seen:
            continue
        seen[id(each)] = each  # which keeps it alive, and its id its own
        if ours(each):
            yield each
        queue.extend(parts(each))


def parts(each: Any) -> list[Any]:
    """What an object holds, where it is vLLM's, a container or a bound function.

    Copied in single C calls: other threads change it meanwhile.
    """
    if isinstance(each, (dict, list, tuple, set, deque)):
        if len(each) > LARGE:
            return []
        return list(each.values() if isinstance(each, dict) else each)
    if isinstance(each, MethodType):
        return [each.__self__]
    if isinstance(each, partial):
        return [each.func, *each.args, *each.keywords.values()]
    if ours(each):
        return list(getattr(each, "__dict__", {}).values())
    return []


def ours(each: Any) -> bool:
    """Whether it is an object of vLLM's, not a class or a module, and no layer of a model."""
    module = type(each).__module__
    return module.startswith("vllm.") and not module.startswith(LAYERS)


def values() -> Iterator[Any]:
    """What the functions that are running hold in their variables, tasks included."""
    loops: dict[int, asyncio.AbstractEventLoop] = {}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            held = variables(frame)
            yield from held
            for each in held:
                if (loop := loop_of(each)) is not None:
                    loops[id(loop)] = loop
            frame = frame.f_back
    for loop in loops.values():
        for task in asyncio.all_tasks(loop):
            yield task
            yield from suspended(task.get_coro())


def loop_of(each: Any) -> asyncio.AbstractEventLoop | None:
    """The event loop that an object of asyncio's stands for."""
    if isinstance(each, asyncio.AbstractEventLoop):
        return each
    if isinstance(each, asyncio.Runner):
        return vars(each).get("_loop")  # its method would make one
    if isinstance(each, asyncio.Future):
        return each.get_loop()
    return None


def suspended(awaited: Any) -> Iterator[Any]:
    """What a coroutine, and whatever it waits for, holds in its variables."""
    while awaited is not None:
        match awaited:
            case CoroutineType():
                frame, awaited = awaited.cr_frame, awaited.cr_await
            case GeneratorType():
                frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
            case AsyncGeneratorType():
                frame, awaited = awaited.ag_frame, awaited.ag_await
            case _:
                return
        if frame is not None:
            yield from variables(frame)


def variables(frame: FrameType) -> list[Any]:
    """The values of a function's variables."""
    names = frame.f_locals
    held = list(names.values())
    if is_copy(frame.f_code):
        # It would stay with the frame, and keep a request alive for as long as a loop runs.
        names.clear()
    return held


def is_copy(code: CodeType) -> bool:
    """Whether ``f_locals`` is a dictionary that nobody but us has asked for."""
    optimized = bool(code.co_flags & inspect.CO_OPTIMIZED)
    return optimized and sys.version_info < (3, 13) and "locals" not in code.co_names


def tasks(roots: Iterable[Any]) -> list[asyncio.Task[Any]]:
    """The tasks that answer an HTTP request."""
    return [
        each
        for each in roots
        if isinstance(each, asyncio.Task)
        and getattr(each.get_coro(), "__qualname__", "") == IN_PROGRESS
    ]


def count(requests: list[asyncio.Task[Any]]) -> None:
    """Count the requests that began before the gate was there.

    How far each has come is not known: until it ends it may not have reached the engine.
    """

    def ended(came: Arrival, _: asyncio.Task[Any]) -> None:
        gate.arrivals.discard(came)

    def begin() -> None:
        for task in requests:
            if not task.done():
                came = Arrival(time.monotonic(), rendering=True)
                gate.arrivals.add(came)
                task.add_done_callback(partial(ended, came))

    if requests:
        # On the loop's own thread, as everything that the gate counts.
        requests[0].get_loop().call_soon_threadsafe(begin)
