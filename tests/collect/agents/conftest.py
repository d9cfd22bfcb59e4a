"""Questions to agents of real processes."""

from __future__ import annotations

import pytest

from vllmops.collect.agents.agent_client import open_agent

from ...support.waiting import patiently


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents are given time: on a busy machine one that answers may do so late."""
    patiently(monkeypatch, "timeout_s", open_agent)
