"""A load beside a recording: what ends it ends the recording."""

from __future__ import annotations

import threading
from typing import Any

from vllmops.observe.memory.recorder import BackgroundLoad

from ...support.waiting import until


class Load:
    def run_round(self, number: int, stop: threading.Event) -> None:
        raise RuntimeError("can't start new thread")


def test_a_load_that_ends_by_what_nobody_foresaw_is_no_silence() -> None:
    load: Any = Load()
    background = BackgroundLoad(load)
    assert until(lambda: background.error)
    background.thread.join(60)
    assert background.error
    assert "can't start new thread" in background.error.message
