"""A real server as a service of a real systemd: whoever ends it or has it hang, it comes back.

The unit is as `vllmops integrate systemd` prints it, and so are its times; tests/servers has more
cases, with a stand-in.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllmops import demo

from ..support import plug_ins
from ..support.extent import long
from ..support.systemd import Service, install_service
from ..support.waiting import until
from .conftest import START_TIMEOUT_S
from .hangs import PLACE, PLUG_IN

pytestmark = long
PORT = 8000  # the network is its own
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
REQUEST = """
import json, urllib.request
body = {{"model": "demo-text", "prompt": "The quick brown", "max_tokens": 8}}
asked = urllib.request.Request(
    "http://127.0.0.1:{port}/v1/completions",
    json.dumps(body).encode(),
    {{"Content-Type": "application/json"}},
)
print("asking", flush=True)
print(json.load(urllib.request.urlopen(asked))["usage"]["completion_tokens"], flush=True)
"""
RED_S = 60.0  # a stall is sure after 30 s, and the busy machine needs some


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """What the server's user can read."""
    with tempfile.TemporaryDirectory(prefix="vo-live-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def service(place: Path) -> Iterator[Service]:
    plug_ins.lean(place / "lean")
    plug_ins.write(place / "hangs", "hangs", PLUG_IN)
    settings = {**ENVIRONMENT, **demo.make_serve_environment(), PLACE: str(place)}
    with install_service("", place / "lean", place / "hangs") as made:
        lines = ["demo = 'text'", f"port = {PORT}"]
        made.configure("\n".join([*lines, "[env]", *(f"{k} = '{v}'" for k, v in settings.items())]))
        made.start(START_TIMEOUT_S)
        yield made
        made.end()


@contextmanager
def start_client(service: Service) -> Iterator[Any]:
    """A request, and the lines that its client prints."""
    with service.manager.start_program(sys.executable, "-c", REQUEST.format(port=PORT)) as output:
        assert output.readline() == "asking\n"
        yield output


def answers(service: Service) -> bool:
    with start_client(service) as output:
        return bool(output.readline() == "8\n")


def test_it_serves(service: Service) -> None:
    assert (service.state, service.status) == ("active", "ready")
    assert answers(service)


def test_an_engine_that_is_killed_starts_again(service: Service) -> None:
    before, restarts = service.record, service.restarts
    service.kill("engine")
    until(lambda: service.has_restarted(restarts + 1), START_TIMEOUT_S, lambda: service.log)
    assert service.record.session != before.session
    assert answers(service)


def test_a_hang_is_restarted_with_its_evidence_on_the_disk(service: Service, place: Path) -> None:
    for _ in range(30):  # what is usual is known
        assert answers(service)
    before, restarts = service.record, service.restarts
    (place / "scheduler").touch()
    with start_client(service):
        until(lambda: service.status.startswith("not live: "), RED_S, lambda: service.log)
        (kept,) = service.bundles
        assert service.state == "active"
        until(lambda: service.shows("Result") == "watchdog", 60, lambda: service.log)
        (place / "scheduler").unlink()
    until(lambda: service.has_restarted(restarts + 1), START_TIMEOUT_S, lambda: service.log)
    assert service.record.session != before.session
    assert answers(service)
    assert service.bundles == [kept]


def test_it_stops_after_a_drain(service: Service) -> None:
    service.begin("stop")
    until(lambda: service.state == "inactive")
    assert service.shows("Result") == "success"
    assert service.record.state == "stopped"
