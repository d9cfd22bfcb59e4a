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

from ..model.targets import access
from ..support.home import create_missing_folders, require_safe_folder, resolve_home

MOST_BYTES = 4 << 20  # of output that is shown


@dataclass(frozen=True)
class VllmopsCommand:
    """A command to run.

    Args:
        does: what it does, for the question whether to run it.
        arguments: its command line, without ``vllmops``.
    """

    does: str
    arguments: tuple[str, ...]

    @property
    def command_line(self) -> str:
        """The command line as a person types it."""
        return shlex.join(("vllmops", *self.arguments))


def make_doctor_command(target: str) -> VllmopsCommand:
    return VllmopsCommand(
        "Show what is wrong, in one to twenty seconds", ("doctor", *make_target_options(target))
    )


def make_heal_command(target: str) -> VllmopsCommand:
    return VllmopsCommand("Heal what is proven to be stuck", ("heal", *make_target_options(target)))


def make_drain_command(target: str) -> VllmopsCommand:
    return VllmopsCommand(
        "Refuse new requests; those in flight finish", ("drain", *make_target_options(target))
    )


def make_resume_command(target: str) -> VllmopsCommand:
    return VllmopsCommand("Take requests again", ("resume", *make_target_options(target)))


def make_bundle_command(target: str) -> VllmopsCommand:
    """Raises VllmopsError ``home.unsafe``, and OSError where the folder can't be made."""
    folder = require_safe_folder(resolve_home() / "bundles")
    create_missing_folders(folder)
    return VllmopsCommand(
        "Write evidence to a file", ("bundle", *make_target_options(target), "-o", f"{folder}/")
    )


def make_abort_command(target: str, request_id: str) -> VllmopsCommand:
    words = ("requests", "abort", *make_target_options(target), "--yes", "--", request_id)
    return VllmopsCommand("End this request; its client gets an error", words)


def make_stacks_command(target: str) -> VllmopsCommand:
    words = ("stacks", "dump", *make_target_options(target), "--json")
    return VllmopsCommand("Show what every thread executes", words)


def make_target_options(target: str) -> tuple[str, ...]:
    """The options that name a server, as this command was given them."""
    may = access.get()
    token = ("--admin-token", str(may.token)) if may and may.token else ()
    return "-t", target, *token


def run_command(arguments: tuple[str, ...], columns: int) -> tuple[int, str]:
    """Run a command to its end, whatever happens to this process meanwhile.

    Args:
        arguments: as of `VllmopsCommand`.
        columns: width of its output.

    Returns:
        Its exit code and its output; of ``--json`` standard output alone.
    """
    as_json = "--json" in arguments
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "vllmops", *arguments],
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


def render_stacks(text: str, pid: int | None) -> Iterator[str]:
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
            yield from render_process_stacks(process)


def render_process_stacks(process: dict[str, Any]) -> Iterator[str]:
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
