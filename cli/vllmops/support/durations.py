"""Durations and times: their limits, and how a person reads them."""

from __future__ import annotations

import time

from .errors import make_usage_error
from .numbers import CENTURY_S, DAY_S

LAST_S = 253_402_300_799  # the end of the year 9999: what comes later is no time


def validate_seconds(subject: str, seconds: float) -> float:
    """Check a duration that a person gave, and return it.

    Args:
        subject: what the duration is for, in the message.
        seconds: the duration.

    Raises:
        VllmopsError: ``usage``: it is below zero, not a number, or over a century.
    """
    if 0 <= seconds <= CENTURY_S:
        return seconds
    raise make_usage_error(
        f"{subject} is {seconds:g} s, which is not between 0 and a century",
        "give a number of seconds, for example 30",
    )


def format_lifetime(seconds: float) -> str:
    """A duration, for a person."""
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:.0f} days"
    return f"{seconds / 3600:.0f} hours" if seconds >= 2 * 3600 else f"{seconds:.0f} s"


def format_utc_time(epoch: float | None) -> str:
    """A time in UTC, human-readable; a dash if there is none, or if it is outside the calendar."""
    if epoch is None or not 0 <= epoch <= LAST_S:
        return "-"
    return time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(epoch))
