"""A worker that waits for a message's notification waits for ever if that is lost (vLLM #45224)."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from .patch import Patch

RECHECK_MS = 5000  # vLLM's own
# On a condition: that its reader was woken, and the message that did so is still to be taken.
WOKEN = "vllmops_woken"


def has_defect(module: ModuleType) -> bool | None:
    if not hasattr(module, "SpinCondition"):
        return None  # its readers look all the time
    asked: list[int | None] = []

    def poll(timeout: int | None = None) -> list[Any]:
        asked.append(timeout)
        return []

    condition = object.__new__(module.SpinCondition)
    vars(condition).update(
        is_reader=True,
        last_read=float("-inf"),
        busy_loop_s=0,
        poller=SimpleNamespace(poll=poll),
        read_cancel_socket=None,
        local_notify_socket=None,
    )
    forever = module.MessageQueue.ReadTimeoutWithWarnings(timeout=None, should_warn=False)
    condition.wait(timeout_ms=forever.timeout_ms())
    return asked == [None]


def apply_patch(module: ModuleType) -> None:
    module.SpinCondition.wait = wrap_with_recheck(module.SpinCondition.wait)


def wrap_with_recheck(wait: Any) -> Any:
    """A ``wait`` that ends after a while: its caller looks into the shared memory again."""

    @functools.wraps(wait)
    def wait_some(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, RECHECK_MS if timeout_ms is None else min(timeout_ms, RECHECK_MS))
        if WOKEN in vars(self):
            with suppress(Exception):  # it is not there yet: after the next wait
                self.read_cancel_socket.recv(flags=1)  # zmq.NOBLOCK
                delattr(self, WOKEN)

    return wait_some


PATCH = Patch(
    id="broadcast-recheck",
    upstream="https://github.com/vllm-project/vllm/pull/45224",
    title="a worker waits for ever if a message's notification is lost",
    hit="Servers with workers in processes of their own: after a quiet second, a worker waits "
    "for a notification that may be dropped, while the message is in shared memory. In "
    "vLLM up to 0.26.",
    changes="SpinCondition.wait() ends after 5 seconds, and its caller looks into the shared "
    "memory again, as in vLLM 0.27.",
    modules=("vllm.distributed.device_communicators.shm_broadcast",),
    present=has_defect,
    apply=apply_patch,
)
