"""Finds vLLM's objects by hooking their constructors; keeps only weak references.

``gc`` can't find them: vLLM freezes its heap, and ``gc.get_objects()`` omits frozen objects.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..log import log
from ..versions import features, module_locations
from . import request_gate
from .import_hook import when_imported

# kind -> {id: weak reference}; no WeakSet, because vLLM's caches are unhashable.
_refs: dict[str, dict[int, weakref.ref[Any]]] = {}
_tell: Callable[[], object] = bool
problems: list[str] = []
# kind -> when its constructor was hooked, seconds since the epoch
hooked: dict[str, float] = {}

# Whose instances are remembered.
KINDS = (
    *("mm-cache", "config", "scheduler", "executor", "engine-client", "engine-core", "worker"),
    *("request", "responses"),
)
# Set in the environment once a process of this server has logged what does not fit.
LOGGED = "VLLMOPS_UNFIT_LOGGED"


def hook_constructors(on_new_object: Callable[[], None]) -> None:
    """Hook the constructors, as soon as their modules are imported; idempotent.

    Args:
        on_new_object: called for each new object except requests: in a forked process, this starts
            the agent.
    """
    global _tell  # noqa: PLW0603
    _tell = on_new_object
    for kind in KINDS:
        when_symbol_imported(
            kind, functools.partial(hook_constructor, kind, module_locations.PLACES[kind].name)
        )
    when_imported("fastapi.applications", catch_errors(request_gate.hook_fastapi))


def when_symbol_imported(kind: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` once a module of `module_locations.PLACES` for `kind` is imported.

    Never, where this vLLM has no such module.
    """
    if module := module_locations.find_symbol_module(kind):
        when_imported(module, catch_errors(action))


def report_compatibility() -> None:
    """Report in one line what this vLLM lacks, and that it is newer than what is tested."""
    version = features.find_vllm_version()
    newer = features.describe_untested_version(version)
    off = [
        f"{features.FEATURES[name].title} (no {', '.join(lacks)})"
        for name, lacks in features.find_missing_features().items()
    ]
    if off:
        report_unsupported(f"{newer or f'vLLM {version} has another shape'}; off: {', '.join(off)}")
    elif newer:
        log_once(newer)


def list_objects(kind: str) -> list[Any]:
    """The live objects of a kind, oldest first."""
    # One C call: a constructor on another thread may be adding to it.
    refs = list(_refs.get(kind, {}).values())
    return [instance for ref in refs if (instance := ref()) is not None]


def find_latest(kind: str) -> Any | None:
    """The newest live object of a kind, None if there is none."""
    return next(reversed(list_objects(kind)), None)


def count_objects(kind: str) -> int:
    """How many objects of a kind are alive."""
    return len(_refs.get(kind, ()))


def reset_after_fork() -> None:
    """In a forked child: drop the references to the parent's objects."""
    _refs.clear()


def hook_constructor(kind: str, name: str, module: ModuleType) -> None:
    """Make a class remember its instances under `kind`."""
    cls = getattr(module, name)
    if "__init__" in vars(cls) and hasattr(vars(cls)["__init__"], "__vllmops__"):
        return
    construct = cls.__init__

    @functools.wraps(construct)
    def construct_and_track(self: Any, *args: Any, **kwargs: Any) -> None:
        track_object(kind, self)
        construct(self, *args, **kwargs)

    construct_and_track.__vllmops__ = True  # type: ignore[attr-defined]
    cls.__init__ = construct_and_track
    hooked[kind] = time.time()
    if (instance := find_object_in_construction(construct)) is not None:
        track_object(kind, instance)


def find_object_in_construction(construct: Callable[..., None]) -> Any | None:
    """The object whose constructor has led here: a spawned engine loads plug-ins in its own.

    Args:
        construct: the constructor, as its class had it.

    Returns:
        None without such an object.
    """
    code = getattr(inspect.unwrap(construct), "__code__", None)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame and frame.f_locals[frame.f_code.co_varnames[0]]


def track_object(kind: str, instance: Any) -> None:
    """Keep a weak reference to an object; in a forked process, this also starts the agent."""
    try:
        refs, key = _refs.setdefault(kind, {}), id(instance)
        refs[key] = weakref.ref(instance, lambda _: refs.pop(key, None))
        if kind == "request":
            return  # there are many, and each would try again where the agent can't start
        _tell()
    except Exception as error:
        report_problem(f"{type(instance).__name__} can't be tracked: {error!r}")


def catch_errors(action: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """``action``, but an error is reported and not raised into an import of vLLM's."""

    def call_safely(module: ModuleType) -> None:
        try:
            action(module)
        except Exception as error:
            report_unsupported(f"{module.__name__} has an unknown shape: {error!r}")

    return call_safely


def report_problem(problem: str) -> None:
    """Report a problem once: in the log, and in each answer of the agent."""
    if problem not in problems:
        problems.append(problem)
        log.warning("vllmops: %s", problem)


def report_unsupported(problem: str) -> None:
    """Report what does not fit this vLLM: each in the agent's answers, only one in the log."""
    if problem not in problems:
        problems.append(problem)
        log_once(f"{problem}; hint: vllmops patches list -t {os.getpid()}")


def log_once(remark: str) -> None:
    """Log a remark on this vLLM, unless a process of this server has logged one."""
    if not os.environ.get(LOGGED):
        os.environ[LOGGED] = "1"  # the processes that this one spawns inherit it
        log.warning("vllmops: %s", remark)
