"""Finds vLLM's objects by hooking constructors; holds them by weak references only.

Not by ``gc``: vLLM freezes its heap, and frozen objects are absent from ``gc.get_objects()``.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import gate
from .imports import when_imported
from .log import log

# kind -> {id: weak reference}; not a WeakSet, vLLM's caches are unhashable.
_refs: dict[str, dict[int, weakref.ref[Any]]] = {}
_tell: Callable[[], object] = bool
problems: list[str] = []
# kind -> when its constructor was hooked, seconds since the epoch
hooked: dict[str, float] = {}

HOOKS = {
    # One constructor that every multimodal cache runs through, whatever its kind.
    "mm-cache": ("vllm.multimodal.cache.base", "vllm.multimodal.cache", "BaseMultiModalCache"),
    "scheduler": ("vllm.v1.core.sched.scheduler", "", "Scheduler"),
    "executor": ("vllm.v1.executor.abstract", "", "Executor"),
    "engine-client": ("vllm.v1.engine.async_llm", "", "AsyncLLM"),
    "worker": ("vllm.v1.worker.worker_base", "", "WorkerBase"),
    "request": ("vllm.v1.request", "", "Request"),
    "responses": (
        "vllm.entrypoints.openai.responses.serving",
        "vllm.entrypoints.openai.serving_responses",
        "OpenAIServingResponses",
    ),
}


def install(tell: Callable[[], None]) -> None:
    """Hook the constructors, as soon as their modules are imported; idempotent.

    Args:
        tell: called whenever an object is made that is no request: in a process that was forked,
            the agent comes up then.
    """
    global _tell  # noqa: PLW0603
    _tell = tell
    for kind, (module, older, name) in HOOKS.items():
        when_imported(module, functools.partial(hook, kind, name))
        if older:
            when_imported(older, functools.partial(hook, kind, name))
    when_imported("fastapi.applications", guarded(gate.install))


def every(kind: str) -> list[Any]:
    """The live objects of a kind, in the order in which they were made."""
    # One C call: a constructor on another thread may be adding to it.
    refs = list(_refs.get(kind, {}).values())
    return [found for ref in refs if (found := ref()) is not None]


def latest(kind: str) -> Any | None:
    """The newest live object of a kind, None where there is none."""
    return next(reversed(every(kind)), None)


def count(kind: str) -> int:
    """How many objects of a kind are alive."""
    return len(_refs.get(kind, ()))


def forget() -> None:
    """In a forked child: its parent's objects are not its own."""
    _refs.clear()


def hook(kind: str, name: str, module: ModuleType) -> None:
    """Make a class remember its instances under `kind`; a shape that is not known is reported."""
    guarded(functools.partial(_hook, kind, name))(module)


def _hook(kind: str, name: str, module: ModuleType) -> None:
    if hasattr(module, "__path__"):
        return  # newer vLLM: a package whose module is hooked by its own name
    cls = getattr(module, name)
    if "__init__" in vars(cls) and hasattr(vars(cls)["__init__"], "__vllmops__"):
        return
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        remember(kind, self)
        construct(self, *args, **kwargs)

    init.__vllmops__ = True  # type: ignore[attr-defined]
    cls.__init__ = init
    hooked[kind] = time.time()


def remember(kind: str, instance: Any) -> None:
    """Keep a weak reference; also brings the agent up in a process that was forked."""
    try:
        refs, key = _refs.setdefault(kind, {}), id(instance)
        refs[key] = weakref.ref(instance, lambda _: refs.pop(key, None))
        if kind == "request":
            return  # they are many, and each would try again where the agent can't come up
        _tell()
    except Exception as error:
        report(f"{type(instance).__name__} can't be kept track of: {error!r}")


def guarded(act: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """``act`` that reports what it can't do instead of raising into an import of vLLM's."""

    def safe(module: ModuleType) -> None:
        try:
            act(module)
        except Exception as error:
            report(f"{module.__name__} has a shape that is not known: {error!r}")

    return safe


def report(problem: str) -> None:
    """Say once that something can't be done: in the log, and in every answer."""
    if problem not in problems:
        problems.append(problem)
        log.warning("vllmops: %s", problem)
