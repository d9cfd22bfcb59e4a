"""``vllmops memory record``: record the memory of a server's processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ... import output
from ...diagnose.findings import Severity
from ...errors import VllmopsError, usage
from ...instances.servers import resolve
from ...memory import plot
from ...memory.record import Recorder, Watch, keep
from ...numbers import MOST
from ...output import Json, Progress, Result, size
from ...protocol import files
from ...protocol.memory import MemorySample, RecordingHead
from ..findings import FailOn
from ..options import YEAR_S, Target, count, seconds, to_write
from ..several import remote
from .result import Plot, Tolerance, result

NICENESS = 10
ROUNDS = 5
INTERVAL_S, DURATION_S = 10.0, 300.0
LEAST_SAMPLES = 20  # without --interval
REQUESTS, INPUTS = 40, 4
LENGTH, LOAD = "Length", "Built-in load"
UNKEPT = "this recording is not kept for doctor and bundle"


@remote
def record(
    *,
    target: Target = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="images, audio, text, responses, or a command of yours, which gets VLLMOPS_URL, "
            "VLLMOPS_MODEL and VLLMOPS_ROUND."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=count(),
            help="Number of rounds of the load.",
            show_default=str(ROUNDS),
            rich_help_panel=LENGTH,
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            parser=seconds(0.1),
            help="Seconds between samples.",
            show_default=f"{INTERVAL_S:g}",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            parser=seconds(0.1, YEAR_S),
            help="Seconds to record.",
            show_default=f"{DURATION_S:g}",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(parser=count(), help="Requests in each round.", rich_help_panel=LOAD)
    ] = REQUESTS,
    inputs: Annotated[
        int, typer.Option(parser=count(), help="Images in each request.", rich_help_panel=LOAD)
    ] = INPUTS,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=count(0, MOST),
            help="Seed of the inputs; by default a new one.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    tolerance: Tolerance = None,
    save: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            callback=to_write,
            help="Write each sample to this file at once. Without it, the newest recording is kept "
            "for doctor and bundle.",
        ),
    ] = None,
    plot_: Plot = None,
    fail_on: FailOn = Severity.ERROR,
    json_: Json = False,
) -> Result:
    """Record the memory of every process, and judge whether it grows.

    By rounds of a load: one sample while the server is idle, then one
    after each round. The first round warms the server up; later rounds
    should add no memory. Or by time: one sample every --interval seconds,
    while the load, if there is one, runs again and again. The default is
    five rounds with a load, and five minutes without one.

    The server's API key is read from VLLM_API_KEY. On this machine it is
    sent only to a process of yours or of root.
    """
    rounds, interval, duration = plan(rounds, interval, duration, load)
    if plot_:
        plot.check(plot_)
    server = resolve(target)
    # Without --seed, each recording has new inputs: none may be in a cache already.
    seed = time.time_ns() // 1000 if seed is None else seed
    prepared, built_in = None, False
    if load is not None:
        from ...memory import loads  # noqa: PLC0415 - imports httpx, which only a load needs

        built_in = load in loads.KINDS
        prepared = loads.prepare(load, server, requests=requests, inputs=inputs, seed=seed)
    else:
        # The server's work goes first.
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
        # A live progress line costs more than the recording.
        progress.plain = progress.plain or rounds is None

        def tell(what: str, sample: MemorySample) -> None:
            used = size(sum(process.rss_bytes or 0 for process in sample.processes))
            progress.update(f"{what}, RSS {used}")

        recorder = Recorder(watch, head, prepared, journal, tell)
        failure = recorder.run()
    if failure and not save and journal and failure is journal.failure:
        output.say(f"{UNKEPT}: {failure.message}")
        failure = None
    if not recorder.recording.samples:
        raise failure or KeyboardInterrupt
    shown = result(recorder.recording, tolerance, fail_on, plot_)
    if plot_:
        try:
            plot.draw(recorder.recording, plot_)
        except VllmopsError as error:
            failure = failure or error
    if failure is None:
        return shown
    failure.data = shown.data
    if not json_:
        output.show(*shown.text())
    raise failure


def kept(label: str, head: RecordingHead) -> files.Journal | None:
    """The file of a recording without --save; None if it can't be written."""
    try:
        return keep(label, head)
    except VllmopsError as error:
        output.say(f"{UNKEPT}: {error.message}")
        return None


def plan(
    rounds: int | None, interval: float | None, duration: float | None, load: str | None
) -> tuple[int | None, float | None, float | None]:
    """The rounds, or the interval and the duration in seconds, from the options.

    Raises:
        VllmopsError: ``usage``.
    """
    if rounds is not None and load is None:
        raise usage("--rounds needs a --load", "--load images, audio, text, responses or a command")
    if rounds is not None and (interval or duration):
        raise usage(
            "--rounds cannot be combined with --interval or --duration",
            "leave one of these options out",
        )
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
