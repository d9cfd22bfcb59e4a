"""Both sides of a server's caches while it works, looked at twice."""

from __future__ import annotations

import msgspec

from .caches import ProcessCaches
from .engine import Answer, Seconds


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server's agent is asked for.

    Args:
        apart_s: seconds between the two looks, at least.
        timeout_s: seconds for all of it; the engine may not answer.
    """

    apart_s: Seconds
    timeout_s: Seconds


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look: the front end first, then each engine and its workers at the same step.

    Args:
        front: the API server.
        engines: engines and workers, each engine between two of its steps.
        handed: requests that the front end has handed to the engine and that are not over.
        rendering: HTTP requests in flight that have not come as far.
        problems: who could not be read, in words.
    """

    front: ProcessCaches
    engines: list[ProcessCaches]
    handed: int
    rendering: int
    problems: list[str] = []


class Comparison(Answer, frozen=True, kw_only=True):
    """Two looks, by one API server.

    Args:
        looks: none or one where the engine did not answer in time.
        after: the API server once more, after the last look; None without one.
        end: and a moment later, without keys: what was half-way through a request in `after` has
            counted its queries.
        settled: whether every request that had not reached the engine at the first look had done
            so at the last, or was over.
        waited_s: seconds between the looks.
    """

    looks: list[Look]
    after: ProcessCaches | None = None
    end: ProcessCaches | None = None
    settled: bool = False
    waited_s: float = 0.0
