"""A round of healthy load, ten minutes with ``--all``: no request fails, and there is no alarm."""

from __future__ import annotations

from ..support.extent import EVERYTHING, long
from .conftest import Live
from .soak import Soak, alarms


@long
def test_healthy_load_gives_no_alarm(vision_server: Live) -> None:
    soak, shown = Soak(vision_server.url), list[str]()
    soak.run(10.0 if EVERYTHING else 0.1, lambda: shown.extend(alarms(vision_server)))
    assert shown == []
    assert soak.failed == []
    assert soak.done.keys() == {"sleep", *(kind.__name__ for kind in soak.kinds)}
