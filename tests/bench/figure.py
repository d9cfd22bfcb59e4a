"""What a measurement is: a value, its rival's in the same run, and how far it may go."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scipy import stats

TRIMMED = 0.1  # of the pairs, at each end


@dataclass(frozen=True)
class Limit:
    """The most a value may be: ``times`` its rival's, ``plus`` something in the figure's unit."""

    times: float = 1.0
    plus: float = 0.0

    def compute_bound(self, rival: float) -> float:
        return self.times * rival + self.plus


@dataclass(frozen=True)
class Figure:
    """One claim, measured.

    Args:
        name: what was measured.
        unit: of all three values.
        value: the median.
        rival: what it is measured against.
        rival_value: the rival's median, from the same run.
        limit: holds the claim to its rival.
        n: measurements behind each median.
        control: the rival's median measured a second time, as if it were another: what differs
            there is noise. None where noise does not matter, or there was no time.
        interval: where the value lies with 95 % confidence; the claim must hold for all of it. None
            where the limit is far beyond the noise.
    """

    name: str
    unit: str
    value: float
    rival: str
    rival_value: float
    limit: Limit
    n: int
    control: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.rival_value if self.rival_value else None

    @property
    def bound(self) -> float:
        """The limit as a value."""
        return self.limit.compute_bound(self.rival_value)

    @property
    def holds(self) -> bool:
        return (self.interval[1] if self.interval else self.value) <= self.bound

    def row(self) -> dict[str, Any]:
        """For ``--json``."""
        derived = {"ratio": self.ratio, "bound": self.bound, "holds": self.holds}
        return {**vars(self), "limit": vars(self.limit), **derived}


def interleave_measurements(
    rounds: int, targets: Mapping[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Measure every target once a round, by turns forwards and backwards: A B C C B A …

    What changes slowly on the machine then falls on all of them alike.

    Args:
        rounds: how often; even, if drift is to cancel out.
        targets: by name, what to measure.

    Returns:
        Each target's values, one for each round.
    """
    values: dict[str, list[float]] = {name: [] for name in targets}
    for number in range(rounds):
        order = list(targets) if number % 2 == 0 else list(targets)[::-1]
        for name in order:
            values[name].append(targets[name]())
    return values


def ratio(values: Sequence[float], rivals: Sequence[float]) -> tuple[float, float, float]:
    """How many times as large values are as their rivals, measured in pairs.

    Pairs that differ most are left out at both ends alike: in one half of such a pair something
    else ran, be it the machine's or a collection of garbage.

    Returns:
        The geometric mean of what is left, and its 95 % confidence interval by bootstrap; one
        pair alone has none: its ends are the mean.
    """
    logs = [math.log(value / rival) for value, rival in zip(values, rivals, strict=True)]
    middle = partial(stats.trim_mean, proportiontocut=TRIMMED)
    if len(logs) == 1:
        return (math.exp(logs[0]),) * 3
    found = stats.bootstrap((logs,), middle, method="percentile", rng=1).confidence_interval
    return math.exp(middle(logs)), math.exp(found.low), math.exp(found.high)


def make_paired_figure(
    name: str,
    values: Sequence[float],
    rival: str,
    rivals: Sequence[float],
    limit: float,
    *,
    short: bool,
) -> Figure:
    """Seconds that were measured in pairs with a rival's.

    Args:
        name: what was measured.
        values: in seconds.
        rival: its name.
        rivals: its seconds, in the same order.
        limit: in times of the rival; three times that in the short form.
        short: too few for an interval.
    """
    of = statistics.median(rivals)
    middle, low, high = ratio(values, rivals)
    return Figure(
        name,
        "s",
        of * middle,
        rival,
        of,
        Limit(3 * limit if short else limit),
        len(values),
        interval=None if short else (of * low, of * high),
    )


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(item) for name, item in values.items()}
