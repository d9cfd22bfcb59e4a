"""The catalogue of stack signatures: the types of ``stacks/signatures.toml``, and its reader."""

from __future__ import annotations

import functools
from typing import Literal

import msgspec

from ...model.findings import Severity
from ...model.stacks import Frame
from .. import toml_tables

CACHED = 1 << 16  # frames and patterns: dumps repeat the same frames

Confidence = Literal["possible", "likely", "sure"]


class ThreadPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Threads that must be there, or must not.

    Args:
        roles: of the processes to examine.
        frames: in this order from the innermost outwards; others may lie between. Each is a
            function, bare or as ``Class.function``, or several with ``|``;
            ``function@end/of/path.py`` also demands the file; ``*`` is any function. A thread's
            name counts as its outermost frame.
        excluded_frames: functions that the thread must not have.
        max_depth: the first frame must be among so many innermost ones; 0 for anywhere.
        state: ``active`` or ``idle``; empty for either.
        quantifier: whether some process must have such a thread, every process, or none.
        frozen: whether the thread must be at the same frames in all samples.
        gil: whether the thread must hold the GIL, in what may be a call into C; only py-spy's dumps
            show who holds it.
    """

    roles: tuple[str, ...]
    frames: tuple[str, ...]
    excluded_frames: tuple[str, ...] = msgspec.field(default=(), name="without")
    max_depth: int = msgspec.field(default=0, name="within")
    state: Literal["", "active", "idle"] = ""
    quantifier: Literal["some", "every", "none"] = msgspec.field(default="some", name="who")
    frozen: bool = False
    gil: bool = False


class SignatureCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One form of a signature.

    Args:
        threads: patterns that must all match.
        confidence: if enough samples show it.
        samples: how many are enough; with fewer it is only ``possible``, because work looks the
            same.
        lacks: roles that no process may have.
        complete: whether the dump must hold all processes of the server.
        facts: figures that must not contradict, such as ``waiting = ">0"``; a frozen progress
            corroborates.
        needs: facts that must be known.
        needs_corroboration: whether a fact or a log line must agree, because stacks alone are not
            enough.
    """

    threads: tuple[ThreadPattern, ...]
    confidence: Confidence
    samples: int = 1
    lacks: tuple[str, ...] = ()
    complete: bool = False
    facts: dict[str, str] = {}
    needs: tuple[str, ...] = ()
    needs_corroboration: bool = msgspec.field(default=False, name="corroborate")


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"cases": "case"}):
    """One entry of the catalogue.

    Args:
        id: stable; the finding's code is ``stack.ID``.
        title: what is wrong, in one line.
        severity: of a finding that is at least likely.
        cause: why it happens.
        references: public reports and pull requests.
        next_step: what to do.
        confirmation: what would make it sure.
        cases: one of them must match; without any, only the general way names it.
        fixed_in: version of vLLM; empty if none is known.
        logs: patterns of log lines that corroborate.
        hides: ids of signatures that say less about the same thing.
        hang: whether something is stuck.
        work: what the same stacks mean if nothing is stuck.
    """

    id: str
    title: str
    severity: Severity
    cause: str
    references: tuple[str, ...]
    next_step: str = msgspec.field(name="next")
    confirmation: str = msgspec.field(name="sure")
    cases: tuple[SignatureCase, ...] = ()
    fixed_in: str = ""
    logs: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    hang: bool = True
    work: str = ""

    @property
    def code(self) -> str:
        return f"stack.{self.id}"


class _Catalogue(msgspec.Struct, forbid_unknown_fields=True):
    signature: tuple[Signature, ...]


@functools.cache
def load_signatures() -> tuple[Signature, ...]:
    """All signatures, in the order of the file."""
    return toml_tables.load_table("stacks/signatures.toml", _Catalogue).signature


@functools.cache
def parse_alternatives(pattern: str) -> tuple[tuple[str, str, str], ...]:
    """Class, function and file of each alternative; empty what it does not name."""
    patterns = []
    for alternative in pattern.split("|"):
        name, _, file = alternative.partition("@")
        owner, _, function = name.rpartition(".")
        patterns.append((owner, function, file))
    return tuple(patterns)


@functools.cache
def parse_function_names(patterns: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    """The bare names of the functions that each pattern names."""
    return tuple(
        frozenset(name for _, name, _ in parse_alternatives(pattern)) for pattern in patterns
    )


def matches_frame_pattern(frame: Frame, pattern: str) -> bool:
    """Whether a pattern names a frame, in the spelling of any version."""
    return pattern == "*" or _matches_function(frame.function, frame.short_file, pattern)


@functools.lru_cache(CACHED)
def _matches_function(name: str, path: str, pattern: str) -> bool:
    owner, _, function = strip_cpp_signature(name).rpartition(".")
    for class_, method, file in parse_alternatives(pattern):
        if function != method:
            continue
        if class_ and owner and class_ != owner.rpartition(".")[2]:
            continue
        if not file or _has_path_suffix(path, file):
            return True
    return False


@functools.lru_cache(CACHED)
def strip_cpp_signature(function: str) -> str:
    """A function without a C++ signature: ``void ns::f<a, b>(int)`` is ``f``."""
    if "(" not in function and "::" not in function and " " not in function:
        return function
    depth = 0
    kept: list[str] = []
    for character in function:
        if character in "(<" and kept:
            depth += 1
        elif character in ")>":
            depth -= 1
        elif depth <= 0:
            kept.append(character)
    words = "".join(kept).split()
    return words[-1].rpartition("::")[2] if words else function


@functools.lru_cache(CACHED)
def strip_qualifiers(function: str) -> str:
    """A function's own name, without class and module."""
    return strip_cpp_signature(function).rpartition(".")[2]


def _has_path_suffix(path: str, end: str) -> bool:
    """Whether a path ends so, as far as it is shown: ``…/core.py`` may end with ``a/core.py``."""
    have = [part for part in path.replace("\\", "/").split("/") if part]
    want = end.split("/")
    while len(have) < len(want) or (have and have[0].strip(".…") == "" and len(want) > 1):
        if have and have[0].strip(".…") == "":
            have = have[1:]
        want = want[1:]
        if not want or not have:
            return bool(have) and not want
    return have[-len(want) :] == want
