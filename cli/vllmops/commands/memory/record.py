"""``vllmops memory record``: record the memory of a server's processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ...model import snapshot_files
from ...model.findings import Severity
from ...model.memory import MemoryRecordingHead, MemorySample
from ...observe.memory import plot
from ...observe.memory.recorder import MemoryRecorder, MemorySampler, open_recording
from ...servers.discovery import resolve_server
from ...support import output
from ...support.errors import VllmopsError, make_usage_error
from ...support.numbers import MOST
from ...support.output import Json, Progress, Result, format_bytes
from ..findings_view import FailOn
from ..multi_target import allow_remote_target
from ..options import YEAR_S, Target, make_count_parser, make_seconds_parser, validate_output_path
from .trend_result import Plot, Tolerance, make_recording_result

NICENESS = 10
ROUNDS = 5
INTERVAL_S, DURATION_S = 10.0, 300.0
LEAST_SAMPLES = 20  # without --interval
REQUESTS, INPUTS = 40, 4
LENGTH, LOAD = "Length", "Built-in load"
UNKEPT = "this recording is not kept for doctor and bundle"


@allow_remote_target
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
            parser=make_count_parser(),
            help="Number of rounds of the load.",
            show_default=str(ROUNDS),
            rich_help_panel=LENGTH,
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            parser=make_seconds_parser(0.1),
            help="Seconds between samples.",
            show_default=f"{INTERVAL_S:g}",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            parser=make_seconds_parser(0.1, YEAR_S),
            help="Seconds to record.",
            show_default=f"{DURATION_S:g}",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            parser=make_count_parser(), help="Requests in each round.", rich_help_panel=LOAD
        ),
    ] = REQUESTS,
    inputs: Annotated[
        int,
        typer.Option(
            parser=make_count_parser(), help="Images in each request.", rich_help_panel=LOAD
        ),
    ] = INPUTS,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=make_count_parser(0, MOST),
            help="Seed of the inputs; by default a new one.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    tolerance: Tolerance = None,
    save: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            callback=validate_output_path,
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
    rounds, interval, duration = choose_schedule(rounds, interval, duration, load)
    if plot_:
        plot.require_writable_plot(plot_)
    server = resolve_server(target)
    # Without --seed, each recording has new inputs: none may be in a cache already.
    seed = time.time_ns() // 1000 if seed is None else seed
    prepared, built_in = None, False
    if load is not None:
        from ...observe.memory import load_generators  # noqa: PLC0415 - imports httpx, which only a load needs

        built_in = load in load_generators.KINDS
        prepared = load_generators.build_load(
            load, server, requests=requests, inputs=inputs, seed=seed
        )
    else:
        # The server's work goes first.
        os.nice(NICENESS)
    head = MemoryRecordingHead(
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
    watch = MemorySampler(server)
    journal = (
        snapshot_files.Journal(save, head) if save else open_default_journal(server.label, head)
    )
    with Progress(head.started_at, quiet=json_) as progress:
        # A live progress line costs more than the recording.
        progress.plain = progress.plain or rounds is None

        def show_sample(progress_text: str, sample: MemorySample) -> None:
            used = format_bytes(sum(process.rss_bytes or 0 for process in sample.processes))
            progress.update(f"{progress_text}, RSS {used}")

        recorder = MemoryRecorder(watch, head, prepared, journal, show_sample)
        failure = recorder.run()
    if failure and not save and journal and failure is journal.failure:
        output.print_to_stderr(f"{UNKEPT}: {failure.message}")
        failure = None
    if not recorder.recording.samples:
        raise failure or KeyboardInterrupt
    shown = make_recording_result(recorder.recording, tolerance, fail_on, plot_)
    if plot_:
        try:
            plot.draw_plot(recorder.recording, plot_)
        except VllmopsError as error:
            failure = failure or error
    if failure is None:
        return shown
    failure.data = shown.data
    if not json_:
        output.print_parts(*shown.text())
    raise failure


def open_default_journal(label: str, head: MemoryRecordingHead) -> snapshot_files.Journal | None:
    """The file of a recording without --save; None if it can't be written."""
    try:
        return open_recording(label, head)
    except VllmopsError as error:
        output.print_to_stderr(f"{UNKEPT}: {error.message}")
        return None


def choose_schedule(
    rounds: int | None, interval: float | None, duration: float | None, load: str | None
) -> tuple[int | None, float | None, float | None]:
    """The rounds, or the interval and the duration in seconds, from the options.

    Raises:
        VllmopsError: ``usage``.
    """
    if rounds is not None and load is None:
        raise make_usage_error(
            "--rounds needs a --load", "--load images, audio, text, responses or a command"
        )
    if rounds is not None and (interval or duration):
        raise make_usage_error(
            "--rounds cannot be combined with --interval or --duration",
            "leave one of these options out",
        )
    if load is not None and not (interval or duration):
        return rounds or ROUNDS, None, None
    duration = duration or DURATION_S
    interval = interval or min(INTERVAL_S, duration / LEAST_SAMPLES)
    if duration < interval:
        raise make_usage_error(
            f"--duration {duration:g} is shorter than --interval {interval:g}",
            f"--interval {duration / LEAST_SAMPLES:g}",
        )
    return None, interval, duration
