"""Holds the keys of a process that serves HTTP, and follows their file.

Serving asks for `ring` and nothing else: it reads an attribute. A thread of its own looks at the
file and replaces the ring whole; a file that is broken, lax or gone changes nothing but what is
told of it.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from ..errors import VllmopsError
from ..forever import Trouble, thread
from ..keys import file
from ..keys.ring import CARRIER_TTL_S, Ring, kids
from ..protocol.keys import ProcessKeys
from . import found
from .identity import role
from .log import log

LOOK_S = 1.0
# As vLLM names the processes that serve HTTP, when there are several.
API_SERVER = "apiserver"


class Holder:
    """The keys of one process, as they were when their source was last in order.

    Args:
        source: where they come from.
    """

    def __init__(self, source: file.Source) -> None:
        self.source = source
        self.ring: Ring | None = None
        self.loaded_at: float | None = None
        self.problem = ""
        self.wanted = False
        self.seen: tuple[int, ...] | None = None
        self.looking = threading.Lock()

    def follow(self) -> None:
        """Look at the file for ever."""
        trouble = Trouble("the keyring is not followed: changes of it are not seen", log.error)
        thread("vllmops-keys", self.look, trouble, pause_s=LOOK_S)

    def look(self, *, again: bool = False) -> None:
        """Take what the source says, where it says something new; never raises.

        Args:
            again: read it, new or not.
        """
        with self.looking:
            try:
                mark = self.mark()
                if mark != self.seen or mark is None or again or self.wanted:
                    self.wanted = False
                    self.take(self.source.load())
                self.seen, self.problem = mark, ""
            except Exception as error:
                self.seen = None
                self.complain(error)

    def mark(self) -> tuple[int, ...] | None:
        """What changes when the file does, None where there is none."""
        if self.source.path is None:
            return ()
        try:
            at = self.source.path.stat()
        except FileNotFoundError:
            return None
        return at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns

    def take(self, ring: Ring) -> None:
        if ring != self.ring:
            log.info("vllmops: keys: %s", kids(ring.keys) or "none")
            self.loaded_at = time.time()
        self.ring = ring

    def complain(self, error: Exception) -> None:
        told = f"{type(error).__name__}: {error}"
        if isinstance(error, VllmopsError):
            if error.code == "keys.no-ring" and self.ring is None:
                self.problem = ""  # whoever uses no keys has no file
                return
            told = f"{error.message}; hint: {error.hint}"
        if told != self.problem:
            left = "what was loaded before stays" if self.ring else "no key is held"
            log.warning("vllmops: keys: %s; %s", told, left)
        self.problem = told


_holder: Holder | None = None


def start() -> None:
    """Take this process's keys, if it serves HTTP, and follow them; never raises.

    A key in the environment is taken out of it, so that no child but an API server inherits it.
    """
    global _holder  # noqa: PLW0603
    try:
        source = file.source(os.environ)
        text = os.environ.pop(file.SIGNING_KEY, "")
        if role() != "api" or _holder is not None or source.off:
            return
        if source.path is None:
            hand_down(text)
        elif not (os.environ.get(file.PLACE) or source.path.exists()):
            return  # nobody has spoken of keys
        _holder = Holder(source)
        _holder.look()
        os.register_at_fork(after_in_child=forget)
        if source.path is not None:
            _holder.follow()
            heed_hangups()
    except Exception as error:
        found.report(f"the keys can't be taken care of: {error}")


def ring() -> Ring | None:
    """The keys to seal and to open with right now; None where this process has none."""
    return _holder.ring if _holder else None


def state(*, reload: bool = False) -> ProcessKeys:
    """What ``GET /keys`` answers.

    Args:
        reload: look at the file first, whether it seems to have changed or not.
    """
    if _holder is None:
        return ProcessKeys(pid=os.getpid(), role=role())
    if reload:
        _holder.look(again=True)
    path: Path | None = _holder.source.path
    return ProcessKeys(
        pid=os.getpid(),
        role=role(),
        keyring=None if path is None else str(path),
        source="environment" if path is None else "file",
        keys=tuple(key.told() for key in (_holder.ring.keys if _holder.ring else ())),
        loaded_at=_holder.loaded_at,
        problem=_holder.problem,
    )


def take_in(ring: Ring) -> ProcessKeys:
    """Take a ring into the file that this process follows, for all that follow it; what is held.

    Raises:
        VllmopsError: ``keys.no-file``, or as `file.change`.
    """
    from ..store import settings  # noqa: PLC0415 - its modules are the API server's alone

    path = _holder.source.path if _holder else None
    if path is None:
        raise VllmopsError(
            "keys.no-file",
            "this server has no keyring that could take them",
            f"start it with vllmops serve --keyring FILE, or with {file.PLACE}=FILE",
        )
    overlap_s = max(CARRIER_TTL_S, settings.carriers().ttl_s)
    file.change(path, lambda own: own.led(ring, time.time(), overlap_s), create=True)
    return state(reload=True)


def forget() -> None:
    """In a forked child: its parent's secrets are not its own."""
    global _holder  # noqa: PLW0603
    _holder = None
    if signal.getsignal(signal.SIGHUP) is hangup:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def hand_down(text: str) -> None:
    """Let API servers that this process starts inherit the key, and no other child."""
    start_process, one_at_a_time = BaseProcess.start, threading.RLock()

    @functools.wraps(start_process)
    def start(self: BaseProcess) -> None:
        if not self.name.lower().startswith(API_SERVER):
            start_process(self)
            return
        # One at a time: the first one's end must not take the key from the second. Reentrant, as
        # a forked child of that very thread inherits it held.
        with one_at_a_time:
            os.environ[file.SIGNING_KEY] = text
            try:
                start_process(self)
            finally:
                os.environ.pop(file.SIGNING_KEY, None)

    BaseProcess.start = start  # type: ignore[method-assign]


def heed_hangups() -> None:
    """Look again on SIGHUP, where nobody has another use for it.

    vLLM leaves it as it is, so it ends a process; which is right when a terminal is closed.
    """
    free = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if free and threading.current_thread() is threading.main_thread() and not has_terminal():
        signal.signal(signal.SIGHUP, hangup)


def hangup(_: int, __: FrameType | None) -> None:
    """Have the file read anew, a second from now at most."""
    # Without the lock, which this very thread may hold.
    if _holder is not None:
        _holder.wanted = True


def has_terminal() -> bool:
    """Whether this process has a terminal that may be closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
