"""The type of a patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Patch:
    """A vLLM defect, its probe and its fix.

    Args:
        id: a stable name, for ``--no-patch``.
        upstream: the pull request or issue of vLLM.
        title: the defect, in one line.
        hit: who is affected, and what they see.
        changes: what the patch changes.
        modules: vLLM's modules that contain the classes, in any version.
        present: whether a module's classes have the defect; None if it has no such class.
            Uses only scratch objects, and takes well under 100 ms.
        apply: fixes it in place; idempotent.
        live: whether it is safe for classes that already have instances in use.
    """

    id: str
    upstream: str
    title: str
    hit: str
    changes: str
    modules: tuple[str, ...]
    present: Callable[[ModuleType], bool | None]
    apply: Callable[[ModuleType], None]
    live: bool = True
