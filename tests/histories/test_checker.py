"""The checker accepts a right history, and finds each thing that can be wrong with one."""

from __future__ import annotations

import pytest

from .checker import Op, check

MADE = Op("create", "c", "ann", 0, 1, 200)
ADDED = Op("add", "c", "ann", 2, 3, 200, ("a", "b"))
TURN = Op("turn", "c", "ann", 4, 5, 200, ("q", "re:q"), "saw:a,b")
RESPOND = Op("respond", "r", "ann", 0, 1, 200, (), "queued")


FIRST = Op("link", "l1", "ann", 0, 1, 200, (), "saw:", asked="a")
STREAM = Op("stream", "s", "ann", 0, 1, 200, ("re:s",), "completed", asked="s")
LETTERS = tuple((n, f'{{"delta": "{letter}"}}') for n, letter in enumerate("re:s|"))


def link(saw: str, before: str, code: int = 200, at: float = 4) -> Op:
    return Op("link", f"l{at}", "ann", at, at + 0.5, code, (), saw, asked="b", before=before)


def read(*marks: str, code: int = 200, at: float = 6, owner: str = "ann") -> Op:
    return Op("read", "c", owner, at, at + 0.5, code, marks)


def make_get_op(status: str, at: float, *marks: str) -> Op:
    return Op("get", "r", "ann", at, at + 0.5, 200, marks, status)


def test_a_right_history() -> None:
    other = read(code=404, owner="bob")
    busy = Op("turn", "c", "ann", 4, 5, 409, ("x", "re:x"))
    unknown = Op("add", "c", "ann", 5, 5.5, 0, ("y", "z"))
    ops = [MADE, ADDED, TURN, busy, unknown, read("a", "b", "q", "re:q"), other]
    later = read("a", "b", "q", "re:q", "y", "z", at=8)
    ends = [
        RESPOND,
        make_get_op("in_progress", 2),
        make_get_op("lost", 3),
        make_get_op("completed", 4, "re:r"),
    ]
    assert check([*ops, later, *ends]) == []
    chain = [FIRST, link("saw:a,re:a", "l1"), link("saw:a,re:a,b,re:b", "l4", at=5)]
    assert check([*chain, STREAM._replace(events=LETTERS)]) == []


def test_a_stream_is_refused_only_where_its_run_died_with_its_server() -> None:
    cut = Op("stream", "r", "ann", 0, 1, 400, (), "", asked="r")
    assert check([cut, make_get_op("lost", 3)]) == []
    assert check([cut, make_get_op("completed", 3, "re:r")]) == ["r: stream was answered 400"]


def test_a_link_may_not_see_the_answer_of_a_run_that_has_not_ended() -> None:
    run = RESPOND._replace(asked="r")
    assert check([run, link("saw:r", "r"), link("saw:r,re:r", "r", at=5)]) == []
    assert check([run, link("", "r", code=400)]) == []
    for after in (link("saw:r", "r"), link("", "r", code=400)):
        assert check([run, make_get_op("completed", 2, "re:r"), after])
    cancelled = Op("cancel", "r", "ann", 2, 3, 200, (), "cancelled")
    assert check([run, cancelled, link("saw:r,re:r", "r")])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([read("a", "b")], "were lost"),
        ([read("a", "b", "q", "re:q", "q", "re:q")], "doubled"),
        ([read("b", "a", "q", "re:q")], "torn"),
        ([read("q", "re:q", "a", "b")], "stand behind"),
        ([read("a", "b", "q", "re:q", "ghost")], "nobody added"),
        ([read(code=404)], "did not find"),
        ([read("a", "b", "q", "re:q", owner="bob")], "could read"),
        (
            [Op("delete", "c", "ann", 5, 5.5, 200), read("a", "b", "q", "re:q")],
            "after it was deleted",
        ),
        ([Op("turn", "c", "ann", 6, 7, 500, ("x",))], "answered 500"),
        (
            [Op("turn", "c", "ann", 6, 7, 409, ("x",)), read("a", "b", "q", "re:q", "x", at=8)],
            "after 409",
        ),
        ([read("a", "b", "q", "re:q"), read("a", at=9)], "earlier one"),
        ([make_get_op("completed", 2), make_get_op("in_progress", 3)], "became in_progress"),
        ([make_get_op("cancelled", 2), make_get_op("completed", 3)], "became completed"),
        ([link("saw:", "l1")], "came before"),
        ([link("", "l1", code=404)], "did not find what is there"),
        ([STREAM._replace(events=LETTERS[:3])], "its events said"),
        ([STREAM._replace(events=LETTERS[1:])], "lost, doubled"),
        ([STREAM._replace(events=(*LETTERS[:2], *LETTERS[1:]))], "lost, doubled"),
        ([STREAM._replace(events=LETTERS), STREAM._replace(events=((0, "{}"),))], "event 0 was"),
        ([make_get_op("completed", 2, "x"), make_get_op("completed", 3, "y")], "changed"),
    ],
)
def test_a_wrong_history(wrong: list[Op], says: str) -> None:
    assert any(says in line for line in check([MADE, ADDED, TURN, RESPOND, FIRST, *wrong]))
