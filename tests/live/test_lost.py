"""What gets lost between processes: word of a message, and KV blocks that a request waits for."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.extent import long
from ..support.versions import INSTALLED, RUN
from ..support.waiting import until
from .conftest import Cli
from .hangs import (
    FEW_BLOCKS,
    LOSING,
    UNPATCHED,
    Asked,
    Prone,
    lost_notify,
    make_connector_arguments,
    prone,
)
from .test_hang import QUICK, in_flight, outcomes

HOST = "127.0.0.1"
RECOMPUTE, FAIL = "recompute", "fail"
OLD = RUN[0]
ANSWERS = {RECOMPUTE: 200, FAIL: 500}  # to a request whose load has failed
ENDED = {INSTALLED: 410, OLD: 400}  # to one that is ended; the old one has only that for it


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((version, policy), id=f"{version}, {policy}", marks=marks)
        for version, policy, marks in (
            (INSTALLED, RECOMPUTE, ()),
            (INSTALLED, FAIL, long),
            (OLD, RECOMPUTE, long),
            (OLD, FAIL, long),
        )
    ],
)
def server(
    cli: Cli,
    code: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Prone]:
    version, policy = request.param
    # An older vLLM can't run the vision model with today's packages.
    options = (*FEW_BLOCKS, "--served-model-name", "demo-vision", *make_connector_arguments(policy))
    ahead = () if version == INSTALLED else (code(version),)
    place, given = tmp_path_factory.mktemp("lost"), {"VLLMOPS_NO_PATCH": UNPATCHED}
    with prone(cli, place, LOSING, *options, ahead=ahead, demo="text", environment=given) as made:
        made.launched.wait_up()
        yield made


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> tuple[int, int]:
    """To a request whose load has failed, and to one that is ended."""
    version, policy = request.node.callspec.params["server"]
    return ANSWERS[policy], ENDED[version]


def test_a_watch_heals_what_nobody_was_told_of_and_keeps_evidence_first(server: Prone) -> None:
    asked = lost_notify(server)
    words = ("watch", "--once", *QUICK, "--heal", "-o", str(server.place / "kept"))
    ran = server.cli(*words, "-t", server.name, "--json")
    stalled, healed = ran.data["events"]
    assert (stalled["event"], healed["event"]) == ("stalled", "healed")
    assert Path(stalled["bundle"]).is_file()
    assert "broadcast, " in healed["text"]
    assert asked.answer(30) == 200
    assert "vllmops watch --heal by root: broadcast" in server.launched.log.read_text()
    assert outcomes(server) == (0, [])


def test_a_load_that_nobody_will_report_is_failed(server: Prone, answers: tuple[int, int]) -> None:
    (server.place / "load").touch()
    free = socket.create_server((HOST, 0))  # nobody listens once it is closed
    port = free.getsockname()[1]
    prompt = "z" * 200

    def send_kv_load_request(number: int, **load: Any) -> Asked:
        return server.send_chat_request(text=f"{number} {prompt}", kv_transfer_params=load)

    try:
        healthy, lost = send_kv_load_request(1, load="load"), send_kv_load_request(2, load="lost")
        asked = send_kv_load_request(3, load="load", remote_host=HOST, remote_port=port)
        until(lambda: [row["state"] for row in in_flight(server)] == 3 * ["waiting for KV"])
        assert outcomes(server, "--dry-run") == (0, [])  # they have just come
        name = in_flight(server)[0]["id"]
        shown = [
            server.cli("requests", "show", name, *words, "-t", server.name, "--json").out
            for words in ([], ["--reveal"])
        ]
        assert [prompt in out for out in shown] == [False, True]
        until(lambda: outcomes(server, "--dry-run") == (1, [("transfers", False)]), 40)
        assert server.send_chat_request().answer(30) == 200
        assert lost.answer(0.1) is None
        for words in (("requests", "list"), ("doctor",)):
            found = server.cli(*words, "-t", server.name, "--json").data["findings"]
            assert [one["code"] for one in found].count("request.lost-load") == 1
        free.close()
        # One goes on waiting: where nothing else happened meanwhile, that is told as a stall.
        assert outcomes(server)[1] == 2 * [("transfers", True)]
        # By the policy, and because its sender is gone.
        assert (lost.answer(30), asked.answer(30), healthy.answer(0.1)) == (*answers, None)
        assert outcomes(server)[1] == []
    finally:
        free.close()
        (server.place / "load").unlink()
    assert healthy.answer(30) == 200
    until(lambda: in_flight(server) == [])


@long
def test_a_request_that_needs_what_others_hold_that_wait_is_ended(
    server: Prone, answers: tuple[int, int]
) -> None:
    """The KV cache has 10 blocks of 128 tokens. One needs 9, and the other 8, most of them loaded.

    So each would fit, and not the rest of the first one beside what the other has loaded.
    """
    asked = list[Asked]()
    (server.place / "load").touch()
    try:
        for letter, length, tokens in (("y", 1100, 256), ("x", 960, 896)):
            load = {"load": "load", "tokens": tokens}
            asked.append(server.send_chat_request(text=letter * length, kv_transfer_params=load))
            waiting = ["waiting for KV"] * len(asked)
            until(lambda: [row["state"] for row in in_flight(server)] == waiting)  # noqa: B023
        assert outcomes(server, "--dry-run", "--only", "admission")[1] == []
    finally:
        (server.place / "load").unlink()
    until(lambda: outcomes(server, "--dry-run") == (1, [("admission", False)]), 40)
    assert [one.answer(0.1) for one in asked] == [None, None]
    assert outcomes(server) == (0, [("admission", True)])
    assert [one.answer(30) for one in asked] == [answers[1], 200]
    until(lambda: in_flight(server) == [])
