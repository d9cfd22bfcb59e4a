"""Numbers that a person writes, on a command line or in the environment, and counts to read."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
WHOLE = re.compile(r"[+-]?[0-9]{1,18}")

DAY_S = 86_400.0
# For waits: poll(2) and epoll(7) count milliseconds in 31 bits, which are 24 days.
LONGEST_WAIT_S = 14 * DAY_S
CENTURY_S = 36_500 * DAY_S
# For counts and bytes: databases and JSON readers keep so much exactly.
MOST = 1 << 53


def parse_number(text: str, minimum: float, maximum: float) -> float:
    """A number in plain digits, finite, of the right size.

    Raises:
        ValueError: it is not; the text says what is valid.
    """
    if NUMBER.fullmatch(text) and minimum <= (value := float(text)) <= maximum:
        return value
    raise ValueError(f"{text!r} is not a number from {minimum:.10g} to {maximum:.10g}")


def parse_whole_number(text: str, minimum: int, maximum: int = MOST) -> int:
    """As `parse_number`, for a whole number.

    Raises:
        ValueError: it is not; the text says what is valid.
    """
    if WHOLE.fullmatch(text) and minimum <= (value := int(text)) <= maximum:
        return value
    raise ValueError(f"{text!r} is not a whole number from {minimum} to {maximum}")


def format_count(count: int, noun: str, plural: str = "") -> str:
    """A number of things: ``1 request``, ``2,000 requests``.

    Args:
        count: how many.
        noun: the word for one.
        plural: the word for several, if it is not that with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
