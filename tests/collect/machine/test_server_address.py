"""Servers that listen on a Unix socket, and headless ones, which listen on nothing."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from vllmops.collect.http import vllm_client
from vllmops.collect.machine.server_address import (
    ServingMode,
    format_url,
    make_unix_url,
    parse_serving_mode,
    parse_unix_url,
    remove_stale_socket,
)
from vllmops.servers import readiness

from ...support.extent import long
from ...support.waiting import until


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--port 1 --host h", ServingMode()),
        ("--uds /run/v.sock", ServingMode(uds="/run/v.sock")),
        ("--uds=/run/v.sock --port 8000", ServingMode(uds="/run/v.sock")),
        ("--headless", ServingMode(headless=True)),
        ("--headless -dp 2 -dpl 1 --data-parallel-start-rank 1", ServingMode(headless=True)),
        ("--headless --uds /x", ServingMode(headless=True)),
        ("--api-server-count 0", ServingMode(headless=True)),
        ("--api_server_count=0", ServingMode(headless=True)),
        ("-asc 0", ServingMode(headless=True)),
        ("-asc=0", ServingMode(headless=True)),
        ("--api-server-count 2 -dp 2", ServingMode()),
        ("-asc 10", ServingMode()),
        ("--model headless", ServingMode()),
        ("--nnodes 2 --node-rank 1 --headless", ServingMode(headless=True)),
        ("--nnodes 2 --node-rank 0 -tp 2", ServingMode()),
        ("-dp 2 --data-parallel-rank 1", ServingMode()),
        ("-dp 4 -dpl 2 --data-parallel-hybrid-lb --data-parallel-start-rank 2", ServingMode()),
    ],
)
def test_the_shape_that_arguments_give(words: str, found: ServingMode) -> None:
    assert parse_serving_mode(words.split()) == found


@pytest.mark.parametrize("path", ["/tmp/Some Dir/Vllm.SOCK", "/tmp/ü%2F?#x", "/a:b@c/[d]"])
def test_a_socket_s_path_comes_through_a_url(path: str) -> None:
    assert parse_unix_url(make_unix_url(path)) == path
    assert parse_unix_url(f"{make_unix_url(path)}/v1/models?x=1") == path
    assert format_url(make_unix_url(path)) == f"unix:{path}"
    assert parse_unix_url("http://localhost") is None


def test_remove_stale_socket_removes_only_a_dead_socket(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        remove_stale_socket(str(path))
        assert path.exists()
    remove_stale_socket(str(path))
    assert not path.exists()
    path.write_text("a file")
    remove_stale_socket(str(path))
    remove_stale_socket(str(tmp_path / "none"))
    assert path.exists()


def test_a_server_on_a_unix_socket(lab: Any) -> None:
    path = lab.home / "Some.sock"
    record = lab.serve("a", "--", "--uds", str(path))
    assert (record.port, record.uds) == (None, str(path))
    assert "--port" not in record.command
    assert 0 < record.ready_s < 600
    (row,) = lab.vllmops("ps", "--json").data["instances"]
    assert (row["state"], row["url"], row["uds"]) == ("ready", make_unix_url(str(path)), str(path))
    assert f"unix:{path}" in lab.vllmops("ps").out
    assert lab.vllmops("status", "a", "--json").data["metrics"]["running"] == 0
    assert lab.vllmops("wait", f"unix:{path}", "--timeout", "60").code == 0
    assert lab.vllmops("wait", make_unix_url(str(path)), "--timeout", "60").code == 0
    doctor = lab.vllmops("doctor", "-t", "a", "--canary", "--only", "canary", "--json")
    # The stand-in names no model; that it was asked is what counts.
    assert "JSON" in doctor.data["findings"][0]["evidence"], doctor
    answer = lab.vllmops("stop", "a", "--json")
    assert (answer.code, answer.data["state"], answer.data["note"]) == (0, "stopped", "drained")
    lab.nothing_left(record)
    assert not path.exists()


@long
def test_a_unix_socket_that_was_left_does_not_hinder_a_restart(lab: Any) -> None:
    path = lab.home / "a.sock"
    record = lab.serve("a", "--", "--uds", str(path))
    lab.kill(record.session)
    until(lambda: lab.state("a") == "failed")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # as a server leaves it whose supervisor was killed with it
    answer = lab.vllmops("restart", "a")
    assert answer.code == 0, answer
    assert f"is ready at unix:{path} after" in answer.out


def test_a_unix_socket_on_which_no_server_can_listen(lab: Any) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(lab.home / "o.sock"))
        other.listen()
        (lab.home / "file").touch()
        for path in ("o.sock", "file", "no/dir.sock", "x" * 120):
            words = ("--", "--uds", str(lab.home / path))
            answer = lab.vllmops("serve", str(lab.model), "--name", "b", "--json", *words)
            assert answer.error["code"] == "uds.unusable"
            assert answer.code == 1


def test_a_stranger_on_a_unix_socket(lab: Any) -> None:
    path = lab.home / "s.sock"
    lab.stranger_with("--uds", str(path))
    until(lambda: vllm_client.is_healthy(make_unix_url(str(path))))
    (row,) = lab.vllmops("ps", "--json").data["instances"]
    assert (row["state"], row["uds"], row["port"]) == ("ready", str(path), None)
    assert lab.vllmops("stop", f"unix:{path}").code == 0


@pytest.mark.parametrize("words", [("--headless",), ("--api-server-count", "0")])
def test_a_headless_server(lab: Any, words: tuple[str, ...]) -> None:
    """The stand-in's engine has no agent: its log says that it is up."""
    if words != ("--headless",):
        words = (*words, "--headless")  # the stand-in knows this word alone
    answer = lab.vllmops(*lab.words("a", "--detach", "--", *words, ready_s=1))
    assert answer.code == 0, answer
    assert "a is ready after" in answer.out
    assert "headless" in answer.out
    record = lab.record("a")
    assert (record.port, record.url) == (None, None)
    assert [p.role for p in record.processes] == ["launcher", "engine", "worker"]
    assert 0.5 < record.ready_s < 600
    (row,) = lab.vllmops("ps", "--json").data["instances"]
    assert (row["state"], row["url"], row["headless"]) == ("ready", None, True)
    assert lab.vllmops("status", "a").code == 0
    assert lab.vllmops("doctor", "-t", "a", "--skip", "machine").code == 0
    answer = lab.vllmops("stop", "a", "--timeout", "1", "--json")
    assert (answer.code, answer.data["state"]) == (0, "stopped")
    lab.nothing_left(record)


