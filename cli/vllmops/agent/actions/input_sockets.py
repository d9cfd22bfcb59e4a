"""Keeps the sockets of an engine's input thread when an error ends it.

vLLM would close them, and all that clients send meanwhile would be lost. Kept, they hold it until
the next thread reads it.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from types import FunctionType, ModuleType, TracebackType
from typing import Any

# The context and the sockets of the thread, in the order in which it opens them.
_opened: list[Any] = []


def hook_input_thread(module: ModuleType) -> None:
    """Have the input threads that start from now on leave their sockets open; idempotent.

    Args:
        module: vLLM's, with the engine.
    """
    kind = getattr(module, "EngineCoreProc", None)
    process = vars(kind).get("process_input_sockets") if kind else None
    if not isinstance(process, FunctionType) or hasattr(process, "__wrapped__"):
        return
    # The coordinator of several engines greets each new connection alone.
    if "coord_input_address" not in inspect.signature(process).parameters:
        return

    @functools.wraps(process)
    def process_input_sockets(self: Any, *args: Any, **fields: Any) -> None:
        run = process
        with suppress(Exception):  # then the thread runs as stock's does
            given = inspect.signature(process).bind(self, *args, **fields).arguments
            if given["coord_input_address"] is None:
                run = copy_reusing_sockets(process)
        run(self, *args, **fields)

    kind.process_input_sockets = process_input_sockets  # type: ignore[union-attr]


def copy_reusing_sockets(process: FunctionType) -> FunctionType:
    """A copy of a thread's function that opens what the thread before it has left open."""
    own, before = process.__globals__, iter(list(_opened))

    def reuse_or_open(make: Any) -> PersistentContext:
        thing = next(before, None)
        if thing is None:
            thing = make()
            _opened.append(thing)
        return PersistentContext(thing)

    class ZmqProxy:
        def __getattr__(self, name: str) -> Any:
            return getattr(own["zmq"], name)

        def Context(self) -> PersistentContext:  # noqa: N802 - as the library has it
            return reuse_or_open(own["zmq"].Context)

    def make_zmq_socket(*args: Any, **fields: Any) -> PersistentContext:
        return reuse_or_open(functools.partial(own["make_zmq_socket"], *args, **fields))

    copied = FunctionType(
        process.__code__,
        {**own, "zmq": ZmqProxy(), "make_zmq_socket": make_zmq_socket},
        process.__name__,
        process.__defaults__,
        process.__closure__,
    )
    copied.__kwdefaults__ = process.__kwdefaults__
    return copied


class PersistentContext:
    """A context manager of something that an error does not close."""

    def __init__(self, resource: Any) -> None:
        self.resource = resource

    def __enter__(self) -> Any:
        return self.resource

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            _opened.remove(self.resource)
            self.resource.__exit__(kind, error, traceback)
