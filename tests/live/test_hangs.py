"""Every way to hang that can be made on a CPU: it is named, and what can go on does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Cli, PlugIn, launch
from .hangs import ARGUMENTS, ENVIRONMENT, HANGS, PLACE, PLUG_IN, Hang, Prone, is_real
from .test_hang import old_code

__all__ = ["old_code"]  # a fixture


@pytest.fixture(scope="module")
def prone(
    cli: Cli, old_code: Path, plug_in: PlugIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prone]:
    place = tmp_path_factory.mktemp("hangs")
    paths = f"{old_code}:{plug_in('hangs', PLUG_IN)}"
    environment = {**ENVIRONMENT, PLACE: str(place), "PYTHONPATH": paths}
    launched = launch(cli, place / "log", environment, *ARGUMENTS)
    try:
        launched.wait_up()
        yield Prone(cli, str(launched.process.pid), launched, place)
    finally:
        launched.stop()


def prove(server: Prone, hang: Hang) -> None:
    """It is named, while it hangs."""
    words = ("stacks", "dump", "--explain", "--interval", "1", "--json", "-t", server.name)
    ran = server.cli(*words)
    assert ran.code == 1, ran.out
    assert [each["code"] for each in ran.data["findings"]] == [hang.code]


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.name)
def test_a_hang_is_named(prone: Prone, hang: Hang) -> None:
    with hang.made(prone) as asked:
        is_real(prone, asked, hang.age_s)
        prove(prone, hang)
    if hang.lives_on:
        assert {each.answer(30) for each in asked if not each.aborted} == {200}
        assert prone.ask().answer(30) == 200
