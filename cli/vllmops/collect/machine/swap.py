"""Whether the machine swaps, so that everything on it may take long."""

from __future__ import annotations

import time

import psutil

MUCH = 8 << 20  # bytes in a second
SHORT_S = 0.5


class SwapMonitor:
    """How much the machine swaps between two looks."""

    def __init__(self) -> None:
        self.read_at = time.monotonic()
        self.bytes = read_swapped_bytes()
        self.has_swapped_much = False

    def is_swapping(self) -> bool:
        """Whether it has swapped much since the last look."""
        at, total = time.monotonic(), read_swapped_bytes()
        if at - self.read_at >= SHORT_S:
            self.has_swapped_much = (total - self.bytes) / (at - self.read_at) >= MUCH
            self.read_at, self.bytes = at, total
        return self.has_swapped_much


def read_swapped_bytes() -> int:
    """Bytes that the machine has swapped in and out since it was booted."""
    swap = psutil.swap_memory()
    return int(swap.sin + swap.sout)
