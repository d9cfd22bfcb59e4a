"""The catalogue of stack signatures: the types of ``stacks.toml``, and what reads it."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Literal

import msgspec

from ..protocol.stacks import Frame
from .findings import Severity

CACHED = 1 << 14  # frames and patterns: dumps repeat themselves

Confidence = Literal["possible", "likely", "sure"]


class ThreadPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Threads that must be there, or must not.

    Args:
        roles: of the processes to look at.
        frames: in this order from the innermost out, others may lie between. Each is a function,
            bare or as ``Class.function``, or several with ``|``; ``function@end/of/path.py``
            demands the file, too; ``*`` is any. A thread's name counts as its outermost frame.
        without: functions that the thread must not have.
        within: how far from the innermost frame the first one may be, 0 for anywhere.
        state: ``active`` or ``idle``, empty for either.
        who: whether some process must have such a thread, every process, or none.
        frozen: whether such a thread must be at the same frames in all samples.
        gil: whether it must hold the GIL; no dump but py-spy's tells.
    """

    roles: tuple[str, ...]
    frames: tuple[str, ...]
    without: tuple[str, ...] = ()
    within: int = 0
    state: Literal["", "active", "idle"] = ""
    who: Literal["some", "every", "none"] = "some"
    frozen: bool = False
    gil: bool = False


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which a signature shows.

    Args:
        threads: all of them must hold.
        confidence: where enough samples show it.
        samples: how many make enough; with fewer it stays ``possible``, because work looks the
            same.
        lacks: roles that no process may have.
        complete: whether all processes of the server must be known to be there.
        facts: figures that must not contradict, such as ``waiting = ">0"``; a frozen progress
            corroborates.
        needs: facts without which nothing is said.
        corroborate: whether stacks alone are never enough, a fact or a log line must agree.
    """

    threads: tuple[ThreadPattern, ...]
    confidence: Confidence
    samples: int = 1
    lacks: tuple[str, ...] = ()
    complete: bool = False
    facts: dict[str, str] = {}
    needs: tuple[str, ...] = ()
    corroborate: bool = False


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"cases": "case"}):
    """One entry of the catalogue.

    Args:
        id: stable; the finding's code is ``stack.ID``.
        title: what is wrong, in a line.
        severity: of a finding that is at least likely.
        cause: why it comes to this.
        references: where it was reported.
        next: the way out.
        sure: what would make it sure.
        cases: one of them must hold.
        fixed_in: vLLM's version, empty where none is known.
        logs: patterns of log lines that corroborate.
        hides: ids of signatures that say less about the same.
        hang: whether something is stuck.
    """

    id: str
    title: str
    severity: Severity
    cause: str
    references: tuple[str, ...]
    next: str
    sure: str
    cases: tuple[Case, ...]
    fixed_in: str = ""
    logs: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    hang: bool = True

    @property
    def code(self) -> str:
        return f"stack.{self.id}"


class _Catalogue(msgspec.Struct, forbid_unknown_fields=True):
    signature: tuple[Signature, ...]


@functools.cache
def catalogue() -> tuple[Signature, ...]:
    """All signatures, in the order of the file."""
    content = resources.files(__package__).joinpath("stacks.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(content), _Catalogue).signature


@functools.cache
def alternatives(pattern: str) -> tuple[tuple[str, str, str], ...]:
    """The class, the function and the file, as far as they are told, of each alternative."""
    found = []
    for each in pattern.split("|"):
        name, _, file = each.partition("@")
        owner, _, function = name.rpartition(".")
        found.append((owner, function, file))
    return tuple(found)


@functools.cache
def functions(patterns: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    """The bare names of the functions that each pattern names."""
    return tuple(frozenset(name for _, name, _ in alternatives(each)) for each in patterns)


def is_called(frame: Frame, pattern: str) -> bool:
    """Whether a frame is one that a pattern names, in any version's spelling."""
    return pattern == "*" or _is_called(frame.function, frame.short_file, pattern)


@functools.lru_cache(CACHED)
def _is_called(name: str, path: str, pattern: str) -> bool:
    owner, _, function = bare(name).rpartition(".")
    for wanted_owner, wanted, file in alternatives(pattern):
        if function != wanted:
            continue
        if wanted_owner and owner and wanted_owner != owner.rpartition(".")[2]:
            continue
        if not file or _ends(path, file):
            return True
    return False


@functools.lru_cache(CACHED)
def bare(function: str) -> str:
    """A function without a C++ signature: ``void ns::f<a, b>(int)`` is ``f``."""
    if "(" not in function and "::" not in function and " " not in function:
        return function
    depth = 0
    kept: list[str] = []
    for sign in function:
        if sign in "(<" and kept:
            depth += 1
        elif sign in ")>":
            depth -= 1
        elif depth <= 0:
            kept.append(sign)
    words = "".join(kept).split()
    return words[-1].rpartition("::")[2] if words else function


def _ends(path: str, wanted: str) -> bool:
    """Whether a path ends as wanted, as far as it is told: ``…/core.py`` ends as ``a/core.py``."""
    have = [part for part in path.replace("\\", "/").split("/") if part]
    want = wanted.split("/")
    while len(have) < len(want) or (have and have[0].strip(".…") == "" and len(want) > 1):
        if have and have[0].strip(".…") == "":
            have = have[1:]
        want = want[1:]
        if not want or not have:
            return bool(have) and not want
    return have[-len(want) :] == want
