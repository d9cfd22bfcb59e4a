"""Both sides of a server's caches while it works, read twice."""

from __future__ import annotations

import msgspec

from .agent_state import AgentAnswer, Seconds
from .caches import ProcessCaches


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to an API server's agent.

    Args:
        apart_s: least seconds between the two reads.
        timeout_s: seconds for all of it; the engine may not answer.
    """

    apart_s: Seconds
    timeout_s: Seconds


class ComparisonSample(msgspec.Struct, frozen=True, kw_only=True):
    """One read: the front end first, then each engine and its workers at the same step.

    Args:
        front: the API server.
        engines: engines and workers, each engine between two of its steps.
        engine_requests: requests that the front end has handed to the engine and that are not over.
        rendering: HTTP requests in flight that have not been handed over yet.
        problems: who could not be read, in words.
    """

    front: ProcessCaches
    engines: list[ProcessCaches]
    engine_requests: int = msgspec.field(name="handed")
    rendering: int
    problems: list[str] = []


class CacheComparison(AgentAnswer, frozen=True, kw_only=True):
    """Two reads, by one API server.

    Args:
        samples: fewer than two if the engine did not answer in time.
        front_after: the API server again, after the last read; None without one.
        end: and a moment later, without keys: what was half-way through a request in `front_after`
            has counted its queries.
        settled: whether every request that had not reached the engine at the first read had done
            so at the last, or was over.
        waited_s: seconds between the reads.
    """

    samples: list[ComparisonSample] = msgspec.field(name="looks")
    front_after: ProcessCaches | None = msgspec.field(default=None, name="after")
    end: ProcessCaches | None = None
    settled: bool = False
    waited_s: float = 0.0
