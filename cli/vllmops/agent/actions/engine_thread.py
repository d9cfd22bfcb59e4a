"""Runs something short on the engine's own thread, before its next call of a method."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 2.0


def run_between_steps(core: Any, action: Callable[[], None], timeout_s: float = TIMEOUT_S) -> str:
    """Run `action` before the engine's next step; returns why it did not run or failed, or nothing.

    Args:
        core: vLLM's EngineCore, with pending requests: an idle one takes no step.
        action: short; what it raises does not reach the engine.
        timeout_s: seconds to wait; it does not run later.
    """

    def run_action() -> tuple[()]:
        action()
        return ()

    return run_before_call(core, "step_fn", run_action, timeout_s)


def run_before_call(
    owner: Any,
    method: str,
    action: Callable[..., tuple[Any, ...]],
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Run `action` before the next call of a method; returns why it did not run or failed, or "".

    Args:
        owner: an object of the engine's.
        method: that each step calls with positional arguments; else `action` does not run.
        action: short; gets the call's arguments, and returns those to be used. What it raises does
            not reach the engine: the call goes on as it came.
        timeout_s: seconds to wait; it does not run later.
    """
    usual, own = getattr(owner, method), method in vars(owner)
    done, turn = threading.Event(), threading.Lock()
    failed = "the engine takes no step: it is stuck within one, or idle"

    def restore_method() -> None:
        if own:
            setattr(owner, method, usual)
        else:
            vars(owner).pop(method, None)

    def call_once(*given: Any, **named: Any) -> Any:
        nonlocal failed
        restore_method()
        if named:
            failed = f"this vLLM calls {method} in another way"
            done.set()
        elif turn.acquire(blocking=False):  # else the caller has given up
            try:
                given = action(*given)
                failed = ""
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
            done.set()
        return usual(*given, **named)

    setattr(owner, method, call_once)
    if not done.wait(timeout_s):
        if turn.acquire(blocking=False):
            if vars(owner).get(method) is call_once:
                restore_method()
        else:
            done.wait()  # it runs right now
    return failed
