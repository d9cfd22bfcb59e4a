"""Processes and modules of many versions of vLLM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vllmops.collect.agents.agent_client import open_agent

from ..support import modules
from ..support.versions import Vllm
from ..support.waiting import patiently


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents are given time: on a busy machine one that answers may do so late."""
    patiently(monkeypatch, "timeout_s", open_agent)


@pytest.fixture
def lru_module(code: Callable[[str], Path]) -> Callable[[str], ModuleType]:
    """A version's ``vllm.utils.cache``."""
    return lambda version: modules.lru_module(code(version))


@pytest.fixture(scope="session")
def process() -> Iterator[Vllm]:
    """One for all tests of a worker: its imports take 6 s of CPU."""
    made = Vllm()
    yield made
    os.killpg(made.popen.pid, signal.SIGKILL)
    made.popen.communicate()


@pytest.fixture
def vllm(code: Callable[[str], Path], process: Vllm) -> Iterator[Callable[[str], Vllm]]:
    """Makes the process one of a version; until the test ends."""

    def load_version(version: str) -> Vllm:
        assert process.run(str(code(version))) == "up"
        return process

    yield load_version
    process.send("\n")
