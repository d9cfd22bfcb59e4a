"""For tests of commands: whoever answers is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllmops.collect.agents import agent_client
from vllmops.collect.http import vllm_client

from .waiting import patiently

ASKING = (
    agent_client.open_agent,
    vllm_client.is_healthy,
    vllm_client.fetch_health,
    vllm_client.fetch_health_status,
    vllm_client.fetch_status_code,
    vllm_client.fetch_metrics,
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
