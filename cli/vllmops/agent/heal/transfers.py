"""Requests that wait for a transfer of their KV blocks that nobody carries out any more.

A worker's connector reports the end of each transfer by the id of its request. Where no object of
it mentions that id, nobody here waits for that end. Then a failure is reported in its place, and
vLLM ends the request, if that is its `kv_load_failure_policy`. Another machine may still write into
the request's blocks: as with any request that ends during its transfer, vLLM keeps those until the
connector reports. So it can't compute the request again, which would need these blocks.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import FunctionType, MethodDescriptorType, ModuleType
from typing import Any

from ...protocol.heal import Proof
from .. import engine, objects
from ..adapters import scheduling
from .between import between_steps

OLD_S = 10.0
# A larger connector is not read to its end, and proves nothing.
OBJECTS, LETTERS = 200_000, 10_000_000
# What these define in C keeps no ids of its own.
KNOWN = frozenset({"numpy", "torch", "zmq", "msgspec", *sys.stdlib_module_names})
TRANSFER = "vllm.distributed.kv_transfer"
# Of the server, not of a request; and too large to be read.
SETTINGS = ("vllm.config.", "transformers.")


def look() -> list[Proof]:
    """The requests that wait for a transfer, and what would be done."""
    scheduler = objects.latest("scheduler")
    if scheduler is None or engine.rests(scheduler):
        return []
    now = time.time()
    return [
        Proof(
            subject=request.request_id,
            what="it waits for its KV blocks, and the connector does not know of the transfer",
            same=f"{id(request)} {request.num_computed_tokens}",
            rises=engine.step(scheduler),
        )
        for request in scheduling.transferred(scheduler)
        if now - request.arrival_time > OLD_S
    ]


def known() -> list[Proof]:
    """One proof in a worker with a connector: all words that it mentions."""
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    connector = getattr(state, "_KV_CONNECTOR_AGENT", None)
    if connector is None:
        return []
    name = type(connector).__name__
    words = mentioned(connector)
    if words is None:
        return [Proof(subject="", what=f"not all of {name} can be read")]
    return [Proof(subject="connector", what=name, requests=tuple(words))]


def mentioned(connector: Any) -> set[str] | None:
    """The words in all that a connector refers to; None if some of it can't be read.

    So do its threads: what one has taken from a queue is in its frames alone.
    """
    words, letters, packages = set[str](), 0, set[str]()
    seen = {
        id(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")
    }
    others, threads = len(seen), False
    todo = [connector]
    while todo:
        one = todo.pop()
        if isinstance(one, (bytes, bytearray)):
            one = one.decode("latin1")
        if isinstance(one, str):
            if one not in words:
                words.add(one)
                letters += len(one)
        elif id(one) not in seen:
            seen.add(id(one))
            kind = type(one)
            if not (isinstance(one, (type, ModuleType)) or settings(kind)):
                if len(seen) - others > OBJECTS or letters > LETTERS or opaque(kind):
                    return None
                packages.add(package(kind.__module__))
                todo += referents(one)
        if not todo and not threads:
            threads = True
            todo += held_by_threads(packages)
    return words


def package(module: str) -> str:
    """Whose code a module is; empty if that is no connector's."""
    root = module.partition(".")[0]
    if root in KNOWN:
        return ""
    return TRANSFER if root == "vllm" else root


def referents(one: Any) -> list[Any]:
    """What an object refers to: not a function's module, and of a dictionary the keys, too."""
    if isinstance(one, FunctionType):
        return [one.__closure__, one.__defaults__, one.__kwdefaults__]
    found = gc.get_referents(one)
    if isinstance(one, dict):
        found += dict.copy(one)
    return found


def settings(kind: type) -> bool:
    """Whether objects of a type are the server's settings or its model."""
    return kind.__module__.startswith(SETTINGS) or hasattr(kind, "named_parameters")


def opaque(kind: type) -> bool:
    """Whether objects of a type may keep ids where Python can't see them."""
    return any(
        base.__module__.partition(".")[0] not in KNOWN
        and any(isinstance(one, MethodDescriptorType) for one in vars(base).values())
        for base in kind.__mro__
    )


def held_by_threads(packages: Collection[str]) -> list[Any]:
    """What the functions have that a connector's threads are in.

    The main thread is not among them: it asks the connector, and waits for no transfer.

    Args:
        packages: of the connector's code.
    """
    main, own = threading.main_thread().ident, threading.get_ident()
    found: list[Any] = []
    for name, frame in list(sys._current_frames().items()):
        frames = [] if name in {main, own} else list(calls(frame))
        codes = (str(one.f_globals.get("__name__", "")) for one in frames)
        if any(code.startswith(each) for code in codes for each in packages if each):
            found += (value for one in frames for value in one.f_locals.values())
    return found


def calls(frame: Any) -> Iterator[Any]:
    """A frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def act(subjects: list[str]) -> dict[str, str]:
    """Report to the scheduler that transfers have failed, as a worker does with a step's output.

    Returns why that was not possible.
    """
    scheduler = objects.latest("scheduler")
    if scheduler is None or not scheduling.takes_failures():
        return dict.fromkeys(subjects, "this vLLM has no report of a failed transfer by request")
    if scheduling.recomputes(scheduler):
        return dict.fromkeys(
            subjects,
            "kv_load_failure_policy is recompute, and another machine may still write into its "
            "blocks; vllmops requests abort ends it",
        )

    def report() -> None:
        usual = scheduler.update_from_output

        def with_failures(scheduled: Any, output: Any, *more: Any, **fields: Any) -> Any:
            del scheduler.update_from_output
            with suppress(Exception):  # the look after this one still shows them
                waiting = {one.request_id for one in scheduling.transferred(scheduler)}
                output = scheduling.failing(output, waiting & set(subjects))
            return usual(scheduled, output, *more, **fields)

        scheduler.update_from_output = with_failures

    left = between_steps(objects.latest("engine-core"), report)
    return dict.fromkeys(subjects, left) if left else {}