def test_a_headless_server_that_waits_for_its_head_is_not_ready(lab: Any) -> None:
    lab.start_in_foreground("a", "--", "--headless", ready_s=600)
    until(lambda: len(lab.record("a").processes) == 3)
    waited = lab.vllmops("wait", "a", "--timeout", "1")
    assert waited.code == 3
    assert lab.vllmops("stop", "a", "--force").code == 0
    out, err = lab.foreground[-1].communicate(timeout=60)
    assert "is ready" not in out + err


@long
def test_stopped_before_it_was_ready(lab: Any) -> None:
    answers = []
    words = lab.words("a", "--detach", ready_s=600)
    serving = threading.Thread(target=lambda: answers.append(lab.vllmops(*words)))
    serving.start()
    until(lambda: lab.state("a") and len(lab.record("a").processes) == 3)
    assert lab.vllmops("stop", "a", "--force").code == 0
    serving.join()
    (answer,) = answers
    assert answer.code == 1
    assert "was stopped before it was ready" in answer.err
    assert "is ready" not in answer.out


def test_which_lines_say_that_a_process_is_up() -> None:
    words = (Path(__file__).parents[2] / "servers/logs/ready.log").read_text().splitlines()
    assert {pid for line in words if (pid := readiness.parse_ready_pid(line))} >= {4969}
    assert (
        readiness.parse_ready_pid("(APIServer pid=1) INFO 11-20 19:05:14 [a.py:1] init engine (")
        is None
    )
