"""Whether anything that an object holds names a request: what does not can never report its end.

Connectors keep their transfers in ways of their own: dicts, queues, futures, coroutines. So all
that is reachable from one is looked through, without calling any of it.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

LIMIT_S = 0.5
OBJECTS = 300_000
TEXT = 512  # letters; a longer text is none of a transfer's names
HERE = tuple(os.path.join("", name, "") for name in ("vllmops", "vllmops_responses"))
# Of the engine's own threads and queues, which know every request.
LOOP = os.path.join("", "vllm", "v1", "")
STANDARD = {*sys.stdlib_module_names, "builtins"}
# Members of classes that were not written in Python.
NATIVE = (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
ALIENS = (
    *("torch", "numpy", "logging", "importlib", "transformers", "vllmops"),
    *("vllm.config", "vllm.v1.core", "vllm.v1.engine", "vllm.v1.worker", "vllm.model_executor"),
)


def find_mentioned_names(
    roots: Iterable[Any], names: Iterable[str], *, allow_native: bool = False
) -> set[str] | None:
    """The names that something reachable has in one of its texts.

    Args:
        roots: where to begin.
        names: ids of requests.
        allow_native: whether objects of native code, other than Python's own, count as holding
            none.

    Returns:
        None if not all can be seen: there is too much, or an object of native code, which may keep
        what it likes.
    """
    wanted = set(names)
    pattern = re.compile("|".join(map(re.escape, wanted)))
    found: set[str] = set()
    stack, seen, kinds = list(roots), dict[int, Any](), dict[type, bool]()
    until = time.monotonic() + LIMIT_S
    while stack and found != wanted:
        one = stack.pop()
        if isinstance(one, str | bytes):
            if len(one) <= TEXT:
                # Of Python's own types: a class made of them could have methods of its own.
                text = (
                    str.__str__(one)
                    if isinstance(one, str)
                    else bytes.decode(one, "utf-8", "replace")
                )
                if text in wanted:
                    found.add(text)
                elif pattern.search(text):
                    # One name can begin as another one does: in "u-10_0", either may be meant.
                    found |= {name for name in wanted if name in text}
        elif id(one) not in seen and not is_foreign_object(one):
            seen[id(one)] = one  # kept, or another object could get its place
            if len(seen) > OBJECTS or time.monotonic() > until:
                return None
            if not allow_native and not is_inspectable_class(type(one), kinds):
                return None
            stack += list_referents(one)
    return found


def list_referents(value: Any) -> Iterable[Any]:
    """What an object refers to; of a function only what is its own, not all of its module."""
    if isinstance(value, FunctionType):
        return (value.__closure__, value.__defaults__, value.__kwdefaults__)
    if isinstance(value, dict):
        # gc leaves out keys that are texts. Two C calls: others go on meanwhile.
        return [*list(dict.keys(value)), *list(dict.values(value))]
    return gc.get_referents(value)


def is_inspectable_class(kind: type, inspectable_by_class: dict[type, bool]) -> bool:
    """Whether all that objects of a class refer to can be seen: it is Python's, or written in it.

    Args:
        kind: the class.
        inspectable_by_class: what was found of classes before.
    """
    if kind not in inspectable_by_class:
        members = (
            value
            for part in kind.__mro__
            if not is_standard_class(part)
            for value in [*vars(part).values()]
        )
        inspectable_by_class[kind] = not any(is_native_member(value) for value in members)
    return inspectable_by_class[kind]


def is_native_member(member: Any) -> bool:
    """Whether a member of a class is what no class has that was written in Python."""
    owner = getattr(member, "__objclass__", getattr(member, "__self__", None))
    return isinstance(member, NATIVE) and not (isinstance(owner, type) and is_standard_class(owner))


def is_standard_class(kind: type) -> bool:
    """Whether a class is of Python itself."""
    return str(kind.__module__).partition(".")[0] in STANDARD


def is_foreign_object(value: Any) -> bool:
    """Whether an object belongs to something else, which may know every request."""
    if isinstance(value, type | ModuleType | FrameType | int | float | None):
        return True
    module = getattr(type(value), "__module__", "")
    return isinstance(module, str) and module.startswith(ALIENS)


def list_thread_values() -> Iterator[Any]:
    """What the other threads have in hand, without the engine's and the agent's own."""
    for number, frame in list(sys._current_frames().items()):
        calls, at = list[FrameType](), frame
        while at is not None:
            calls.append(at)
            at = at.f_back  # type: ignore[assignment]
        files = [call.f_code.co_filename for call in calls]
        ours = any(here in file for file in files for here in HERE)
        if number != threading.main_thread().ident and not ours:
            for call, file in zip(calls, files, strict=True):
                if LOOP not in file:
                    yield from list(call.f_locals.values())
