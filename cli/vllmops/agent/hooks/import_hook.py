"""Calls a function on a module as soon as the process imports it.

Importing vLLM's modules only to patch them would cost start-up time and memory in processes that
never use them, and in ``--help``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Act = Callable[[ModuleType], None]


class ImportWatcher:
    """A meta path finder that calls functions after a watched module has run."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Act]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.callbacks:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for act in self.callbacks.pop(name, ()):
                act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher = ImportWatcher()


def when_imported(name: str, action: Act) -> None:
    """Call ``act(module)`` once ``name`` is imported; at once if it already is.

    Args:
        name: the module's full name.
        action: must not raise.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    _watcher.callbacks.setdefault(name, []).append(action)
    if _watcher not in sys.meta_path:
        # vLLM's modules are plain files, which the path finder would have found anyway.
        sys.meta_path.insert(0, _watcher)
