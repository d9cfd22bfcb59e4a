"""Waiting for what no event tells: a condition is polled until it is true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.1
PATIENCE_S = 60.0  # only a hang takes longer, on any machine


def until(
    condition: Callable[[], T | None],
    timeout_s: float = PATIENCE_S,
    explain: Callable[[], object] = lambda: "",
) -> T:
    """Poll a condition, at first often, until what it returns is true; returns that.

    Args:
        condition: what is polled.
        timeout_s: seconds after which the test fails.
        explain: what the failure says.
    """
    deadline = time.monotonic() + timeout_s
    for pause_s in pauses():
        if result := condition():
            return result
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {explain()}"
        time.sleep(pause_s)
    raise AssertionError


async def until_async(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """As `until`, while the event loop's tasks go on."""
    deadline = time.monotonic() + timeout_s
    for pause_s in pauses():
        if condition():
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(pause_s)


def patiently(patch: pytest.MonkeyPatch, name: str, *functions: Callable[..., Any]) -> None:
    """Have functions wait by default as long as only a hang takes.

    Args:
        patch: undoes it.
        name: of the parameter that is a time limit.
        functions: ours.
    """
    for function in functions:
        defaults = function.__kwdefaults__
        assert defaults is not None
        assert name in defaults
        patch.setitem(defaults, name, PATIENCE_S)


def pauses() -> Iterator[float]:
    """Seconds between looks, longer and longer: a short wait ends soon, a long one costs little."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)
