"""Which tests a run has: what takes long, and what starts programs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Final

import pytest

# Set by `bootstrap.py test --all`.
EVERYTHING: Final = os.environ.get("VLLMOPS_TEST_ALL") == "1"

long: Final = pytest.mark.long
# For tests that start programs without a fixture of `STARTERS`.
programs: Final = pytest.mark.programs
# Fixtures that start programs, or whose users do.
STARTERS: Final = frozenset(
    {"code", "databases", "lab", "programs", "shared_url", "spawn", "standin", "vllmops"}
)


def sample_cases(cases: Iterable[Any], every: int) -> list[Any]:
    """The first of so many cases each; the others are `long`. For tests of one argument."""
    return [
        pytest.param(case, marks=long if number % every else ())
        for number, case in enumerate(cases)
    ]


def combinations(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations, or half of them: of three axes any two values still meet."""
    numbered = product(*(enumerate(axis) for axis in axes))
    return [
        tuple(value for _, value in item)
        for item in numbered
        if EVERYTHING or sum(number for number, _ in item) % 2 == 0
    ]
