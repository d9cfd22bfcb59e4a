"""Progress, and the result of many."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ... import output
from ...errors import Exit, VllmopsError
from ...output import Progress, Result

if TYPE_CHECKING:
    from ...vllm_api.responses import Outcome

# How long something goes on before it tells how far it is, and how often then.
QUIET_S, OFTEN_S, SELDOM_S = 1.0, 0.2, 5.0


class Counting:
    """Tells how far something is, once it takes longer than a moment.

    Args:
        progress: where.
        what: is done to them, as in ``deleted``.
        total: how many there are, None where that is not known.
    """

    def __init__(self, progress: Progress, what: str, total: int | None = None) -> None:
        self.progress = progress
        self.what = what
        self.total = total
        self.done = 0
        self.next = time.monotonic() + QUIET_S

    def add(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if now >= self.next:
            self.next = now + (SELDOM_S if self.progress.plain else OFTEN_S)
            self.progress.update(f"{self.far} {self.what}")

    @property
    def far(self) -> str:
        return f"{self.done:,}" + (f" of {self.total:,}" if self.total is not None else "")

    def interrupted(self, data: Any = None) -> VllmopsError:
        """The error of a command that was ended on the way."""
        return VllmopsError(
            "interrupted",
            f"interrupted: {self.far} {self.what}",
            "the same command goes on from here",
            exit_code=Exit.INTERRUPTED,
            data=data,
        )


def ended(result: Result, failure: VllmopsError | None, *, as_json: bool) -> Result:
    """A result, or the failure that goes with it, told after it.

    Raises:
        VllmopsError: the failure.
    """
    if failure is None:
        return result
    failure.data = result.data
    if not as_json:
        output.show(*result.text())
    raise failure


def judged(outcomes: list[Outcome], what: str) -> VllmopsError | None:
    """The failure of what was to be done to several, None where all was done.

    Args:
        outcomes: of each.
        what: was to be done to them, as in ``deleted``.
    """
    bad = [each for each in outcomes if not each.done]
    if not bad:
        return None
    codes, exits = {each.code for each in bad}, {each.exit_code for each in bad}
    if len(outcomes) == 1:
        message = f"{bad[0].id} was not {what}: {bad[0].told}"
    else:
        message = f"{len(bad):,} of {len(outcomes):,} were not {what}"
    return VllmopsError(
        bad[0].code if len(codes) == 1 else "responses.some-failed",
        message,
        "vllmops responses list shows what there is",
        exit_code=Exit(bad[0].exit_code) if len(exits) == 1 else Exit.FAILED,
    )
