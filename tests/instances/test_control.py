"""What a client says to a supervisor."""

from __future__ import annotations

import signal
import threading
from typing import Any

import msgspec
import pytest

from vllmops.instances.control import Request, adopt, told
from vllmops.instances.record import Folder, State

from ..support.waiting import until


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_seconds_are_finite(seconds: float) -> None:
    """JSON would make no request of them: the client would wait for ever for an end."""
    with pytest.raises(ValueError, match="not a number of seconds"):
        Request(stop=seconds)
    with pytest.raises(ValueError, match="not a number of seconds"):
        Request(restart=seconds)


def test_what_a_supervisor_takes() -> None:
    for request in (Request(), Request(hold=True), Request(stop=0.0), Request(restart=2.5)):
        assert msgspec.json.decode(msgspec.json.encode(request), type=Request) == request
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"stop":-1}', type=Request)


def test_one_that_ends_just_now_in_order_gets_no_successor(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would take it for one that died, and say so in its record."""
    lab.serve("a")
    lab.vllmops("stop", "a")
    folder, lock = Folder("a"), Folder.lock
    until(lambda: not folder.supervised())
    ended = lab.record("a")
    folder.write(msgspec.structs.replace(ended, state=State.STOPPING))

    def late(self: Folder) -> int | None:
        self.write(ended)
        return lock(self)

    monkeypatch.setattr(Folder, "lock", late)
    assert adopt(folder) is None
    assert (folder.supervised(), lab.state("a")) == (False, "stopped")


def test_a_supervisor_that_has_no_time_is_told_all_the_same(lab: Any) -> None:
    record, supervisor = lab.serve("a"), lab.supervisor("a")
    lab.kill(supervisor, signal.SIGSTOP)
    go_on = threading.Timer(0.5, lab.kill, (supervisor, signal.SIGCONT))
    go_on.start()
    told(Folder("a"), Request(stop=0.0), 600)
    until(lambda: lab.state("a") == State.STOPPED)
    lab.nothing_left(record)
