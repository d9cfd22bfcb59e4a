"""Every way to hang that can be made on a CPU: it is named, and what can go on does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.extent import EVERYTHING
from .conftest import Cli, PlugIn, Ran, launch
from .hangs import ARGUMENTS, ENVIRONMENT, HANGS, PLACE, PLUG_IN, Hang, Prone, is_real
from .test_hang import old_code

__all__ = ["old_code"]  # a fixture

WATCHED_S = 15.0  # until a stall is sure, a start of the command included
CAPTURED_S = 25.0


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


QUICK = ("--interval", "0.5", "--checks", "2", "--patience", "3", "--for", "60")


def prove(server: Prone, hang: Hang) -> None:
    """While it hangs it is caught, its evidence kept, and named, from the evidence and live."""
    began = time.monotonic()
    target = ("-t", server.name, "--json")
    ran = server.cli("watch", "--once", *QUICK, "-o", str(server.place / hang.name), *target)
    assert ran.code == 1, ran
    stalled = next(each for each in ran.data["events"] if each["event"] == "stalled")
    # What it takes to be sure, and no more than its budget for the evidence.
    assert time.monotonic() - began < 3 + WATCHED_S + CAPTURED_S
    bundle = stalled["bundle"]
    assert codes(server.cli("stacks", "explain", bundle, "--json")) == [hang.code]
    for words in ((bundle, "--json"), target):
        found = codes(server.cli("doctor", *words))
        assert {hang.code, hang.told or hang.code} & set(found), found


def codes(ran: Ran) -> list[str]:
    assert ran.code == 1, ran
    return [each["code"] for each in ran.data["findings"]]


@pytest.mark.parametrize(
    "hang", [hang for hang in HANGS if EVERYTHING or not hang.long], ids=lambda hang: hang.name
)
def test_a_hang_is_named(prone: Prone, hang: Hang) -> None:
    with hang.made(prone) as asked:
        is_real(prone, asked, hang.age_s)
        prove(prone, hang)
    if hang.lives_on:
        assert {each.answer(30) for each in asked if not each.aborted} == {200}
        assert prone.ask().answer(30) == 200
