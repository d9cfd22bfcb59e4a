"""What keys of ``vllmops top`` do: each runs another command of vllmops, as a person would."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..home import home, make_missing, own
from ..targets import access

MOST_BYTES = 4 << 20  # of output that is shown


@dataclass(frozen=True)
class Action:
    """A command to run.

    Args:
        does: what it does, for the question whether to run it.
        words: its command line, without ``vllmops``.
    """

    does: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command line as a person types it."""
        return shlex.join(("vllmops", *self.words))


def doctor(target: str) -> Action:
    return Action("Show what is wrong, in one to twenty seconds", ("doctor", *reach(target)))


def heal(target: str) -> Action:
    return Action("Heal what is proven to be stuck", ("heal", *reach(target)))


def drain(target: str) -> Action:
    return Action("Refuse new requests; those in flight finish", ("drain", *reach(target)))


def resume(target: str) -> Action:
    return Action("Take requests again", ("resume", *reach(target)))


def bundle(target: str) -> Action:
    """Raises VllmopsError ``home.unsafe``, and OSError where the folder can't be made."""
    folder = own(home() / "bundles")
    make_missing(folder)
    return Action("Write evidence to a file", ("bundle", *reach(target), "-o", f"{folder}/"))


def abort(target: str, request_id: str) -> Action:
    words = ("requests", "abort", *reach(target), "--yes", "--", request_id)
    return Action("End this request; its client gets an error", words)


def stacks(target: str) -> Action:
    words = ("stacks", "dump", *reach(target), "--json")
    return Action("Show what every thread executes", words)


def reach(target: str) -> tuple[str, ...]:
    """The options that name a server, as this command was given them."""
    may = access.get()
    token = ("--admin-token", str(may.token)) if may and may.token else ()
    return "-t", target, *token


def run(words: tuple[str, ...], columns: int) -> tuple[int, str]:
    """Run a command to its end, whatever happens to this process meanwhile.

    Args:
        words: as of `Action`.
        columns: width of its output.

    Returns:
        Its exit code and its output; of ``--json`` standard output alone.
    """
    as_json = "--json" in words
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "vllmops", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if as_json else subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": str(columns)},
        start_new_session=True,
    )
    assert process.stdout
    with process:
        text = process.stdout.read(MOST_BYTES).decode(errors="replace")
        while process.stdout.read(MOST_BYTES):
            pass
    return process.returncode, text


def frames(text: str, pid: int | None) -> Iterator[str]:
    """The lines of stacks for a person.

    Args:
        text: what ``stacks dump --json`` printed.
        pid: of the process to show; None for all.
    """
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        yield "the stacks could not be read"
        return
    for error in found["errors"]:
        yield f"error: {error['message']}"
        yield f"  hint: {error['hint']}"
    for process in (found["data"] or {}).get("processes", ()):
        if pid is None or process["pid"] == pid:
            yield from lines(process)


def lines(process: dict[str, Any]) -> Iterator[str]:
    """The stacks of one process."""
    yield f"{process['role']} {process.get('ranks') or ''}".rstrip() + f" {process['pid']}"
    if problem := process.get("error"):
        yield f"  {problem['message']}"
        yield f"  hint: {problem['hint']}"
    # The main thread tells most, and few lines fit.
    for thread in sorted(process.get("threads", ()), key=lambda one: one["name"] != "MainThread"):
        gil = ", has the GIL" if thread["owns_gil"] else ""
        yield f"  {thread['name']}: {thread['state']}{gil}"
        for frame in thread["frames"]:
            yield f"    {frame['function']} ({frame['short_file']}:{frame['line']})"
