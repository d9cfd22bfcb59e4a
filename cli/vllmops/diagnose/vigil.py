"""Whether a server that is watched has stalled; pure, from one look after the other."""

from __future__ import annotations

import msgspec

from ..protocol.server import Look
from .progress import METRICS_FACTOR, PATIENCE_S, Stall, stalls

INTERVAL_S = 2.0
CHECKS = 5
# To ask a server costs it, and us, some milliseconds.
ASK_S = 15.0


class Step(msgspec.Struct, frozen=True):
    """How to go on.

    Args:
        after_s: seconds until the next look.
        ask: whether to ask the server for its metrics and health then, and to look for compilers.
    """

    after_s: float
    ask: bool


class Vigil:
    """What the looks at a server amount to.

    It has stalled where something has shown no sign for as long as is tolerated, and was seen to
    stand in several looks in a row: so a machine that was suspended has time to come to itself.

    Args:
        interval_s: seconds between looks.
        checks: looks in a row.
        patience_s: how long a server may show no sign while requests are there.
    """

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        checks: int = CHECKS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.interval_s = interval_s
        self.checks = checks
        self.patience_s = patience_s
        self.begin()

    def begin(self) -> None:
        """Forget everything: it is another server, or nobody has looked for a while."""
        self.looks: list[Look] = []
        self.row = 0
        self.asked_s = -ASK_S
        self.dismissed: set[tuple[str, str]] = set()

    def see(self, look: Look) -> list[Stall]:
        """What has stalled by this look, and was not dismissed before."""
        self.looks.append(look)
        if look.metrics or look.health is not None:
            self.asked_s = look.at_s
        kept_s = METRICS_FACTOR * (self.patience_s + ASK_S)
        while look.at_s - self.looks[0].at_s > kept_s:
            del self.looks[0]
        self.dismissed &= {key(each) for each in stalls(self.looks, 0.0)}
        self.row = self.row + 1 if self.standing else 0
        return self.after(self.patience_s) if self.row >= self.checks else []

    def after(self, seconds: float) -> list[Stall]:
        """What has stood for as long, less what was dismissed."""
        return [each for each in stalls(self.looks, seconds) if key(each) not in self.dismissed]

    def dismiss(self, found: list[Stall]) -> None:
        """They are none: leave them be until they change."""
        self.dismissed |= {key(each) for each in found}
        self.row = 0

    @property
    def standing(self) -> bool:
        """Whether something stands, for however short a time."""
        return bool(self.after(min(self.interval_s, self.patience_s)))

    def step(self) -> Step:
        """How to go on; a server that is well is asked nothing."""
        last = self.looks[-1]
        told = [pulse.beat for pulse in last.pulses]
        blind = not any(beat.still_s is not None for beat in told)
        if self.standing or last.health in {0, 503}:
            ask = blind or last.health in {0, 503} or bool(self.after(self.patience_s / 2))
            return Step(self.interval_s, ask)
        if blind:
            return Step(max(self.interval_s, ASK_S), ask=True)
        # An agent of an older vllmops does not tell whether the API server answers.
        asks = not any(beat.loop_s is not None for beat in told)
        due = last.at_s + self.interval_s >= self.asked_s + ASK_S
        return Step(self.interval_s, ask=asks and due)


def key(stall: Stall) -> tuple[str, str]:
    return stall.code, stall.mark
