"""An event loop that a tool parser's regex blocks: a signal ends the parser (vLLM #18304).

Both Python's ``re`` and ``regex`` hold the GIL, so no thread of this process runs meanwhile. But
both run signal handlers on the main thread every few thousand steps, and what a handler raises
ends them. vLLM takes a TimeoutError there for its own time limit.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import suppress
from types import FrameType

from ...model.parser_frames import is_parser_call
from ..identity import detect_role

# Nobody uses the upper real-time signals; what has a handler already is left alone.
SIGNAL = signal.SIGRTMAX - 9
_installed = False
_met: FrameType | None = None  # itself, as another call's could get its id


class ParserInterruptedError(TimeoutError):
    """An operator ended a parser that blocked the event loop."""


def install_signal_handler() -> None:
    """Handle the signal in an API server; nothing where another thread than the main one asks."""
    global _installed  # noqa: PLW0603
    if detect_role() != "api" or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, interrupt_parser)
        _installed = True


def find_interrupt_signal() -> int:
    """The signal that ends a parser in this process; 0 where none does."""
    return SIGNAL if _installed and signal.getsignal(SIGNAL) is interrupt_parser else 0


def interrupt_parser(_: int, frame: FrameType | None) -> None:
    """End the call of a parser that runs right now, if the last signal met that one, too.

    The call that blocked the loop may be over when a signal comes, and another one may run.
    """
    global _met
    call = None
    while frame is not None:
        if is_parser_call(frame.f_code.co_name, frame.f_code.co_filename):
            call = frame  # the outermost one: it calls others
        frame = frame.f_back
    met, _met = _met, call
    if call is None:
        return
    if call is met:
        forget_call()
        raise ParserInterruptedError("an operator ended this parser: it blocked the server")
    with suppress(RuntimeError):  # no loop runs here
        asyncio.get_running_loop().call_soon_threadsafe(forget_call)


def forget_call() -> None:
    """Let go of a call and its variables; when the event loop runs again, it is over."""
    global _met  # noqa: PLW0603
    _met = None
