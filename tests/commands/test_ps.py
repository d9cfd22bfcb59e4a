"""``vllmops ps``, with a stand-in for vLLM (see supervision/standin.py)."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vllmops.collect.http import vllm_client
from vllmops.servers.record import InstanceFolder
from vllmops.support.streams import UNSAFE

from ..support.commands import background
from ..support.extent import long
from ..support.waiting import until

KEYS = {"name", "state", "pid", "url", "model", "started_by_vllmops", "processes"}


def test_ps_says_that_no_server_runs(vllmops: Any) -> None:
    answer = vllmops("ps", "--json")
    assert answer.code == 0
    assert answer.data == {"instances": [], "faults": []}
    assert vllmops("ps").out == "no vLLM server runs here\n"


def test_an_instance_and_a_stranger(lab: Any, patience: pytest.MonkeyPatch) -> None:
    record = lab.serve("a")
    server = lab.stranger()
    answer = lab.vllmops("ps", "--json")
    ours, stranger = answer.data["instances"]
    assert set(ours) >= KEYS
    assert (ours["name"], ours["state"], ours["pid"]) == ("a", "ready", record.session)
    assert (ours["url"], ours["port"]) == (record.url, record.port)
    assert (ours["started_by_vllmops"], ours["supervised"]) == (True, True)
    assert (stranger["name"], stranger["state"], stranger["pid"]) == (None, "ready", server.pid)
    assert (stranger["port"], stranger["started_by_vllmops"]) == (server.port, False)
    assert (stranger["supervised"], stranger["model"]) == (None, str(lab.model))
    for row in (ours, stranger):
        assert [p["role"] for p in row["processes"]] == ["api", "engine", "worker"]
        assert all(p["rss_bytes"] > 2**20 for p in row["processes"])
        assert {p["agent"] for p in row["processes"]} == {"absent"}  # it has none to play
        assert row["rss_bytes"] == sum(p["rss_bytes"] for p in row["processes"])
        assert 0 <= row["uptime_s"] < 3600

    patience.undo()
    os.kill(server.pid, signal.SIGSTOP)  # it still listens, and does not answer
    assert lab.vllmops("ps", "--json").data["instances"][1]["state"] == "not answering"
    lab.kill(server.pid)
    until(lambda: server.poll() is not None)
    orphans = lab.vllmops("ps", "--json").data["instances"][1]
    assert (orphans["state"], orphans["url"]) == ("orphaned", None)
    assert [p["role"] for p in orphans["processes"]] == ["engine", "worker"]


@pytest.mark.parametrize("columns", [60, None])
def test_ps_shows_long_values_in_full(lab: Any, columns: int | None) -> None:
    model = lab.model.rename(lab.model.with_name("x" * 80))
    lab.model = model
    record = lab.serve("a-name-that-is-rather-long-for-a-narrow-terminal")
    answer = lab.vllmops("ps", columns=columns)
    flat = "".join(answer.out.split())
    for word in (record.name, record.url, str(model), *(str(p.pid) for p in record.processes)):
        assert word in flat, answer.out
    assert "…" not in answer.out
    widest = max(map(len, answer.out.splitlines()))
    assert widest <= 60 if columns else widest > 80


@long
def test_ps_lists_ended_instances_only_with_all(lab: Any) -> None:
    lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    record = lab.serve("b")
    lab.kill(record.session)
    until(lambda: lab.state("b") == "failed")
    answer = lab.vllmops("ps", "--json")
    assert answer.data["instances"] == []
    assert "failed: b; vllmops ps --all" in answer.err
    rows = lab.vllmops("ps", "--all", "--json").data["instances"]
    assert [(row["name"], row["state"]) for row in rows] == [("a", "stopped"), ("b", "failed")]
    assert "SIGKILL" in rows[1]["failure"]
    assert "SIGKILL" in lab.vllmops("ps", "-a").out


def test_ps_shows_a_starting_instance(lab: Any) -> None:
    lab.start_in_foreground("a", ready_s=60)
    (row,) = lab.vllmops("ps", "--json").data["instances"]
    assert (row["name"], row["state"], row["supervised"]) == ("a", "starting", True)
    assert lab.vllmops("stop", "a").code == 0


def test_a_damaged_record_leaves_the_others(lab: Any) -> None:
    lab.serve("a")
    lab.serve("b")
    InstanceFolder("a").record_file.write_text("{")
    # Its supervisor would write it anew.
    lab.kill(lab.supervisor("a"))
    InstanceFolder("a").record_file.write_text("{")
    answer = lab.vllmops("ps", "--json")
    assert answer.code == 0
    assert [row["name"] for row in answer.data["instances"]] == ["b", None]
    (fault,) = answer.data["faults"]
    assert fault["code"] == "registry.corrupt"
    assert str(InstanceFolder("a").record_file) in fault["message"]
    assert "warning: " in answer.err
    stranger = answer.data["instances"][1]
    assert lab.vllmops("status", "b", "--json").data["instance"]["name"] == "b"
    assert lab.vllmops("stop", "b").code == 0
    assert lab.vllmops("stop", str(stranger["pid"])).code == 0  # as the warning says
    assert lab.vllmops("ps", "--json").data["instances"] == []


def test_a_state_directory_that_cannot_be_read(vllmops: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = vllmops("ps", "--json", env={"VLLMOPS_HOME": str(tmp_path / "file" / "x")})
    assert (answer.code, answer.error["code"]) == (1, "home.unusable")


@contextmanager
def start_silent_servers(tmp_path: Path, home: Path) -> Iterator[dict[int, socket.socket]]:
    """Processes that look like servers, and what listens on their ports: nobody answers there."""
    (tmp_path / "serve").write_text("import sys; sys.stdin.read()")
    with ExitStack() as stack:
        found = {}
        for _ in range(8):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            line = ["vllm", "serve", "m", "--port", str(listener.getsockname()[1])]
            process = subprocess.Popen(
                line,
                executable=sys.executable,
                cwd=tmp_path,
                env={"PYTHONHOME": sys.base_prefix, "VLLMOPS_HOME": str(home)},
                stdin=subprocess.PIPE,
            )
            stack.callback(process.communicate)
            found[process.pid] = listener
        yield found


def test_many_that_do_not_answer(
    vllmops: Any, tmp_path: Path, home: Path, patience: pytest.MonkeyPatch
) -> None:
    """Any user can start them."""
    patience.undo()
    with start_silent_servers(tmp_path, home) as silent:
        answer = vllmops("ps", "--json")
    shown = {one["pid"]: one["state"] for one in answer.data["instances"]}
    assert {shown.get(pid) for pid in silent} == {"not answering"}


def test_many_are_asked_side_by_side(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together they take no longer than one of them: none answers before all are asked."""
    monkeypatch.setattr(
        vllm_client, "fetch_health_status", partial(vllm_client.fetch_health_status, timeout_s=600)
    )
    with start_silent_servers(tmp_path, home) as late, ExitStack() as stack:
        popen = background("ps", "--json")
        asked = [stack.enter_context(listener.accept()[0]) for listener in late.values()]
        for connection in asked:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        out, _ = popen.communicate(timeout=60)
    shown = {one["pid"]: one["state"] for one in json.loads(out)["data"]["instances"]}
    assert {shown.get(pid) for pid in late} == {"ready"}


