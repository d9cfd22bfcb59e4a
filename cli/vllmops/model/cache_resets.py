"""Emptying the multimodal caches."""

from __future__ import annotations

import msgspec

from .agent_state import AgentAnswer, Seconds


class ResetRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to an API server's agent.

    Args:
        drain_s: refuse new requests and wait for those in flight for so many seconds at most;
            0 resets at once.
    """

    drain_s: Seconds


class ResetAnswer(AgentAnswer, frozen=True, kw_only=True):
    """The result of a reset.

    Args:
        done: whether the caches were reset; false if requests were still in flight.
        in_flight: requests in flight at that time.
        refused_s: seconds for which new requests were refused.
    """

    done: bool
    in_flight: int
    refused_s: float
