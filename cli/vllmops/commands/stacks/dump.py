"""``vllmops stacks dump``: what every thread of a server is executing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...model.findings import Severity
from ...model.ranks import choose_process_title
from ...model.roles import Role
from ...model.stacks import DumpOptions, ProcessStacks, StacksSnapshot, ThreadStack
from ...support import output
from ...support.errors import ExitCode, VllmopsError, make_usage_error
from ...support.numbers import format_count
from ...support.output import FoldedLines, IndentedLine, Result
from ..findings_view import FailOn
from ..multi_target import run_per_target
from ..options import Target, make_count_parser, make_seconds_parser, validate_output_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...collect.machine.cuda_core_dumps import CudaDump
    from ...servers.discovery import Server

SLOW_S = 1.0
SAMPLES, INTERVAL_S = 3, 2.0
CAPTURE, EXPLAIN = "Capture", "With --explain"
INCLUDED = ", local variables included"

ROLES: dict[str, str] = {
    Role.LAUNCHER: "Launcher",
    Role.API: "API server",
    Role.ENGINE: "EngineCore",
    Role.WORKER: "Worker",
    Role.COORDINATOR: "DPCoordinator",
    Role.OTHER: "Other process",
}


@run_per_target
def dump(
    *,
    target: Target = None,
    explain_: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show what is stuck, why, and what to do next, instead of stacks."
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            callback=validate_output_path,
            help="Write the snapshot to this file as well; an existing file is replaced.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(0.1),
            help="Seconds for all processes together.",
            rich_help_panel=CAPTURE,
        ),
    ] = 20.0,
    locals_: Annotated[
        bool,
        typer.Option(
            "--locals",
            help="Show local variables; they may include prompts, images and keys.",
            rich_help_panel=CAPTURE,
        ),
    ] = False,
    native: Annotated[
        bool,
        typer.Option(
            "--native",
            help="Show C, C++ and Cython frames too; the processes are stopped longer.",
            rich_help_panel=CAPTURE,
        ),
    ] = False,
    nonblocking: Annotated[
        bool,
        typer.Option(
            "--nonblocking",
            help="Do not stop the processes; frames may be inconsistent.",
            rich_help_panel=CAPTURE,
        ),
    ] = False,
    core: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            help="Read the stacks from this core file of a process, not from a server.",
            rich_help_panel=CAPTURE,
        ),
    ] = None,
    cuda: Annotated[
        bool,
        typer.Option(
            "--cuda",
            help="Dump the GPUs, too, of a server that was started with --cuda-coredump; they stop "
            "for seconds.",
            rich_help_panel=CAPTURE,
        ),
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(
            parser=make_count_parser(),
            help="Number of dumps.",
            show_default=str(SAMPLES),
            rich_help_panel=EXPLAIN,
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            parser=make_seconds_parser(),
            help="Seconds between dumps.",
            rich_help_panel=EXPLAIN,
            show_default=f"{INTERVAL_S:g}",
        ),
    ] = None,
    fail_on: FailOn = Severity.ERROR,
    json_: output.Json = False,
) -> Result:
    """Show what every thread of every process of a server is executing.

    All processes are stopped at the same time, for some milliseconds. A process that can't be
    stopped is read while it runs. For a process that can't be read, the reason and a hint are
    shown, and the exit code is 1. With --explain there are several dumps, and the output says what
    is stuck.
    """
    for wrong, what, hint in (
        (
            native and nonblocking,
            "--native cannot be combined with --nonblocking: it needs the processes stopped",
            "leave one of these options out",
        ),
        (
            (samples is not None or interval is not None) and (core or not explain_),
            "--samples and --interval need --explain, and a server",
            "vllmops stacks dump --explain",
        ),
        (
            core
            and (cuda or nonblocking or target not in {None, os.environ.get("VLLMOPS_TARGET")}),
            "--core reads a file: it cannot be combined with --target, --cuda or --nonblocking",
            "vllmops stacks dump --core FILE",
        ),
        (
            cuda and explain_,
            "--cuda cannot be combined with --explain",
            "vllmops stacks dump --cuda",
        ),
    ):
        if wrong:
            raise make_usage_error(what, hint)
    options = DumpOptions(locals=locals_, native=native, nonblocking=nonblocking)
    if core:
        return _dump_core(core, options, timeout, save, fail_on, explain=explain_)
    from ...collect.stacks import pyspy  # noqa: PLC0415 - the same
    from ...servers.discovery import resolve_server  # noqa: PLC0415 - slow, and not needed to explain

    server = resolve_server(target)
    if not server.processes:
        raise VllmopsError(
            "stacks.none",
            f"{server.label} has no process yet",
            f"vllmops wait {server.label} --for ready",
        )
    if explain_:
        from .explanation_view import explain_server  # noqa: PLC0415 - slow to import, and not needed for a dump

        return explain_server(
            server,
            options,
            timeout_s=timeout,
            samples=samples or SAMPLES,
            interval_s=INTERVAL_S if interval is None else interval,
            save=save,
            fail_on=fail_on,
            quiet=json_,
        )
    processes = format_count(len(server.processes), "process", "processes")
    slow = threading.Timer(
        SLOW_S, output.print_to_stderr, [f"reading {processes}, {timeout:g} s at most"]
    )
    slow.daemon = True
    slow.start()
    try:
        snapshot = pyspy.dump_stacks(
            server.processes,
            options,
            timeout_s=timeout,
            server=server.name,
        )
    finally:
        slow.cancel()
    failed = any(process.error for process in snapshot.processes)
    _save_snapshot(save, snapshot, should_show=not json_)
    if not cuda:
        return Result(
            snapshot, lambda: render_snapshot(snapshot), ExitCode.FAILED if failed else ExitCode.OK
        )
    return _add_cuda_dumps(server, snapshot, timeout, failed=failed, should_show=not json_)


def _dump_core(
    core: Path,
    options: DumpOptions,
    timeout_s: float,
    save: Path | None,
    fail_on: Severity,
    *,
    explain: bool,
) -> Result:
    """What is shown of a core file."""
    from ...collect.stacks.core_files import read_core_stacks  # noqa: PLC0415 - rarely needed

    snapshot = read_core_stacks(core, options, timeout_s=timeout_s)
    _save_snapshot(save, snapshot, should_show=False)
    if not explain:
        return Result(snapshot, lambda: render_snapshot(snapshot))
    from .explanation_view import explain_snapshot  # noqa: PLC0415 - slow to import

    return explain_snapshot(snapshot, fail_on)


def _save_snapshot(save: Path | None, snapshot: StacksSnapshot, *, should_show: bool) -> None:
    """Write a snapshot to ``--save``; if that fails, a live one is ``should_show``.

    Raises:
        VllmopsError: ``file.not-written``.
    """
    if not save:
        return
    from ...model import snapshot_files  # noqa: PLC0415

    try:
        snapshot_files.save_snapshot(save, snapshot)
    except VllmopsError as error:
        # These stacks can't be taken again, so they are shown in any case.
        error.data = snapshot
        if should_show:
            output.print_parts(*render_snapshot(snapshot))
        raise
    output.print_to_stderr(f"saved to {save}" + (INCLUDED if snapshot.options.locals else ""))


def _add_cuda_dumps(
    server: Server, snapshot: StacksSnapshot, timeout_s: float, *, failed: bool, should_show: bool
) -> Result:
    """The stacks, and the core dumps of the GPUs.

    Raises:
        VllmopsError: as `cuda_core_dumps.dump_gpus` does; the stacks are its data.
    """
    from ...collect.machine import cuda_core_dumps  # noqa: PLC0415 - rarely needed

    try:
        if server.fleet:
            raise VllmopsError(
                "cuda.remote",
                "--cuda works on the machine of the server",
                "vllmops stacks dump --cuda there",
            )
        dumps = cuda_core_dumps.dump_gpus(server.processes, timeout_s=timeout_s)
    except VllmopsError as error:
        error.data = snapshot
        if should_show:
            output.print_parts(*render_snapshot(snapshot))
        raise
    failed = failed or any(dump.error for dump in dumps)
    return Result(
        {**msgspec.structs.asdict(snapshot), "cuda": dumps},
        lambda: [*render_snapshot(snapshot), FoldedLines(tuple(_render_cuda_dumps(dumps)))],
        ExitCode.FAILED if failed else ExitCode.OK,
    )


def _render_cuda_dumps(dumps: Sequence[CudaDump]) -> Iterator[IndentedLine]:
    yield IndentedLine(0, "")
    yield IndentedLine(0, "GPU core dumps", "bold")
    for dump in dumps:
        what = f"{dump.role} {dump.pid}"
        if dump.error:
            yield IndentedLine(2, f"{what}: {dump.error.message}", "bold red")
            continue
        yield IndentedLine(2, f"{what}: {dump.file}, {dump.bytes:,} bytes, {dump.seconds:.1f} s")
        yield IndentedLine(2, f"next: cuda-gdb -batch -ex 'target cudacore {dump.file}'")


def render_snapshot(snapshot: StacksSnapshot) -> Sequence[RenderableType]:
    """A snapshot for a person."""
    return [FoldedLines(tuple(_render_processes(snapshot)))]


def _render_processes(snapshot: StacksSnapshot) -> Iterator[IndentedLine]:
    for index, process in enumerate(snapshot.processes):
        if index:
            yield IndentedLine(0, "")
        yield IndentedLine(0, f"{_format_title(process)} pid {process.pid}", "bold")
        if process.note:
            yield IndentedLine(2, f"note: {process.note}", "yellow")
        if process.error:
            yield IndentedLine(2, f"error: {process.error.message}", "bold red")
            if process.error.hint:
                yield IndentedLine(2, f"hint: {process.error.hint}")
        # Many threads of a pool wait at the same place; they are shown once.
        alike: dict[ThreadStack, list[str]] = {}
        for thread in process.threads:
            key = ThreadStack("", thread.state, thread.owns_gil, None, thread.frames)
            alike.setdefault(key, []).append(thread.name)
        for thread, names in alike.items():
            yield from _render_thread(thread, names)


def _format_title(process: ProcessStacks) -> str:
    return choose_process_title(process.title, ROLES.get(process.role, process.role), process)


def _render_thread(thread: ThreadStack, names: Sequence[str]) -> Iterator[IndentedLine]:
    state = f"{thread.state}, holds the GIL" if thread.owns_gil else thread.state
    alike = f", {len(names)} threads alike" if len(names) > 1 else ""
    yield IndentedLine(
        2, f"{', '.join(names)}: {state}{alike}", "green" if thread.state == "active" else ""
    )
    style = "" if thread.state == "active" else "dim"
    for frame in thread.frames:
        place = frame.short_file + (f":{frame.line}" if frame.line else "")
        yield IndentedLine(4, f"{frame.function} ({place})", style)
        for local in frame.locals or ():
            yield IndentedLine(
                8, f"{local.name} = {'?' if local.value is None else local.value}", style
            )
    if not thread.frames:
        yield IndentedLine(4, "no Python frames", style)
