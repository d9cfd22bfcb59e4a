"""Background work that no exception ends silently: it is told once, and the work goes on.

The agent uses this inside a production engine: the standard library alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

# After that the same trouble is told again.
AGAIN_S = 3600.0


class Trouble:
    """Tells of exceptions in work that is repeated, each kind once an hour.

    A kind is an exception's type and the line that raised it. Thread-safe.

    Args:
        what: what is hindered, and what that means, such as ``keys are not followed``.
        say: is given the text; what it raises is dropped.

    Attributes:
        last: the last exception, in words, whether it was told or not.
    """

    def __init__(self, what: str, say: Callable[[str], object]) -> None:
        self.what = what
        self.say = say
        self.told: dict[tuple[type[BaseException], str], float] = {}
        self.last = ""

    def tell(self, error: BaseException) -> None:
        """Tell of an exception, unless that was done within the hour; never raises."""
        try:
            kind, now = (type(error), place(error)), time.monotonic()
            self.last = f"{type(error).__name__}: {error}"
            if now - self.told.get(kind, -AGAIN_S) < AGAIN_S:
                return
            self.told[kind] = now
            self.say(f"vllmops: {self.what}: {self.last} ({kind[1]})")
        except Exception:  # noqa: S110 - there is nobody left who could be told
            pass


def place(error: BaseException) -> str:
    """The file and the line that raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""


async def attempt(work: Callable[[], Awaitable[object]], trouble: Trouble) -> bool:
    """Do something, and tell of what it raises; whether it went well.

    A CancelledError counts as trouble where nobody cancels this task: something that the work
    waited for was cancelled.
    """
    try:
        await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        trouble.tell(error)
    except Exception as error:
        trouble.tell(error)
    else:
        return True
    return False


async def forever(
    work: Callable[[], Awaitable[object]],
    trouble: Trouble,
    pause_s: float = 0.0,
    *,
    after_s: float = 1.0,
) -> NoReturn:
    """Do something again and again, until this task is cancelled.

    Args:
        work: one round.
        trouble: is told of what a round raises.
        pause_s: seconds before each round.
        after_s: seconds that it rests at least after a round that has failed.
    """
    went_well = True
    while True:
        await asyncio.sleep(pause_s if went_well else max(pause_s, after_s))
        went_well = await attempt(work, trouble)


def thread(
    name: str,
    work: Callable[[], object],
    trouble: Trouble,
    *,
    wait: Callable[[float], object] = time.sleep,
    pause_s: float = 0.0,
    after_s: float = 1.0,
) -> threading.Thread:
    """Start a daemon thread that does something again and again.

    Args:
        name: of the thread.
        work: one round.
        trouble: is told of what a round raises.
        wait: waits for so many seconds, before each round; the thread ends once that gives True.
        pause_s: seconds before each round.
        after_s: seconds that it rests at least after a round that has failed.
    """

    def run() -> None:
        pause = pause_s
        while not wait(pause):
            try:
                work()
                pause = pause_s
            except Exception as error:
                trouble.tell(error)
                pause = max(pause_s, after_s)

    made = threading.Thread(target=run, name=name, daemon=True)
    made.start()
    return made
