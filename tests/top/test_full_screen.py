"""The full screen by Textual's pilot: a terminal of 80 columns and 24 lines, and made-up looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Tree

from vllmops.support.streams import UNSAFE
from vllmops.top import key_bindings
from vllmops.top.full_screen import TopApp
from vllmops.top.server_followers import FollowedServers, ServerDetails

from ..rules.sample_servers import pulse
from ..support.extent import EVERYTHING
from .sample_snapshots import (
    board,
    hostile,
    make_busy_server_sample,
    make_stalled_samples,
    make_target_sample,
    make_working_samples,
    unreachable,
)
from .screens import lines, make_app, standard, wait_until_settled

AWAY = "https://gpu7.example"
Play = Callable[[TopApp, Pilot[None]], Awaitable[None]]
STACKS = {
    "errors": [],
    "data": {
        "processes": [
            {
                "role": "engine",
                "pid": pid,
                "threads": [
                    {
                        "name": f"MainThread of {pid}",
                        "state": "active",
                        "owns_gil": True,
                        "frames": [{"function": "step", "short_file": "core.py", "line": 7}],
                    }
                ],
            }
            for pid in (10, 20)
        ]
    },
}


@pytest.fixture(autouse=True)
def same_time() -> Iterator[None]:
    with standard():
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The commands that were run; none of them is."""
    commands: list[tuple[str, ...]] = []

    def run(words: tuple[str, ...], columns: int) -> tuple[int, str]:
        commands.append(words)
        return 1, json.dumps(STACKS) if "--json" in words else "\x1b[2Jdone [b]this[/b]"

    monkeypatch.setattr(key_bindings, "run_command", run)
    monkeypatch.setenv("VLLMOPS_HOME", str(tmp_path))
    return commands


def play(of: FollowedServers, script: Play) -> None:
    async def begin() -> None:
        app = make_app(of)
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until_settled(app, pilot)
            await script(app, pilot)

    asyncio.run(begin())


def test_all_parts_fit_on_a_small_screen() -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        parts = (
            "Quit",
            "3 servers, 2 in trouble",
            "demo  ready",
            "engine 20 50% at work, 1 running",
            "two  stalled for 22 s",
            f"{AWAY}  not seen",
            "tokens/s 100",
            "KV 45%",
            "prefix hits 80%",
            "mm-lru P0 of api 10: 3",
            "entries, 1.0 GiB of 4.0",
            "engine.no-progress",
            "d Doctor",
        )
        shown = await wait_until_settled(app, pilot, *parts)
        assert len(shown) <= 24
        assert max(map(len, shown)) <= 80

    play(
        board(
            demo=make_working_samples(), two=make_stalled_samples("two"), **{AWAY: [unreachable()]}
        ),
        script,
    )


def test_a_line_that_is_too_long_ends_with_an_ellipsis() -> None:
    pulses = (pulse("engine", running=12, waiting=1234, still_s=130.0, current_step=1234567),)

    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        shown = await wait_until_settled(app, pilot, "engine 20")
        (line,) = [line for line in shown if "engine 20" in line]
        assert line[:54].endswith("…"), line

    play(
        board(
            demo=[
                make_target_sample(
                    30.0, server_sample=make_busy_server_sample(30.0, heartbeats=pulses)
                )
            ]
        ),
        script,
    )


@pytest.mark.parametrize("colour", ["no", "yes"])
def test_words_tell_all_that_colours_do(monkeypatch: pytest.MonkeyPatch, colour: str) -> None:
    if colour == "no":
        monkeypatch.setenv("NO_COLOR", "1")

    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        assert app.no_color is (colour == "no")
        await wait_until_settled(app, pilot, "Quit", "error: requests are pending")

    play(board(two=make_stalled_samples("two")), script)


def test_server_texts_inject_no_escape_sequences_or_markup(
    ran: list[tuple[str, ...]],
) -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        app.board.followers["evil"].log = ("\x1b[2J[red]log[/red]\u202e",)
        app.board.followers["evil"].lines_read = 1
        for key in ("f", "r", "l", "s", "d"):
            await pilot.press(key)
            shown = "\n".join(await wait_until_settled(app, pilot, "[red]"))
            assert not UNSAFE.search(shown)
        await pilot.press("y")
        shown = "\n".join(await wait_until_settled(app, pilot, "exit code 1", "[b]this[/b]"))
        assert not UNSAFE.search(shown)

    play(board(evil=[hostile("evil")]), script)


def test_an_action_runs_once_it_is_confirmed(ran: list[tuple[str, ...]]) -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        keys = (
            ("d", "doctor -t demo"),
            ("a", "requests abort -t demo --yes -- cmpl-a"),
            ("h", "heal -t demo"),
            ("b", "bundle -t demo -o "),
            ("x", "drain -t demo"),
            ("u", "resume -t demo"),
        )
        for key, words in keys if EVERYTHING else keys[:2]:
            await pilot.press(key)
            await wait_until_settled(app, pilot, f"$ vllmops {words}", "y runs it")
            await pilot.press("n")
            await wait_until_settled(app, pilot, "Quit")
            assert ran == []
            await pilot.press(key, "y")
            await wait_until_settled(app, pilot, "done", "exit code 1")
            await pilot.press("q")  # closes the window, not the application
            await wait_until_settled(app, pilot, "Quit")
            assert " ".join(ran.pop()).startswith(words)

    play(board(demo=make_working_samples()), script)


