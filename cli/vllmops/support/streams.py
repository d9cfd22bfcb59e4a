"""The standard streams: open, wide enough, with clear errors, and printable.

A shell may close any of them, a disk may be full, a reader may go. Python then fails at the write,
at the exit, or in ``print`` of None; here each of these has one meaning:

- standard output that can't be written is an `OutputError`, reported on standard error;
- a reader that has gone is a `ReaderGoneError`, and no failure: nobody reads a report;
- standard error that can't be written is ignored: there is no other place to report it.
"""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT = signal.SIG_DFL
# A narrower terminal breaks the lines itself: a table of columns one letter wide is no table.
# A wider one costs memory for blanks.
MIN_COLUMNS, MAX_COLUMNS = 30, 2000

# What moves the cursor, changes colours, reverses the order of letters, or can't be seen: C0 and C1
# controls but tab and newline, zero-width and bidirectional marks, line separators, lone
# surrogates, tags. Joiners stay: scripts and emoji need them.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class OutputError(OSError):
    """Standard output can't be written."""


class ReaderGoneError(OSError):
    """The reader of standard output has closed it."""


class StdoutFile(io.FileIO):
    """Standard output: its errors have types of their own, distinct from other files' errors."""

    def write(self, data: Buffer) -> int:
        try:
            return write_blocking(super().write, data, self)
        except BrokenPipeError as error:
            raise ReaderGoneError from error  # without its number: Typer would end with code 1
        except OSError as error:
            raise OutputError(*error.args) from error


class StderrFile(io.FileIO):
    """Standard error: what it can't write is lost, without an error."""

    def write(self, data: Buffer) -> int:
        try:
            return write_blocking(super().write, data, self)
        except OSError:
            return memoryview(data).nbytes


def write_blocking(write: Callable[[Buffer], int | None], data: Buffer, file: io.FileIO) -> int:
    """Write; where another process made the file non-blocking, wait until it takes more."""
    while (count := write(data)) is None:
        select.select((), (file,), ())
    return count


def prepare_streams() -> None:
    """Open what is closed, and put streams in place that fail as this module says."""
    # A file opened later would get the number of a closed stream, and be taken for it. Standard
    # output is opened for reading: to write to it stays the error that it was.
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    KEPT.extend((sys.stdout, sys.stderr))
    sys.stdout = make_text_stream(StdoutFile(1, "w", closefd=False), sys.stdout)
    sys.stderr = make_text_stream(
        StderrFile(2, "w", closefd=False), sys.stderr, line_buffering=True
    )
    normalize_terminal_size()


KEPT: list[TextIO | None] = []  # a stream that nobody holds closes its file


def make_text_stream(
    raw: io.FileIO, previous_stream: TextIO | None, *, line_buffering: bool = False
) -> io.TextIOWrapper:
    """A text stream like the one before; what its encoding lacks is escaped, never an error."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=previous_stream.encoding if previous_stream else None,
        errors="backslashreplace",
        line_buffering=line_buffering or raw.isatty(),
    )


def normalize_terminal_size() -> None:
    """Make ``COLUMNS`` and ``LINES`` valid or absent: Rich, Typer and shutil read them."""
    for name, least in (("COLUMNS", MIN_COLUMNS), ("LINES", 1)):
        text = os.environ.get(name, "")
        if not re.fullmatch(r"0*[1-9][0-9]{0,9}", text, re.ASCII):
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(min(max(int(text), least), MAX_COLUMNS))
    if "COLUMNS" not in os.environ:
        for number in (1, 2):
            with suppress(OSError):
                width = os.get_terminal_size(number).columns
                if 0 < width < MIN_COLUMNS or width > MAX_COLUMNS:
                    os.environ["COLUMNS"] = str(min(max(width, MIN_COLUMNS), MAX_COLUMNS))


def close_output() -> OutputError | None:
    """Flush at the end; returns the error if that fails, else None."""
    failure = None
    try:
        sys.stdout.flush()
    except OutputError as error:
        failure = error
    except ReaderGoneError:
        pass
    else:
        return None
    with suppress(OSError):  # else Python would flush again at exit, and print an error of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout.flush()
    return failure


def set_interrupt_handler(handler: Callable[..., object] | signal.Handlers) -> None:
    """Change what Ctrl-C does, except if this process was started to ignore it, as nohup does."""
    with suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, handler)


def make_stop_event(*numbers: int) -> threading.Event:
    """An event that these signals set.

    A thread sets it. A handler runs in the midst of what the main thread does: if that is
    `wait_for_signal`, or the handler of an earlier signal, `set` waits for ever for the lock that
    these hold.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)

    def wait_for_signal() -> None:
        os.read(reader, 1)
        stop.set()

    threading.Thread(target=wait_for_signal, daemon=True).start()
    return stop


def make_printable(text: str, *, lines: bool = True) -> str:
    """Foreign text with each character that a terminal would obey replaced by a visible one.

    Args:
        text: from another process, a server or a file.
        lines: whether its newlines and tabs stay; not in a text that has to be one line.
    """
    if text.isprintable():
        return text
    text = UNSAFE.sub(make_visible, text)
    return text if lines else text.replace("\n", "␊").replace("\t", "␉")


def make_visible(match: re.Match[str]) -> str:
    """The visible form of a character, one column wide: layout must not change."""
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def clean_log_text(text: str) -> str:
    """A log without its colours; a carriage return, as progress bars have it, begins a line."""
    if text.isprintable():
        return text
    return make_printable(COLOUR.sub("", text).rstrip("\r").replace("\r", "\n"))


def escape_json(text: str, encoding: str | None) -> str:
    """JSON with every unsafe character escaped, and all that an encoding may lack."""
    if text.isascii():
        return text.replace("\x7f", "\\u007f")
    if encoding is None or not encoding.lower().replace("-", "").startswith("utf"):
        return re.sub(r"[^\x00-\x7e]", escape_match, text)
    return UNSAFE.sub(escape_match, text)


def escape_match(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
