"""Fifty servers on other machines, each of which takes a second, against one; start-up counts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial

from ..support import herd
from ..support.fleet import TOKEN, token_file
from .figure import Figure, Limit, interleave_measurements, medians
from .setting import PYTHON, VLLMOPS, Setting

SERVERS = 50
DELAY_S = 0.7  # with start-up and the other questions, a command takes a second


def measure(setting: Setting) -> Iterator[Figure]:
    words = (PYTHON, herd.__file__, str(SERVERS), str(DELAY_S), TOKEN)
    running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    setting.started.callback(running.kill)
    assert running.stdout is not None
    urls = [f"http://127.0.0.1:{port}" for port in running.stdout.readline().split()]
    listed = setting.home / "fleet.txt"
    listed.write_text("\n".join(urls))
    token = ("--admin-token", str(token_file(setting.home)), "--json")
    for command in (("ps",), ("status",), ("cache", "inspect")):
        targets = {
            "one": partial(setting.seconds, VLLMOPS, *command, "-t", urls[0], *token),
            "all": partial(setting.seconds, VLLMOPS, *command, "-t", f"@{listed}", *token),
        }
        values = interleave_measurements(1 if setting.short else 10, targets)
        of = medians(values)
        yield Figure(
            f"{' '.join(command)} of {SERVERS} servers",
            "s",
            of["all"],
            "one server",
            of["one"],
            Limit(0, 3.0 * (3.0 if setting.short else 1.0)),
            len(values["all"]),
        )
