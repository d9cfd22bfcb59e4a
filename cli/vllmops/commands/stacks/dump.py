"""``vllmops stacks dump``: what every thread of a server is executing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ... import output
from ...diagnose.findings import Severity
from ...errors import Exit, VllmopsError, usage
from ...host.roles import Role
from ...numbers import many
from ...output import Folded, Line, Result
from ...protocol.place import headed
from ...protocol.stacks import Options, ProcessStacks, StacksSnapshot, Thread
from ..findings import FailOn
from ..options import Target, count, seconds, to_write
from ..several import per_target

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...host.cudacore import CudaDump
    from ...instances.servers import Server

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


@per_target
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
            callback=to_write,
            help="Write the snapshot to this file as well; an existing file is replaced.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            parser=seconds(0.1), help="Seconds for all processes together.", rich_help_panel=CAPTURE
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
            parser=count(),
            help="Number of dumps.",
            show_default=str(SAMPLES),
            rich_help_panel=EXPLAIN,
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            parser=seconds(),
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
            raise usage(what, hint)
    options = Options(locals=locals_, native=native, nonblocking=nonblocking)
    if core:
        return _of_core(core, options, timeout, save, fail_on, explain=explain_)
    from ...instances.servers import resolve  # noqa: PLC0415 - slow, and not needed to explain
    from ...stacks import pyspy  # noqa: PLC0415 - the same

    server = resolve(target)
    if not server.processes:
        raise VllmopsError(
            "stacks.none",
            f"{server.label} has no process yet",
            f"vllmops wait {server.label} --for ready",
        )
    if explain_:
        from .explanation import live  # noqa: PLC0415 - slow to import, and not needed for a dump

        return live(
            server,
            options,
            timeout_s=timeout,
            samples=samples or SAMPLES,
            interval_s=INTERVAL_S if interval is None else interval,
            save=save,
            fail_on=fail_on,
            quiet=json_,
        )
    processes = many(len(server.processes), "process", "processes")
    slow = threading.Timer(SLOW_S, output.say, [f"reading {processes}, {timeout:g} s at most"])
    slow.daemon = True
    slow.start()
    try:
        snapshot = pyspy.capture(
            server.processes,
            options,
            timeout_s=timeout,
            server=server.name,
        )
    finally:
        slow.cancel()
    failed = any(process.error for process in snapshot.processes)
    _keep(save, snapshot, shown=not json_)
    if not cuda:
        return Result(snapshot, lambda: text(snapshot), Exit.FAILED if failed else Exit.OK)
    return _with_cuda(server, snapshot, timeout, failed=failed, shown=not json_)


def _of_core(
    core: Path,
    options: Options,
    timeout_s: float,
    save: Path | None,
    fail_on: Severity,
    *,
    explain: bool,
) -> Result:
    """What is shown of a core file."""
    from ...stacks.core import capture  # noqa: PLC0415 - rarely needed

    snapshot = capture(core, options, timeout_s=timeout_s)
    _keep(save, snapshot, shown=False)
    if not explain:
        return Result(snapshot, lambda: text(snapshot))
    from .explanation import of_snapshot  # noqa: PLC0415 - slow to import

    return of_snapshot(snapshot, fail_on)


def _keep(save: Path | None, snapshot: StacksSnapshot, *, shown: bool) -> None:
    """Write a snapshot to ``--save``; if that fails, a live one is ``shown``.

    Raises:
        VllmopsError: ``file.not-written``.
    """
    if not save:
        return
    from ...protocol import files  # noqa: PLC0415

    try:
        files.save(save, snapshot)
    except VllmopsError as error:
        # These stacks can't be taken again, so they are shown in any case.
        error.data = snapshot
        if shown:
            output.show(*text(snapshot))
        raise
    output.say(f"saved to {save}" + (INCLUDED if snapshot.options.locals else ""))


def _with_cuda(
    server: Server, snapshot: StacksSnapshot, timeout_s: float, *, failed: bool, shown: bool
) -> Result:
    """The stacks, and the core dumps of the GPUs.

    Raises:
        VllmopsError: as `cudacore.capture` does; the stacks are its data.
    """
    from ...host import cudacore  # noqa: PLC0415 - rarely needed

    try:
        if server.fleet:
            raise VllmopsError(
                "cuda.remote",
                "--cuda works on the machine of the server",
                "vllmops stacks dump --cuda there",
            )
        dumps = cudacore.capture(server.processes, timeout_s=timeout_s)
    except VllmopsError as error:
        error.data = snapshot
        if shown:
            output.show(*text(snapshot))
        raise
    failed = failed or any(dump.error for dump in dumps)
    return Result(
        {**msgspec.structs.asdict(snapshot), "cuda": dumps},
        lambda: [*text(snapshot), Folded(tuple(_cuda_lines(dumps)))],
        Exit.FAILED if failed else Exit.OK,
    )


def _cuda_lines(dumps: Sequence[CudaDump]) -> Iterator[Line]:
    yield Line(0, "")
    yield Line(0, "GPU core dumps", "bold")
    for dump in dumps:
        what = f"{dump.role} {dump.pid}"
        if dump.error:
            yield Line(2, f"{what}: {dump.error.message}", "bold red")
            continue
        yield Line(2, f"{what}: {dump.file}, {dump.bytes:,} bytes, {dump.seconds:.1f} s")
        yield Line(2, f"next: cuda-gdb -batch -ex 'target cudacore {dump.file}'")


def text(snapshot: StacksSnapshot) -> Sequence[RenderableType]:
    """A snapshot for a person."""
    return [Folded(tuple(_lines(snapshot)))]


def _lines(snapshot: StacksSnapshot) -> Iterator[Line]:
    for index, process in enumerate(snapshot.processes):
        if index:
            yield Line(0, "")
        yield Line(0, f"{_title(process)} pid {process.pid}", "bold")
        if process.note:
            yield Line(2, f"note: {process.note}", "yellow")
        if process.error:
            yield Line(2, f"error: {process.error.message}", "bold red")
            if process.error.hint:
                yield Line(2, f"hint: {process.error.hint}")
        # Many threads of a pool wait at the same place; they are shown once.
        alike: dict[Thread, list[str]] = {}
        for thread in process.threads:
            key = Thread("", thread.state, thread.owns_gil, None, thread.frames)
            alike.setdefault(key, []).append(thread.name)
        for thread, names in alike.items():
            yield from _thread(thread, names)


def _title(process: ProcessStacks) -> str:
    return headed(process.title, ROLES.get(process.role, process.role), process)


def _thread(thread: Thread, names: Sequence[str]) -> Iterator[Line]:
    state = f"{thread.state}, holds the GIL" if thread.owns_gil else thread.state
    alike = f", {len(names)} threads alike" if len(names) > 1 else ""
    yield Line(
        2, f"{', '.join(names)}: {state}{alike}", "green" if thread.state == "active" else ""
    )
    style = "" if thread.state == "active" else "dim"
    for frame in thread.frames:
        place = frame.short_file + (f":{frame.line}" if frame.line else "")
        yield Line(4, f"{frame.function} ({place})", style)
        for local in frame.locals or ():
            yield Line(8, f"{local.name} = {'?' if local.value is None else local.value}", style)
    if not thread.frames:
        yield Line(4, "no Python frames", style)
