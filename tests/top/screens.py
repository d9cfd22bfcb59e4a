"""The full screen, on made-up looks, and what it shows as text."""

from __future__ import annotations

import html
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from textual.pilot import Pilot

from vllmops.top.full_screen import TopApp
from vllmops.top.server_followers import FollowedServers, TargetSample

from .sample_snapshots import board, make_stalled_samples, make_target_sample
from .sample_snapshots import make_busy_server_sample as observed

CELL = re.compile(r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>')
WIDTH, HEIGHT = 12.2, 24.4  # of a character in Rich's pictures


def make_app(of: FollowedServers) -> TopApp:
    """The application at a time that does not pass."""
    return TopApp(of, clock=lambda: 1e9, monotonic=lambda: 30.5)


def lines(app: TopApp) -> list[str]:
    """What is on the screen."""
    rows = [""] * app.size.height
    for x, y, text in CELL.findall(app.export_screenshot()):
        column, row = round(float(x) / WIDTH), int(float(y) / HEIGHT)
        rows[row] = rows[row].ljust(column) + html.unescape(text)
    return [row.replace("\xa0", " ").rstrip() for row in rows]


@contextmanager
def standard() -> Iterator[None]:
    """The time zone of all pictures, and colours, whatever this terminal has."""
    before = {name: os.environ.pop(name, None) for name in ("TZ", "NO_COLOR")}
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        del os.environ["TZ"]
        os.environ |= {name: value for name, value in before.items() if value is not None}
        time.tzset()


def lively() -> Iterator[TargetSample]:
    """Looks at a server whose load comes in waves."""
    tokens = 0.0
    for at_s in range(31):
        wave = (1 + math.sin(at_s / 3)) / 2
        tokens += 400 + 2000 * wave
        load = observed(at_s, running=round(8 * wave), kv=0.2 + 0.6 * wave, tokens=tokens)
        yield make_target_sample(float(at_s), "chat", server_sample=load)


async def render_screenshot() -> str:
    """A picture of two servers, one of which has stalled, on a small terminal."""
    with standard():
        app = make_app(board(chat=[*lively()], vision=make_stalled_samples("vision")))
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until_settled(app, pilot)
            return app.export_screenshot(title="vllmops top")


async def wait_for_texts(app: TopApp, pilot: Pilot[None], *texts: str) -> None:
    """Wait until the screen has these texts; it may go on to change."""
    for _ in range(300):
        await pilot.pause(0.2)
        text = "\n".join(lines(app))
        if all(part in text for part in texts):
            return
    raise AssertionError(f"no {texts} in\n{text}")


async def wait_until_settled(
    app: TopApp, pilot: Pilot[None], *texts: str, without: str = ""
) -> list[str]:
    """What is on the screen once it changes no more, and has these texts, and not that one."""
    before: list[str] = []
    for _ in range(600):
        await pilot.pause(0.1)
        now = lines(app)
        whole = "\n".join(now)
        lacks = not without or without not in whole
        if now == before and lacks and all(text in whole for text in texts):
            return now
        before = now
    raise AssertionError(f"no {texts} in\n" + "\n".join(before))
