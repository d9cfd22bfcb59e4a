"""Progress, and the result of many."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllmops.support import output
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.output import Progress, Result

if TYPE_CHECKING:
    from ...store.response_source import ChangeResult

# Seconds before progress is shown, and between updates on a terminal and in a log.
QUIET_S, OFTEN_S, SELDOM_S = 1.0, 0.2, 5.0


class ProgressCounter:
    """Shows progress of work that takes longer than `QUIET_S`.

    Args:
        progress: shows the line.
        participle: the action, as in ``deleted``.
        total: number of items, None if unknown.
    """

    def __init__(self, progress: Progress, participle: str, total: int | None = None) -> None:
        self.progress = progress
        self.participle = participle
        self.total = total
        self.done = 0
        self.next_update_at = time.monotonic() + QUIET_S

    def add(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if now >= self.next_update_at:
            self.next_update_at = now + (SELDOM_S if self.progress.plain else OFTEN_S)
            self.progress.update(f"{self.progress_text} {self.participle}")

    @property
    def progress_text(self) -> str:
        return f"{self.done:,}" + (f" of {self.total:,}" if self.total is not None else "")

    def make_interrupted_error(self, data: Any = None) -> VllmopsError:
        """The error of an interrupted command."""
        return VllmopsError(
            "interrupted",
            f"interrupted: {self.progress_text} {self.participle}",
            "repeat the command to continue",
            data=data,
        )


def return_or_show_and_raise(
    result: Result, failure: VllmopsError | None, *, as_json: bool
) -> Result:
    """The result; if there is a failure, show the result, then raise the failure.

    Raises:
        VllmopsError: the failure.
    """
    if failure is None:
        return result
    failure.data = result.data
    if not as_json:
        output.print_parts(*result.text())
    raise failure


def summarize_failures(outcomes: list[ChangeResult], participle: str) -> VllmopsError | None:
    """The error that sums up failed outcomes, None if all succeeded.

    Args:
        outcomes: one per response.
        participle: the action, as in ``deleted``.
    """
    bad = [outcome for outcome in outcomes if not outcome.done]
    if not bad:
        return None
    codes, exits = {outcome.code for outcome in bad}, {outcome.exit_code for outcome in bad}
    if len(outcomes) == 1:
        message = f"{bad[0].id} was not {participle}: {bad[0].result}"
    else:
        message = f"{len(bad):,} of {len(outcomes):,} were not {participle}"
    code = bad[0].code if len(codes) == 1 else ""
    return VllmopsError(
        code or "responses.some-failed",
        message,
        "vllmops responses list shows the stored responses",
        exit_code=ExitCode(bad[0].exit_code) if len(exits) == 1 else ExitCode.FAILED,
    )
