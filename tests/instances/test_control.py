"""What a client says to a supervisor."""

from __future__ import annotations

import msgspec
import pytest

from vllmops.instances.control import Request


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
