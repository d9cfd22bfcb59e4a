"""What a patch is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Patch:
    """One defect of vLLM, how to tell, and how to take it away.

    Args:
        id: a stable word, as ``--no-patch`` takes it.
        upstream: where vLLM's project deals with it.
        title: the defect, in a line.
        hit: who meets it, and what they see.
        changes: what the patch changes.
        modules: names of vLLM's modules that hold the classes, in whatever version.
        present: whether a module's classes have the defect; None where it has no such class.
            Works on scratch objects alone, and in well under 100 ms.
        apply: takes it away, in place; doing it twice is the same as once.
        live: whether it may be applied to classes that already have instances in use.
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
