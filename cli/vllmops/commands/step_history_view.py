"""How ``doctor --history`` shows the recordings of engines' steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..model import ranks
from ..model.server_snapshot import Gap
from ..model.step_recording import Step, StepsRecording
from ..rules import step_history
from ..support.numbers import format_count
from ..support.output import Result, format_duration, make_table, style_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement

BAR = 20  # characters
PAUSES = 5  # the last ones


class Bar:
    """A bar that gets shorter where the terminal is narrow."""

    def __init__(self, share: float) -> None:
        self.share = min(max(share, 0.0), 1.0)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement  # noqa: PLC0415

        return Measurement(min(BAR, options.max_width) // 4, min(BAR, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[str]:
        yield "#" * round(min(BAR, options.max_width) * self.share)


def make_steps_result(
    server: str, recordings: Sequence[StepsRecording], gaps: Sequence[Gap]
) -> Result:
    """The last steps of a server's engines."""
    data = {
        "server": server,
        "columns": Step.__struct_fields__,
        "recordings": [build_recording_data(recording) for recording in recordings],
        "unseen": gaps,
    }
    return Result(data, lambda: list(render_recordings(server, recordings, gaps)))


def build_recording_data(recording: StepsRecording) -> dict[str, Any]:
    """A recording for ``--json``; a step is a list, as ``columns`` names it."""
    return {
        **ranks.make_process_fields(recording),
        "alive": recording.alive,
        "read_at": recording.read_at,
        "end": step_history.describe_recording_end(recording),
        "open": recording.open_step and msgspec.structs.asdict(recording.open_step),
        "pauses": list(step_history.find_pauses(recording)),
        "rows": step_history.group_steps_by_time(recording),
        "steps": msgspec.to_builtins(recording.steps),
    }


def render_recordings(
    server: str, recordings: Sequence[StepsRecording], gaps: Sequence[Gap]
) -> Iterator[RenderableType]:

    if not recordings:
        yield f"{server}: no steps were recorded"
    for number, recording in enumerate(recordings):
        if number:
            yield ""
        yield style_text(
            f"{ranks.format_process(recording)}{'' if recording.alive else ', which has ended'}",
            "bold",
        )
        yield from render_recording(recording)
    for part in gaps:
        yield style_text(f"not seen: {part.part}: {part.reason}", "yellow")
        if part.hint:
            yield f"  hint: {part.hint}"


def render_recording(recording: StepsRecording) -> Iterator[RenderableType]:
    rows = step_history.group_steps_by_time(recording)
    if not rows:
        yield "it has taken no step"
        return
    most = max(row.tokens for row in rows) or 1
    names = ("time", "steps", "longest", "tokens", "running", "waiting", "deferred", "KV")
    shown = make_table(
        *names, f"tokens per {format_duration(rows[0].seconds)}", right_columns=names[1:]
    )
    shown.collapse_padding = True  # 80 columns have room for it all
    for row in rows:
        used = row.kv_cache_usage
        shown.add_row(
            step_history.format_utc_time(row.began_at)[:8],
            f"{row.steps:,}",
            f"{1000 * row.longest_s:,.0f} ms" if row.steps else "-",
            f"{row.tokens:,}",
            *(
                str(count) if row.steps else "-"
                for count in (row.running, row.waiting, row.deferred)
            ),
            "-" if used is None else f"{used:.0%}",
            Bar(row.tokens / most),
        )
    yield shown
    for pause in [*step_history.find_pauses(recording)][-PAUSES:]:
        why = f"with {format_count(pause.pending, 'request')} pending" if pause.pending else "idle"
        yield (
            f"{step_history.format_utc_time(pause.began_at)}: no step for {pause.seconds:.1f} s, "
            f"{why}"
        )
    style = "bold red" if recording.open_step and not recording.alive else "bold"
    yield style_text(step_history.describe_recording_end(recording), style)
    if earlier := step_history.describe_previous_step(recording):
        yield earlier
