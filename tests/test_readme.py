from __future__ import annotations

from pathlib import Path

import pytest

from vllmops.app import COMMANDS

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"`vllmops {name}" in README
