"""The list of what the gate leaves out names tests that there are."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from .support.gate import LIVE_ONLY

ROOT = Path(__file__).parent.parent
TEST = re.compile(r"def (test_\w+)")


@pytest.mark.parametrize("pattern", LIVE_ONLY)
def test_each_pattern_names_a_test(pattern: str) -> None:
    files, _, test = pattern.partition("::")
    name = test.partition("[")[0]
    if not test:  # cases of all tests of a folder
        files, name = files.partition("[")[0] + ".py", "*"
    tests = [one for path in ROOT.glob(files) for one in TEST.findall(path.read_text())]
    assert fnmatch.filter(tests, name)
