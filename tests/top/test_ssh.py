"""The full screen over ssh: OpenSSH's client and server, a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..support import own_processes
from ..support.sshd import Session, server
from ..support.waiting import until

ROOT = Path(__file__).parents[2]
COLOUR = re.compile(rb"\x1b\[[\d;]*[34]8;2;(\d+);(\d+);(\d+)")
Opened = Callable[..., Session]


@pytest.fixture
def top_over_ssh(tmp_path: Path, home: Path) -> Iterator[Opened]:
    """Runs `vllmops top` over ssh: words, and variables of the other side."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    serve = server(folder)
    with ExitStack() as stack:

        def begin(
            *words: str, term: str = "xterm-256color", before: str = "", **set_: str
        ) -> Session:
            there = {"VLLMOPS_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **set_}
            pairs = [f"{name}={value}" for name, value in there.items()]
            line = shlex.join(
                ["env", *pairs, sys.executable, "-m", own_processes.__name__, "top", *words]
            )
            at = shlex.quote(str(ROOT))
            session = Session(folder, serve, f"cd {at}; {before} exec {line}", term)
            stack.callback(session.close)
            return session

        yield begin


def tops(home: Path) -> list[psutil.Process]:
    """The processes of the full screen."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if own_processes.__name__ in (process.info["cmdline"] or ())
        and own_processes.in_home(process.pid, home)
    ]


def test_servers_are_shown_keys_are_taken_and_q_ends(lab: Any, top_over_ssh: Opened) -> None:
    lab.serve("demo")
    lab.serve("other")
    session = top_over_ssh("-t", "demo", "-t", "other")
    session.shows("2 servers")
    session.shows("engine")
    session.type("x")
    session.shows("y runs it, n does not")
    session.type("n")
    session.type("q")
    assert session.wait_for_exit() == 0, session.text
    assert "Traceback" not in session.text
    assert not tops(lab.home)


@pytest.mark.parametrize("term", ["vt100", "dumb"])
def test_without_colour_all_is_grey_and_ctrl_c_ends(
    lab: Any, top_over_ssh: Opened, term: str
) -> None:
    session = top_over_ssh(term=term, NO_COLOR="1")
    session.shows("no vLLM server runs here", bytes_per_s=9600)
    session.type("\x03")
    assert session.wait_for_exit() == 0, session.text
    assert "Traceback" not in session.text
    assert all(red == green == blue for red, green, blue in COLOUR.findall(session.raw))
    assert session.raw.count(b"\x1b[?1049l") == session.raw.count(b"\x1b[?1049h") > 0


@pytest.mark.parametrize("before", ["", "trap '' HUP;"])
def test_a_lost_connection_ends_it(lab: Any, top_over_ssh: Opened, before: str) -> None:
    session = top_over_ssh(before=before)
    session.shows("no vLLM server runs here")
    assert tops(lab.home)
    session.drop()
    until(lambda: not tops(lab.home))
