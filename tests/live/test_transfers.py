"""A request waits for KV blocks from elsewhere, and nobody will report that they are there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ..support.extent import long
from ..support.waiting import until
from .conftest import Cli, PlugIn, launch
from .hangs import CONNECTOR, ENVIRONMENT, PLACE, PLUG_IN, WITH_CONNECTOR, Asked, Prone
from .test_hang import in_flight, outcomes

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def server(cli: Cli, plug_in: PlugIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prone]:
    place = tmp_path_factory.mktemp("transfers")
    folders = (plug_in("hangs", PLUG_IN), plug_in("losing", CONNECTOR))
    paths = ":".join((*map(str, folders), cli.environment["PYTHONPATH"]))
    environment = {**ENVIRONMENT, PLACE: str(place), "PYTHONPATH": paths}
    launched = launch(cli, place / "log", environment, *WITH_CONNECTOR)
    try:
        launched.wait_up()
        yield Prone(cli, str(launched.process.pid), launched, place)
    finally:
        launched.stop()


@long
def test_a_load_that_nobody_will_report_is_failed(server: Prone) -> None:
    (server.place / "load").touch()
    free = socket.create_server((HOST, 0))  # nobody listens once it is closed
    port = free.getsockname()[1]
    prompt = "z" * 200

    def asks(number: int, **load: Any) -> Asked:
        return server.ask(text=f"{number} {prompt}", kv_transfer_params=load)

    try:
        healthy, lost = asks(1, load="load"), asks(2, load="lost")
        asked = asks(3, load="load", remote_host=HOST, remote_port=port)
        until(lambda: [row["state"] for row in in_flight(server)] == 3 * ["waiting for KV"])
        assert outcomes(server, "--dry-run") == (0, [])  # they have just come
        name = in_flight(server)[0]["id"]
        shown = [
            server.cli("requests", "show", name, *words, "-t", server.name, "--json").out
            for words in ([], ["--reveal"])
        ]
        assert [prompt in out for out in shown] == [False, True]
        until(lambda: outcomes(server, "--dry-run") == (1, [("transfers", False)]), 40)
        assert server.ask().answer(30) == 200
        assert lost.answer(0.1) is None
        for words in (("requests", "list"), ("doctor",)):
            found = server.cli(*words, "-t", server.name, "--json").data["findings"]
            assert [one["code"] for one in found].count("request.lost-load") == 1
        free.close()
        assert outcomes(server) == (0, 2 * [("transfers", True)])
        # By the policy "recompute", and because its sender is gone.
        assert (lost.answer(30), asked.answer(30), healthy.answer(0.1)) == (200, 410, None)
        assert outcomes(server) == (0, [])
    finally:
        free.close()
        (server.place / "load").unlink()
    assert healthy.answer(30) == 200
    until(lambda: in_flight(server) == [])


@long
def test_a_request_that_needs_what_others_hold_that_wait_is_ended(server: Prone) -> None:
    """The KV cache has 10 blocks of 128 tokens. One needs 9, and the other 8, most of them loaded.

    So each would fit, and not the rest of the first one beside what the other has loaded.
    """
    asked = list[Asked]()
    (server.place / "load").touch()
    try:
        for letter, length, tokens in (("y", 1100, 256), ("x", 960, 896)):
            load = {"load": "load", "tokens": tokens}
            asked.append(server.ask(text=letter * length, kv_transfer_params=load))
            waiting = ["waiting for KV"] * len(asked)
            until(lambda: [row["state"] for row in in_flight(server)] == waiting)  # noqa: B023
        assert outcomes(server, "--dry-run", "--only", "admission") == (0, [])
    finally:
        (server.place / "load").unlink()
    until(lambda: outcomes(server, "--dry-run") == (1, [("admission", False)]), 40)
    assert [one.answer(0.1) for one in asked] == [None, None]
    assert outcomes(server) == (0, [("admission", True)])
    assert [one.answer(30) for one in asked] == [410, 200]
    until(lambda: in_flight(server) == [])
