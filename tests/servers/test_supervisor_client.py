"""What a client says to a supervisor."""

from __future__ import annotations

import signal
import threading
from typing import Any

import msgspec
import pytest

from vllmops.servers.record import InstanceFolder, InstanceState
from vllmops.servers.supervisor_client import (
    ControlRequest,
    restart_dead_supervisor,
    send_and_wait_until_begun,
)

from ..support.waiting import until


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_seconds_are_finite(seconds: float) -> None:
    """JSON would make no request of them: the client would wait for ever for an end."""
    with pytest.raises(ValueError, match="not a number of seconds"):
        ControlRequest(stop=seconds)
    with pytest.raises(ValueError, match="not a number of seconds"):
        ControlRequest(restart=seconds)


def test_control_request_round_trips_and_rejects_negative_times() -> None:
    for request in (
        ControlRequest(),
        ControlRequest(hold=True),
        ControlRequest(stop=0.0),
        ControlRequest(restart=2.5),
    ):
        assert msgspec.json.decode(msgspec.json.encode(request), type=ControlRequest) == request
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"stop":-1}', type=ControlRequest)


def test_instance_that_just_stopped_gets_no_new_supervisor(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would take it for one that died, and say so in its record."""
    lab.serve("a")
    lab.vllmops("stop", "a")
    folder, lock = InstanceFolder("a"), InstanceFolder.take_lock
    until(lambda: not folder.is_supervised())
    ended = lab.record("a")
    folder.save_record(msgspec.structs.replace(ended, state=InstanceState.STOPPING))

    def end_and_take_lock(self: InstanceFolder) -> int | None:
        self.save_record(ended)
        return lock(self)

    monkeypatch.setattr(InstanceFolder, "take_lock", end_and_take_lock)
    assert restart_dead_supervisor(folder) is None
    assert (folder.is_supervised(), lab.state("a")) == (False, "stopped")


def test_a_supervisor_that_has_no_time_is_told_all_the_same(lab: Any) -> None:
    record, supervisor = lab.serve("a"), lab.supervisor("a")
    lab.kill(supervisor, signal.SIGSTOP)
    go_on = threading.Timer(0.5, lab.kill, (supervisor, signal.SIGCONT))
    go_on.start()
    send_and_wait_until_begun(InstanceFolder("a"), ControlRequest(stop=0.0), 600)
    until(lambda: lab.state("a") == InstanceState.STOPPED)
    lab.nothing_left(record)
