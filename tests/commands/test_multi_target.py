"""Several servers at once: real HTTP servers, which answer as the admin routes do."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..support import herd
from ..support.commands import Answer, Vllmops
from ..support.extent import long
from ..support.fleet import TOKEN, token_file

Herd = Callable[..., list[str]]


@pytest.fixture
def urls() -> Iterator[Herd]:
    """Starts that many servers, each of which takes so many seconds to list its processes.

    An infinite time ends when each of them has been asked.
    """
    running = []

    def start(count: int, delay_s: float = 0.0) -> list[str]:
        words = (sys.executable, herd.__file__, str(count), str(delay_s), TOKEN)
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout is not None
        return [f"http://127.0.0.1:{port}" for port in running[-1].stdout.readline().split()]

    yield start
    for popen in running:
        popen.kill()
        popen.communicate()


@pytest.fixture
def token(tmp_path: Path) -> tuple[str, str]:
    return ("--admin-token", str(token_file(tmp_path)))


def targets(urls: list[str]) -> list[str]:
    return [word for url in urls for word in ("-t", url)]


def test_rows_name_their_server_and_the_exit_code_is_the_worst(
    vllmops: Vllmops, urls: Herd, token: tuple[str, str]
) -> None:
    fine = urls(2)
    words = ("status", *token, *targets([fine[0], "http://127.0.0.1:9", fine[1]]))
    answer = vllmops(*words, "--json")
    assert answer.code == 5
    envelope = answer.envelope
    assert (envelope["status"], envelope["exit_code"]) == ("error", 5)
    rows = envelope["data"]["targets"]
    assert [row["target"] for row in rows] == [fine[0], "http://127.0.0.1:9", fine[1]]
    assert [(row["status"], row["exit_code"]) for row in rows] == [
        ("ok", 0),
        ("error", 5),
        ("ok", 0),
    ]
    # What there is of a target is what `--json` has for it alone.
    alone = vllmops("status", *token, "-t", fine[0], "--json").data
    assert rows[0]["data"].keys() == alone.keys()
    assert rows[0]["data"]["instance"]["url"] == fine[0]
    assert [error["code"] for error in rows[1]["errors"]] == ["admin.unreachable"]
    assert envelope["errors"] == rows[1]["errors"]
    text = vllmops(*words)
    assert text.code == 5
    parts = text.out.split("== ")[1:]
    assert [part.splitlines()[0] for part in parts] == [row["target"] for row in rows]
    assert "error: http://127.0.0.1:9 can't be reached" in parts[1]
    assert "  hint: " in parts[1]
    assert "1 running, 2 waiting" in parts[2]


@pytest.mark.parametrize(
    "words",
    [
        ("ps",),
        pytest.param(("status",), marks=long),
        ("cache", "inspect"),
        pytest.param(("patches", "list"), marks=long),
    ],
    ids=" ".join,
)
def test_several_servers_are_asked_concurrently(
    vllmops: Vllmops, urls: Herd, token: tuple[str, str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    many = urls(12, math.inf)  # none answers before all are asked
    (tmp_path / "fleet.txt").write_text("# all\n" + "\n".join(many) + "\n\n  # no more\n")
    answer = vllmops(*words, *token, "-t", f"@{tmp_path / 'fleet.txt'}", "--json")
    assert answer.code == 0, answer
    assert [row["target"] for row in answer.data["targets"]] == many


def test_files_of_targets(
    vllmops: Vllmops, urls: Herd, token: tuple[str, str], tmp_path: Path
) -> None:
    (url,) = urls(1)
    file = tmp_path / "fleet.txt"

    def ran(text: str, *more: str) -> Answer:
        file.write_text(text)
        return vllmops("ps", *token, "-t", f"@{file}", *more, "--json")

    # The form of the command line says which shape the data has, not how many lines there are.
    answer = ran(f"{url}\n{url} # again\n", "-t", url)
    assert [row["target"] for row in answer.data["targets"]] == [url]
    answer = ran("\n# nothing\n")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    answer = ran("a b\n")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    answer = ran(f"@{file}\n")
    assert (answer.code, answer.error["code"]) == (2, "usage")
    answer = vllmops("ps", *token, "-t", f"@{tmp_path / 'none'}", "--json")
    assert (answer.code, answer.error["code"]) == (1, "file.unreadable")
    # One target keeps the shape that it always had.
    assert "instances" in vllmops("ps", *token, "-t", url, "--json").data


def test_single_server_options_reject_several_targets(
    vllmops: Vllmops, urls: Herd, token: tuple[str, str], tmp_path: Path
) -> None:
    both = targets(urls(2))
    for words in (
        ("stacks", "dump", "--save", str(tmp_path / "x.json")),
        ("cache", "inspect", "--watch"),
        ("status", "demo"),
    ):
        answer = vllmops(*words, *token, *both, "--json")
        assert (answer.code, answer.error["code"]) == (2, "usage"), words
        assert "several" in answer.error["message"]
