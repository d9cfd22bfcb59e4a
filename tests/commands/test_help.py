"""``vllmops help``: the manual in a terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from vllmops.commands.help import render_page
from vllmops.docs import load_pages
from vllmops.support.terminal import Terminal

from ..support.extent import long


def test_without_a_word_it_lists_the_topics(vllmops: Any) -> None:
    answer = vllmops("help")
    assert (answer.code, answer.err) == (0, "")
    for page in load_pages().values():
        assert (page.name in answer.out.split()) == (page.kind == "topic"), page.name
    assert "Find out what is wrong" in answer.out


@pytest.mark.parametrize(
    ("word", "heading"),
    [
        ("doctor", "Find out what is wrong"),
        ("Keys", "Keys that protect client-held conversation state"),
        ("mm-cache.ghost-keys", "How vllmops knows"),
        ("stack.mm-cache-eviction-spin", "What to do"),
        ("VllmopsStall", "Keep the evidence"),
        ("vllmopsstall", "Keep the evidence"),
    ],
)
def test_a_page_by_its_word(vllmops: Any, word: str, heading: str) -> None:
    answer = vllmops("help", word)
    assert (answer.code, answer.err) == (0, "")
    assert heading in answer.out


def test_an_unknown_word_names_near_ones(vllmops: Any) -> None:
    answer = vllmops("help", "VllmopsStal")
    assert (answer.code, answer.out) == (2, "")
    assert "similar: VllmopsStall" in answer.err
    answer = vllmops("help", "mm-cache.ghost-key")
    assert (answer.code, answer.out) == (2, "")
    assert "mm-cache.ghost-keys" in answer.err
    assert "hint: vllmops help" in answer.err
    error = vllmops("help", "xyzzy", "--json").error
    assert (error["code"], error["message"]) == ("help.unknown", "no page 'xyzzy' in the manual")


def test_an_unknown_word_may_be_part_of_names_or_a_command(vllmops: Any) -> None:
    assert "similar: mm-cache.ghost-keys" in vllmops("help", "ghost").err
    answer = vllmops("help", "status")
    assert answer.code == 2
    assert "hint: vllmops status --help" in answer.err


@pytest.mark.parametrize("name", ["top", "drain", "requests", "probe"])
def test_a_link_is_the_command_that_shows_its_page(name: str) -> None:
    console = Terminal(file=io.StringIO(), width=400, highlight=False, markup=False)
    console.print(*render_page(load_pages()[name]))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert not re.search(r"\.(md|svg)\b", text)
    linked = re.findall(r"\(vllmops help ([^)]*)\)", text)
    assert linked
    assert set(linked) <= set(load_pages())


def test_json_has_the_list_and_the_text(vllmops: Any) -> None:
    listed = vllmops("help", "--json").data["pages"]
    assert {"name": "doctor", "kind": "topic", "title": "Find out what is wrong"} in listed
    assert [page["name"] for page in listed] == list(load_pages())
    data = vllmops("help", "doctor", "--json").data
    assert (data["name"], data["kind"]) == ("doctor", "topic")
    assert data["text"] == load_pages()["doctor"].text


@pytest.mark.parametrize(
    "name",
    [
        # Most pages are of codes, and of one form.
        name if page.kind == "topic" or number % 8 == 0 else pytest.param(name, marks=long)
        for number, (name, page) in enumerate(load_pages().items())
    ],
)
def test_every_page_fits_into_a_narrow_terminal(name: str) -> None:
    page = load_pages()[name]
    console = Terminal(file=io.StringIO(), width=60, highlight=False, markup=False)
    for part in render_page(page):
        console.print(part)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert page.title.split()[0] in "".join(lines)
    assert max(map(len, lines)) <= 60
    assert "…" not in "".join(lines) or "…" in page.text


def test_names_of_pages_are_completed(vllmops: Any) -> None:
    env = {
        "_VLLMOPS_COMPLETE": "complete_bash",
        "COMP_WORDS": "vllmops help mm-cache.gh",
        "COMP_CWORD": "2",
    }
    assert vllmops(env=env).out.split() == ["mm-cache.ghost-keys"]
    env["COMP_WORDS"] = "vllmops help VllmopsStore"
    assert vllmops(env=env).out.split() == ["VllmopsStoreNearlyFull", "VllmopsStoreRefuses"]


def test_in_a_locale_without_utf_8() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    answer = subprocess.run(
        [sys.executable, "-m", "vllmops", "help"],
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "Find out what is wrong" in answer.stdout
