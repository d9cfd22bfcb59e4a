"""Runs something short on the engine's own thread, between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 2.0


def between_steps(core: Any, act: Callable[[], None], timeout_s: float = TIMEOUT_S) -> str:
    """Run `act` before the engine's next step; returns why it did not run or failed, or nothing.

    Args:
        core: vLLM's EngineCore, with pending requests: an idle one takes no step.
        act: short; what it raises does not reach the engine.
        timeout_s: seconds to wait; it does not run later.
    """
    usual, done, turn = core.step_fn, threading.Event(), threading.Lock()
    failed = "the engine takes no step: it is stuck within one, or idle"

    def step() -> Any:
        nonlocal failed
        core.step_fn = usual
        if turn.acquire(blocking=False):  # else the caller has given up
            try:
                act()
                failed = ""
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
            done.set()
        return usual()

    core.step_fn = step
    if not done.wait(timeout_s):
        if turn.acquire(blocking=False):
            if core.step_fn is step:
                core.step_fn = usual
        else:
            done.wait()  # it runs right now
    return failed
