"""``vllmops memory record``: record the memory of a server's processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ... import output
from ...diagnose.findings import Severity
from ...errors import Exit, VllmopsError
from ...instances.servers import resolve
from ...memory import plot
from ...memory.record import Recorder, Watch, keep
from ...numbers import MOST
from ...output import Json, Progress, Result, command, size
from ...protocol import files
from ...protocol.memory import MemorySample, RecordingHead
from ..findings import FailOn
from ..options import YEAR_S, Target, count, seconds, to_write
from .result import Plot, Tolerance, result

NICENESS = 10
ROUNDS = 5
INTERVAL_S, DURATION_S = 10.0, 300.0
LEAST_SAMPLES = 20  # by default
REQUESTS, INPUTS = 40, 4
UNKEPT = "this recording is not kept for doctor and bundle"


@command
def record(
    *,
    target: Target = None,
    rounds: Annotated[
        int | None,
        typer.Option(parser=count(), help="Rounds of the load.", show_default=str(ROUNDS)),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            parser=seconds(0.1), help="Seconds between samples.", show_default=f"{INTERVAL_S:g}"
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            parser=seconds(0.1, YEAR_S), help="Seconds in all.", show_default=f"{DURATION_S:g}"
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="images, audio, text, responses, or a command; it gets VLLMOPS_URL, "
            "VLLMOPS_MODEL and VLLMOPS_ROUND.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(parser=count(), help="Of a built-in load, each round.")
    ] = REQUESTS,
    inputs: Annotated[int, typer.Option(parser=count(), help="Images in each request.")] = INPUTS,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=count(0, MOST), help="Of a built-in load's inputs; else new.", show_default=False
        ),
    ] = None,
    tolerance: Tolerance = None,
    save: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            callback=to_write,
            help="Write each sample to this file at once; else the newest recording is kept for "
            "doctor and bundle.",
            show_default=False,
        ),
    ] = None,
    plot_: Plot = None,
    fail_on: FailOn = Severity.ERROR,
    json_: Json = False,
) -> Result:
    """Record the memory of every process, and judge whether it grows.

    By rounds of a load: a sample while idle, then one after each round.
    The first round warms up, the others should add nothing. Or by time:
    a sample every --interval seconds, with the load, if any, running
    over and over. Without options five rounds with a load, five minutes
    without.

    A server's API key is taken from VLLM_API_KEY. On this machine it is sent
    to a process of yours or of root's alone.
    """
    rounds, interval, duration = plan(rounds, interval, duration, load)
    if plot_:
        plot.check(plot_)
    server = resolve(target)
    # Its inputs are new ones unless a seed says otherwise.
    seed = time.time_ns() // 1000 if seed is None else seed
    ready, built_in = None, False
    if load is not None:
        from ...memory import loads  # noqa: PLC0415 - brings httpx, which not every recording needs

        built_in = load in loads.KINDS
        ready = loads.prepare(load, server, requests=requests, inputs=inputs, seed=seed)
    else:
        # On a full machine the server's work goes first.
        os.nice(NICENESS)
    head = RecordingHead(
        server=server.label,
        model=server.model,
        started_at=time.time(),
        rounds=rounds,
        interval_s=interval,
        duration_s=duration,
        load=load or "",
        requests=requests if built_in else None,
        seed=seed if built_in else None,
        tolerance_bytes=tolerance,
    )
    watch = Watch(server)
    journal = files.Journal(save, head) if save else kept(server.label, head)
    with Progress(head.started_at, quiet=json_) as progress:
        # A live line takes more of the machine than recording does.
        progress.plain = progress.plain or rounds is None

        def tell(what: str, sample: MemorySample) -> None:
            used = size(sum(each.rss_bytes or 0 for each in sample.processes))
            progress.update(f"{what}, RSS {used}")

        recorder = Recorder(watch, head, ready, journal, tell)
        trouble = recorder.run()
    if trouble and not save and journal and trouble is journal.trouble:
        output.say(f"{UNKEPT}: {trouble.message}")
        trouble = None
    if not recorder.recording.samples:
        raise trouble or KeyboardInterrupt
    found = result(recorder.recording, tolerance, fail_on, plot_)
    if plot_:
        try:
            plot.draw(recorder.recording, plot_)
        except VllmopsError as error:
            trouble = trouble or error
    if trouble is None:
        return found
    trouble.data = found.data
    if not json_:
        output.show(*found.text())
    raise trouble


def kept(label: str, head: RecordingHead) -> files.Journal | None:
    """Where a recording is kept that nobody asked to save; None where it can't be."""
    try:
        return keep(label, head)
    except VllmopsError as error:
        output.say(f"{UNKEPT}: {error.message}")
        return None


def plan(
    rounds: int | None, interval: float | None, duration: float | None, load: str | None
) -> tuple[int | None, float | None, float | None]:
    """The rounds, or the interval and the duration in seconds, by what was typed.

    Raises:
        VllmopsError: ``usage``.
    """
    if rounds is not None and load is None:
        raise usage("--rounds needs a --load", "--load images, audio, text, responses or a command")
    if rounds is not None and (interval or duration):
        raise usage("--rounds goes with neither --interval nor --duration", "leave one of them out")
    if load is not None and not (interval or duration):
        return rounds or ROUNDS, None, None
    duration = duration or DURATION_S
    interval = interval or min(INTERVAL_S, duration / LEAST_SAMPLES)
    if duration < interval:
        raise usage(
            f"--duration {duration:g} is shorter than --interval {interval:g}",
            f"--interval {duration / LEAST_SAMPLES:g}",
        )
    return None, interval, duration


def usage(message: str, hint: str) -> VllmopsError:
    return VllmopsError("usage", message, hint, exit_code=Exit.USAGE)
