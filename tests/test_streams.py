"""Signals that end a wait, at the worst moment."""

from __future__ import annotations

import os
import signal

from vllmops.support.streams import make_stop_event


def test_a_signal_in_the_midst_of_a_wait_ends_it() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        stop = make_stop_event(signal.SIGUSR1)
        # `wait` has this lock for a moment, and so has `set`: a handler in this thread that calls
        # `set` would hang.
        with stop._cond:  # type: ignore[attr-defined]
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.wait(60)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
