"""What tests of commands have in common: whoever answers is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllmops.collect.agents import agent_client as agent
from vllmops.collect.http import vllm_client as http

from ..support.waiting import patiently

ASKING = (
    agent.open_agent,
    http.is_healthy,
    http.fetch_health,
    http.fetch_health_status,
    http.fetch_status_code,
    http.fetch_metrics,
)


@pytest.fixture(autouse=True)
def patience() -> Iterator[pytest.MonkeyPatch]:
    """A process that stands still on a busy machine is not taken for a silent one.

    It holds for commands that are forks of this process. Tests in which somebody is silent for
    good `undo` it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patiently(patch, "timeout_s", *ASKING)
        yield patch
