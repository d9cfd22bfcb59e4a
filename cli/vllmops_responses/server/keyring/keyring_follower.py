"""Holds the keys of a process that serves HTTP, and follows the keyring file.

Serving calls `get_keyring` and nothing else: it reads an attribute. A thread checks the file and
replaces the ring as a whole. While the file is broken, readable by others or missing, the loaded
keys stay and `observe_keys` shows the problem.
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

from vllmops.agent.hooks import vllm_objects
from vllmops.agent.identity import detect_role, make_process_fields
from vllmops.agent.log import log
from vllmops.model.environment import KEYRING, SIGNING_KEY, KeyringSource, find_keyring_source
from vllmops.model.keys import ProcessKeys
from vllmops.support.background import ErrorReporter, start_repeating_thread
from vllmops.support.errors import VllmopsError

from ...keys import keyring_file
from ...keys.keyring import CARRIER_TTL_S, KeyRing, format_kids

CHECK_S = 1.0
# vLLM's name for the processes that serve HTTP, when there are several.
API_SERVER = "apiserver"


class KeyHolder:
    """The keys of one process, as last loaded without an error.

    Args:
        source: where they come from.
    """

    def __init__(self, source: KeyringSource) -> None:
        self.source = source
        self.keyring: KeyRing | None = None
        self.loaded_at: float | None = None
        self.problem = ""
        self.reload = False
        self.last_fingerprint: tuple[int, ...] | None = None
        self.checking = threading.Lock()

    def follow_file(self) -> None:
        """Check the file every `CHECK_S` seconds, from a thread."""
        reporter = ErrorReporter("changes of the keyring are not noticed", log.error)
        start_repeating_thread("vllmops-keys", self.reload_if_changed, reporter, pause_s=CHECK_S)

    def reload_if_changed(self, *, reload: bool = False) -> None:
        """Load the source if it has changed; never raises.

        Args:
            reload: load it also if it has not changed.
        """
        with self.checking:
            try:
                mark = self.read_fingerprint()
                if mark != self.last_fingerprint or mark is None or reload or self.reload:
                    self.reload = False
                    self.replace_keyring(keyring_file.load_keyring_source(self.source))
                self.last_fingerprint, self.problem = mark, ""
            except Exception as error:
                self.last_fingerprint = None
                self.report_error(error)

    def read_fingerprint(self) -> tuple[int, ...] | None:
        """Changes whenever the file does; None if the file is missing."""
        if self.source.path is None:
            return ()
        try:
            at = self.source.path.stat()
        except FileNotFoundError:
            return None
        return at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns

    def replace_keyring(self, keyring: KeyRing) -> None:
        if keyring != self.keyring:
            log.info("vllmops: keys loaded: %s", format_kids(keyring.keys) or "none")
            self.loaded_at = time.time()
        self.keyring = keyring

    def report_error(self, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"
        if isinstance(error, VllmopsError):
            if error.code == "keys.no-ring" and self.keyring is None:
                self.problem = ""  # a server without keys needs no file
                return
            problem = f"{error.message}; hint: {error.hint}"
        if problem != self.problem:
            effect = "the keys loaded before stay in use" if self.keyring else "no keys are loaded"
            log.warning("vllmops: keys: %s; %s", problem, effect)
        self.problem = problem


_holder: KeyHolder | None = None


def start_key_holder() -> None:
    """Load the keys of a process that serves HTTP, and follow their file; never raises.

    A key in the environment is removed from it, so that only API servers inherit it.
    """
    global _holder  # noqa: PLW0603
    try:
        source = find_keyring_source(os.environ)
        text = os.environ.pop(SIGNING_KEY, "")
        if detect_role() != "api" or _holder is not None or source.is_disabled:
            return
        if source.path is None:
            share_key_with_servers(text)
        elif not (os.environ.get(KEYRING) or source.path.exists()):
            return  # no keys are configured
        _holder = KeyHolder(source)
        _holder.reload_if_changed()
        os.register_at_fork(after_in_child=reset_after_fork)
        if source.path is not None:
            _holder.follow_file()
            reload_on_hangup()
    except Exception as error:
        vllm_objects.report_problem(f"the keys can't be loaded: {error}")


def get_keyring() -> KeyRing | None:
    """The keys that seal and open carriers now; None if this process has none."""
    return _holder.keyring if _holder else None


def observe_keys(*, reload: bool = False) -> ProcessKeys:
    """What ``GET /keys`` answers.

    Args:
        reload: load the file first, also if it has not changed.
    """
    if _holder is None:
        return ProcessKeys(pid=os.getpid(), **make_process_fields())
    if reload:
        _holder.reload_if_changed(reload=True)
    path: Path | None = _holder.source.path
    return ProcessKeys(
        pid=os.getpid(),
        **make_process_fields(),
        keyring=None if path is None else str(path),
        source="environment" if path is None else "file",
        keys=tuple(
            key.without_secret() for key in (_holder.keyring.keys if _holder.keyring else ())
        ),
        loaded_at=_holder.loaded_at,
        problem=_holder.problem,
    )


def merge_keyring(keyring: KeyRing) -> ProcessKeys:
    """Merge a ring into the file that this process follows.

    Args:
        keyring: the ring to merge.

    Returns:
        The keys that this process holds afterwards.

    Raises:
        VllmopsError: ``keys.no-file``, or as `keyring_file.change_keyring`.
    """
    path = _holder.source.path if _holder else None
    if path is None:
        raise VllmopsError(
            "keys.no-file",
            "this server has no keyring file to add the keys to",
            f"start it with vllmops serve --keyring FILE, or with {KEYRING}=FILE",
        )
    from ...store.settings import parse_carrier_settings  # noqa: PLC0415 - other processes need no store

    # Old keys open as long as carriers live.
    overlap_s = max(CARRIER_TTL_S, parse_carrier_settings().ttl_s)
    keyring_file.change_keyring(
        path, lambda own: own.adopt_primary(keyring, time.time(), overlap_s), create=True
    )
    return observe_keys(reload=True)


def reset_after_fork() -> None:
    """In a forked child: drop the parent's secrets."""
    global _holder  # noqa: PLW0603
    _holder = None
    if signal.getsignal(signal.SIGHUP) is handle_hangup:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def share_key_with_servers(text: str) -> None:
    """Let the API servers that this process starts inherit the key, and no other child.

    Args:
        text: the key in hex.
    """
    start_process, one_at_a_time = BaseProcess.start, threading.RLock()

    @functools.wraps(start_process)
    def start(self: BaseProcess) -> None:
        if not self.name.lower().startswith(API_SERVER):
            start_process(self)
            return
        # One at a time: when the first start ends, the second must still find the key. Reentrant,
        # because a child that this thread forks inherits the lock while it is held.
        with one_at_a_time:
            os.environ[SIGNING_KEY] = text
            try:
                start_process(self)
            finally:
                os.environ.pop(SIGNING_KEY, None)

    BaseProcess.start = start  # type: ignore[method-assign]


def reload_on_hangup() -> None:
    """Reload the keyring on SIGHUP, where nothing else handles the signal.

    vLLM does not handle it, so it ends the process: right where a terminal may be closed. Below a
    supervisor, or nohup, it is ignored.
    """
    free = signal.getsignal(signal.SIGHUP) in {signal.SIG_DFL, signal.SIG_IGN}
    if free and threading.current_thread() is threading.main_thread() and not has_terminal():
        signal.signal(signal.SIGHUP, handle_hangup)


def handle_hangup(_: int, __: FrameType | None) -> None:
    """Have the file loaded again, at most a second from now."""
    # Without the lock: this thread may hold it already.
    if _holder is not None:
        _holder.reload = True


def has_terminal() -> bool:
    """Whether this process has a terminal that may be closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
