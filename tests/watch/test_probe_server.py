"""Where a verdict is shown: the file, and HTTP."""

from __future__ import annotations

import json
import os
import socket
import time
from http.server import HTTPServer
from pathlib import Path

import httpx
import pytest

from vllmops.model.probe import ProbeResult
from vllmops.servers.quick_probe import FILE
from vllmops.servers.record import InstanceFolder
from vllmops.support.errors import VllmopsError
from vllmops.watch.probe_server import ProbeBoard, ProbeServer

from ..support.ports import free_port

WELL = ProbeResult(live=True, ready=True, started=True)
STUCK = ProbeResult(live=False, ready=False, started=True, reason="no token for 12 s", evidence="b")


@pytest.fixture
def folder(home: Path) -> InstanceFolder:
    found = InstanceFolder("a")
    found.path.mkdir(mode=0o700, parents=True)
    return found


def test_the_file_has_the_last_verdict(folder: InstanceFolder) -> None:
    board = ProbeBoard(folder, 2.0)
    for verdict in (WELL, STUCK, WELL):
        before_s = time.monotonic()
        board.publish(verdict, 5.0)
        kept = json.loads((folder.path / FILE).read_text())
        assert (ProbeResult(*kept["verdict"]), kept["start"]) == (verdict, 5.0)
        assert before_s + 20 < kept["until"] < time.monotonic() + 60
    assert os.stat(folder.path / FILE).st_mode & 0o777 == 0o600
    before = os.stat(folder.path / FILE).st_mtime_ns
    board.publish(WELL, 5.0)  # nothing new
    assert os.stat(folder.path / FILE).st_mtime_ns == before


def test_a_file_that_can_not_be_written_hinders_nothing(home: Path) -> None:
    board = ProbeBoard(InstanceFolder("gone"), 2.0)
    board.publish(STUCK, 5.0)
    assert board.get_current_result() == STUCK


def test_a_watch_that_does_not_look_any_more(folder: InstanceFolder) -> None:
    board = ProbeBoard(folder, 2.0)
    assert not board.get_current_result().ready
    board.publish(WELL, 5.0)
    assert board.get_current_result() == WELL
    board.valid_until = time.monotonic() - 1
    assert board.get_current_result()[:3] == (True, False, True)


def test_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    now, port = [WELL], free_port()
    listener = ProbeServer(("127.0.0.1", port), lambda: now[0])
    url = f"http://127.0.0.1:{port}"

    def get(path: str) -> httpx.Response:
        return httpx.get(f"{url}/{path}", timeout=60)

    def answers() -> list[int]:
        return [get(path).status_code for path in ("livez", "readyz", "startupz")]

    def unknown(_: HTTPServer) -> None:  # as without a network; real names take one
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    try:
        assert answers() == [200, 200, 200]
        assert get("livez").text == "live\n"
        now[0] = STUCK
        assert answers() == [503, 503, 200]
        assert get("readyz").text == "not ready: no token for 12 s\n"
        shown = get("livez?verbose").text
        assert shown == "not live: no token for 12 s\n[-] live\n[-] ready\n[+] started\n"
        assert get("health").status_code == 404
        # Who says nothing holds up no other one.
        with socket.create_connection(("127.0.0.1", port)):
            assert answers() == [503, 503, 200]
        with pytest.raises(VllmopsError, match="nothing can listen") as caught:
            ProbeServer(("127.0.0.1", port), lambda: WELL)
        assert caught.value.code == "port.taken"
        monkeypatch.setattr(HTTPServer, "server_bind", unknown)
        with pytest.raises(VllmopsError) as caught:
            ProbeServer(("no.such.host.invalid", port), lambda: WELL)
        assert caught.value.code == "host.unknown"
    finally:
        listener.shutdown()
        listener.server_close()
