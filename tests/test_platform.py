"""Where there is no Linux: what only talks HTTP or reads files works, the rest says why not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .support.extent import long, programs
from .support.fleet import token_file
from .support.forks import FORKS, Answered
from .support.remote_machine import far

pytestmark = programs

# No Mac and no Windows is at hand. A real interpreter, with what they lack taken away: its own name
# of the system, Linux's locks, on Windows also whole modules; and a real absence of /proc.
PRETENCE = """
import importlib.readers, os, sys
# What looks at the system's name itself, and is installed here as it is made for Linux.
import asyncio, ctypes, httpx, multiprocessing, platformdirs, psutil, rich.console, rich.live
import sqlite3, typer, typer.rich_utils, urllib.request
import fcntl
for name in [name for name in vars(fcntl) if name.startswith("F_OFD")]:
    delattr(fcntl, name)
if os.environ["PRETEND"] == "win32":
    for name in ("fcntl", "grp", "pwd", "resource", "termios", "pty"):
        sys.modules[name] = None
sys.platform = os.environ["PRETEND"]
"""


@pytest.fixture
def elsewhere(home: Path, tmp_path: Path) -> list[str]:
    """What to put before a command to have it run on no Linux; ``PRETEND`` says where."""
    (tmp_path / "sitecustomize.py").write_text(PRETENCE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = 'mount -t tmpfs none /proc && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", script, "sh"]
    return [*inside, "env", f"PYTHONPATH={path}", sys.executable]


def run(elsewhere: list[str], lines: list[list[str]], system: str) -> list[Answered]:
    """Run several commands as forks of one interpreter."""
    ran = subprocess.run(
        [*elsewhere, str(FORKS), json.dumps(lines)],
        env={**os.environ, "PRETEND": system},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answers: list[Answered] = json.loads(ran.stdout)
    return answers


@pytest.mark.parametrize("system", ["darwin", "win32", pytest.param("linux", marks=long)])
def test_commands_that_need_linux_say_so_and_the_others_work(
    elsewhere: list[str], tmp_path: Path, system: str
) -> None:
    (tmp_path / "stacks.txt").write_text("Thread 0x00007f (most recent call first):\n")
    url = "http://127.0.0.1:1"
    expected: list[tuple[list[str], int | None]] = [
        (["--help"], 0),
        (["--version"], 0),
        (["serve", "--help"], 0),
        (["attach", "--help"], 0),
        (["stacks", "dump", "--help"], 0),
        (["keygen"], 0),
        (["patches", "show", "mm-lru-ghost-keys"], 0),
        (["completions", "bash"], 0),
        (["stacks", "explain", str(tmp_path / "stacks.txt")], None),
        (["doctor", str(tmp_path / "none.json")], None),
        (["responses", "list", "--store", f"sqlite:///{tmp_path}/store.db"], None),
        (["responses", "list", "-t", url], 5),
        (["responses", "show", "x", "-t", url], 5),
    ]
    needy = [["ps"], ["stop", "x"], ["attach", "-t", "1"], ["doctor"], ["cache", "inspect"]]
    lines = [*(words for words, _ in expected), *needy, ["keys", "add"]]
    *answers, added = run(elsewhere, lines, system)
    for answer, (_, code) in zip(answers, expected, strict=False):
        spoken = answer["out"] + answer["err"]
        assert "Traceback" not in spoken
        assert "unexpected" not in spoken, spoken
        assert "Linux" not in answer["err"], spoken
        if code is not None:
            assert answer["code"] == code, spoken
    for answer in answers[len(expected) :]:
        assert answer["code"] == 1
        assert "Linux" in answer["err"]
        assert "unexpected" not in answer["err"]
    if system != "linux":
        assert added["code"] == 1
        assert "Linux" in added["err"]


@pytest.mark.parametrize("system", [pytest.param("darwin", marks=long), "linux"])
def test_a_server_on_another_machine_is_reached_from_anywhere(
    elsewhere: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    with far(tmp_path) as (url, certificate):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        target = ["-t", url, "--admin-token", str(token_file(tmp_path)), "--json"]
        reading = [
            *(["ps"], ["status"], ["cache", "inspect"], ["cache", "repair"], ["stacks", "dump"]),
            *(["patches", "list"], ["doctor"], ["wait", "--for", "ready"], ["keys", "status"]),
        ]
        lines = [[*line, *target] for line in reading]
        *answers, stopped = run(elsewhere, [*lines, ["stop", "-t", url, "--json"]], system)
    for line, answer in zip(lines, answers, strict=True):
        assert answer["code"] == 0, (line, answer)
    assert stopped["code"] == 2
    assert "own machine only" in stopped["out"]