def test_the_chosen_request_is_ended(ran: list[tuple[str, ...]]) -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("r")
        await wait_until_settled(app, pilot, "chatcmpl-77aa")
        await pilot.press("down")
        await wait_until_settled(app, pilot, "chatcmpl-77aa")
        await pilot.press("a")
        # Another look may come, and the order change, before somebody decides.
        first = app.board.followers["demo"]
        rows = first.samples[-1].details.requests
        first.samples = (
            make_target_sample(31.0, details=type(first.samples[-1].details)(requests=rows[::-1])),
        )
        app.refresh_rows()
        await pilot.press("y")
        await wait_until_settled(app, pilot, "exit code 1")
        assert ran[0][-2:] == ("--", "cmpl-b")

    play(board(demo=make_working_samples()), script)


def test_without_requests_none_is_ended(ran: list[tuple[str, ...]]) -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("a", "y")
        await wait_until_settled(app, pilot)
        assert ran == []

    play(board(**{AWAY: [unreachable()]}), script)


def test_no_requests_are_told_from_those_that_are_not_seen() -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("r")
        await wait_until_settled(app, pilot, "not seen: gpu7.example does not answer")
        await pilot.press("f")
        shown = await wait_until_settled(app, pilot, f"{AWAY}: gpu7.example does not answer")
        assert not [line for line in shown if f"{AWAY}: {AWAY}" in line]
        app.board.followers[AWAY].samples = (make_target_sample(31.0, details=ServerDetails()),)
        app.refresh_rows()
        await pilot.press("r")
        await wait_until_settled(app, pilot, "none in flight", "u Resume")

    play(board(**{AWAY: [unreachable()]}), script)


def test_stacks_are_of_the_chosen_process(ran: list[tuple[str, ...]]) -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        await wait_until_settled(app, pilot, "engine 20")
        await pilot.press("down", "down", "s")
        shown = "\n".join(
            await wait_until_settled(app, pilot, "MainThread of 20", "step (core.py:7)")
        )
        assert "MainThread of 10" not in shown
        assert ran == [("stacks", "dump", "-t", "demo", "--json")]

    play(board(demo=make_working_samples()), script)


def test_the_log_is_filtered(ran: list[tuple[str, ...]]) -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        follower = app.board.followers["demo"]
        follower.log, follower.lines_read = ("INFO all is well", "ERROR one", "ERROR two"), 3
        await pilot.press("l")
        await wait_until_settled(app, pilot, "all is well", "ERROR two")
        assert follower.reads_log
        await pilot.press("slash", *"error", "enter")
        await wait_until_settled(app, pilot, "ERROR one", without="well")
        follower.log, follower.lines_read = (*follower.log, "ERROR three", "INFO four"), 5
        shown = await wait_until_settled(app, pilot, "ERROR three")
        assert "four" not in "\n".join(shown)
        assert sum("ERROR one" in line for line in shown) == 1
        await pilot.press("f")
        assert not follower.reads_log

    play(board(demo=make_working_samples()), script)


def test_servers_that_come_and_go_leave_the_choice_alone() -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        await wait_until_settled(app, pilot, "demo  ready", "two  stalled")
        await pilot.press(*["down"] * 6)
        await wait_until_settled(app, pilot)
        assert app.selected_key == ("two", "", 20)
        new = app.board.make("demo", None)
        app.board.followers = {"another": new, **app.board.followers}
        await wait_until_settled(app, pilot, "another")
        assert app.selected_key == ("two", "", 20)
        tree = app.query_one(Tree)
        # Two changes before the screen is drawn: as on a busy machine.
        for name in ("third", "fourth"):
            app.board.followers = {name: new, **app.board.followers}
            app.refresh_rows()
            node = tree.get_node_at_line(tree.cursor_line)
            assert node
            assert node.data == app.selected_key == ("two", "", 20)
        await wait_until_settled(app, pilot, "two  stalled")
        assert app.selected_key == ("two", "", 20)
        del app.board.followers["two"]
        app.refresh_rows()
        await wait_until_settled(app, pilot)
        assert app.selected_key
        assert app.selected_key[0] != "two"

    play(board(demo=make_working_samples(), two=make_stalled_samples("two")), script)


def test_quitting_ends_the_looks() -> None:
    shown = board(demo=make_working_samples())

    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("q")

    play(shown, script)
    assert shown.stop.is_set()


def test_without_a_server_the_screen_says_so() -> None:
    async def script(app: TopApp, pilot: Pilot[None]) -> None:
        app.board.targets = ()
        await wait_until_settled(app, pilot, "no vLLM server runs here")
        assert lines(app)

    play(board(), script)
