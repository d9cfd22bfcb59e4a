"""The agent runs without the package that extends it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vllmops.collect.agents.agent_client import open_agent
from vllmops.model.environment import SIGNING_KEY

from ..support.children import Spawn

BROKEN = {
    "it can't be imported": "raise ValueError('no such codec')",
    "it can't be installed": """
from vllmops.agent.extensions import Extension
EXTENSION = Extension(install=lambda: {}["no such codec"])
""",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_agent_runs_and_reports_a_broken_extension(code: str, tmp_path: Path, spawn: Spawn) -> None:
    module = tmp_path / "vllmops_responses/server/extension.py"
    module.parent.mkdir(parents=True)
    module.write_text(code)
    for folder in module.parents[:2]:
        (folder / "__init__.py").touch()
    child = spawn(
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]), **{SIGNING_KEY: "ab" * 32}
    )
    agent = open_agent(child.process)
    (problem,) = (text for text in agent.fetch_hello().problems if "no such codec" in text)
    assert problem.startswith("keys and stored responses are not available: ")
    keys = agent.fetch_keys()
    assert (keys.pid, keys.keyring, keys.keys) == (child.process.pid, None, ())
    if code == BROKEN["it can't be imported"]:  # it would take the key out of the environment
        assert child.run(f"import os; out = {SIGNING_KEY!r} in os.environ") == "False"
