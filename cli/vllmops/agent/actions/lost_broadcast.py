"""A thread that waits for a notification while its message is in shared memory (vLLM #45224).

The notification may be dropped. The queue's own way to end a wait, which it has for its shutdown,
makes the thread look again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ...model.healing import HealProof
from ..patches import broadcast_recheck
from ..patches.broadcast_recheck import WOKEN, wrap_with_recheck

MODULE = broadcast_recheck.PATCH.modules[0]


def find_stuck_queues() -> Iterator[Any]:
    """The queues of this process whose reader waits for a notification, with a message there."""
    module = sys.modules.get(MODULE)
    if module is None or not hasattr(module, "SpinCondition"):
        return
    for frame in list(sys._current_frames().values()):
        at, idle = frame, False
        while at is not None:
            idle |= at.f_code.co_name == "poll"
            if at.f_code.co_name == "acquire_read" and idle:
                queue = at.f_locals.get("self")
                if isinstance(queue, module.MessageQueue) and has_unread_block(queue):
                    yield queue
                break
            at = at.f_back  # type: ignore[assignment]


def has_unread_block(queue: Any) -> bool:
    """Whether the block that a queue reads next is written, and not read by this reader."""
    with queue.buffer.get_metadata(queue.current_idx) as block:
        return bool(block[0]) and not block[queue.local_reader_rank + 1]


def find_stuck_readers() -> list[HealProof]:
    """The readers that miss a message."""
    return [
        HealProof(
            subject=f"reader {queue.local_reader_rank}",
            evidence="a message is in shared memory, and its reader waits for the notification",
            progress_key=f"{id(queue)} {queue.current_idx}",
        )
        for queue in find_stuck_queues()
    ]


def wake_readers(subjects: list[str]) -> dict[str, str]:
    """Wake the readers that still miss a message."""
    for queue in find_stuck_queues():
        if f"reader {queue.local_reader_rank}" in subjects:
            condition = queue._spin_condition
            kind = type(condition)
            if not hasattr(kind.wait, "__wrapped__"):
                # What wakes it has to be taken by its own thread, or each later wait would end
                # at once.
                kind.wait = wrap_with_recheck(kind.wait)
            setattr(condition, WOKEN, True)
            condition.cancel()
    return {}