EVIL = "m\x1b[2J\x1b]0;t\x07\u202e\u2028[red]\nb  ready  up 9d"


@pytest.mark.parametrize("columns", [100, None])
def test_a_stranger_s_words_are_only_words(lab: Any, columns: int | None) -> None:
    """No escape sequence, no markup and no line of its own from another's command line."""
    lab.model = lab.model.rename(lab.model.with_name(EVIL))
    lab.stranger()
    answer = lab.vllmops("ps", columns=columns)
    shown = "m␛[2J␛]0;t␇��[red]␊b  ready  up 9d"
    assert "".join(shown.split()) in "".join(answer.out.split())
    assert len([line for line in answer.out.splitlines() if "up" in line.split()]) <= 2
    found = lab.vllmops("ps", "--json")
    assert not UNSAFE.search(found.out)
    assert found.data["instances"][0]["model"] == str(lab.model)


# Becomes a process of vLLM's by its name.
ACTOR = "import os, sys; os.execv(sys.executable, [sys.argv[1], '-c', 'input()'])"


@pytest.mark.parametrize(
    ("parent", "title", "state"),
    [
        ("gunicorn: worker [app]", "VLLM::EngineCore", "no API server"),  # with a title of its own
        ("raylet", "ray::RayWorkerWrapper", "no API server"),
        ("triton_python_backend_stub", "VLLM::EngineCore", "no API server"),  # embeds Python
        ("tini", "VLLM::EngineCore", "orphaned"),
    ],
)
def test_process_is_orphaned_only_below_an_init_process(
    home: Path, vllmops: Any, parent: str, title: str, state: str
) -> None:
    words = [sys.executable, "-c", ACTOR, title]
    code = f"import subprocess; subprocess.run({words})"
    program = sys.executable
    if not parent.startswith("gunicorn"):
        code, program = f"{shlex.join(words)}; true", "/bin/sh"
    with subprocess.Popen([parent, "-c", code], executable=program, stdin=subprocess.PIPE) as above:

        def rows() -> Any:
            return vllmops("ps", "--json").data["instances"]

        until(rows)
        (row,) = rows()
        assert row["state"] == state
        found = vllmops("doctor", "-t", str(row["pid"]), "--json").data["findings"]
        orphaned = "process.orphaned" in {finding["code"] for finding in found}
        assert orphaned is (state == "orphaned")
        above.communicate(b"\n")
