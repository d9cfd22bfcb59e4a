"""A minute of everything that is healthy: no request fails, and nothing is said to be wrong."""

from __future__ import annotations

from .conftest import Live
from .soak import Soak, alarms


def test_healthy_load_gives_no_alarm(vision_server: Live) -> None:
    soak, told = Soak(vision_server.url), list[str]()
    soak.run(1.0, lambda: told.extend(alarms(vision_server)))
    assert told == []
    assert soak.failed == []
    assert soak.done.keys() == {"sleep", *(kind.__name__ for kind in soak.kinds)}
