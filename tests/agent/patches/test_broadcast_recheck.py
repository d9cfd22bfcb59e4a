"""A reader that was woken; the condition is made up, tests/live has vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vllmops.agent.patches.broadcast_recheck import RECHECK_MS, WOKEN, wrap_with_recheck


class Condition:
    """A condition whose reader is woken by a message, which comes after some waits.

    Args:
        messages: what is there when the reader looks for it, each time.
    """

    def __init__(self, messages: Sequence[bool]) -> None:
        self.messages = list(messages)
        self.taken = 0
        self.waited: list[int | None] = []
        self.read_cancel_socket = self

    def wait(self, timeout_ms: int | None = None) -> None:
        self.waited.append(timeout_ms)

    def recv(self, flags: int) -> bytes:
        assert flags
        if not self.messages.pop(0):
            raise BlockingIOError
        self.taken += 1
        return b""


@pytest.mark.parametrize("messages", [[True], [False, True]], ids=["in time", "late"])
def test_wake_up_message_is_consumed_once(messages: list[bool]) -> None:
    """Else it would end every later wait at once."""
    condition: Any = Condition(messages)
    setattr(condition, WOKEN, True)
    wait = wrap_with_recheck(Condition.wait)
    for _ in range(4):
        wait(condition)
    assert (condition.taken, condition.messages) == (1, [])
    assert condition.waited == 4 * [RECHECK_MS]
