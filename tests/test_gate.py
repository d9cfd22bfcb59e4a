"""The list of what the gate leaves out names tests that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support.gate import LIVE_ONLY

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("pattern", LIVE_ONLY)
def test_each_pattern_names_a_test(pattern: str) -> None:
    files, _, test = pattern.partition("::")
    name = test.partition("[")[0].rstrip("*")
    if not test:  # cases of all tests of a folder
        files = files.partition("[")[0] + ".py"
    assert any(f"def {name}" in path.read_text() for path in ROOT.glob(files))
