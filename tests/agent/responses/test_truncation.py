"""What is left of an input that is too long for the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllmops.agent.responses.truncation import select_fitting_items

RULES = {"role": "developer", "content": "be brief"}


def said(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{number}"}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "lamp", "arguments": "{}"}


def output(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "on"}


def left(items: list[Any], most: int) -> tuple[list[Any] | None, int]:
    """What is left for a model that takes so many items, and how often it was asked."""
    asked = 0

    async def fits(some: list[Any]) -> bool:
        nonlocal asked
        asked += 1
        return len(some) <= most

    return asyncio.run(select_fitting_items(items, fits)), asked


@pytest.mark.parametrize("most", range(1, 9))
def test_as_few_as_possible_of_the_oldest_are_dropped(most: int) -> None:
    items = list(map(said, range(9)))
    assert left(items, most)[0] == items[-most:]


def test_rules_are_kept_wherever_they_are() -> None:
    items = [RULES, said(0), said(1), RULES, said(2), said(3)]
    assert left(items, 4)[0] == [RULES, RULES, said(2), said(3)]


def test_an_output_goes_with_its_call() -> None:
    items = [said(0), call("a"), call("b"), output("a"), output("b"), said(1)]
    assert left(items, 5)[0] == items[1:]
    assert left(items, 4)[0] == [call("b"), output("b"), said(1)]
    assert left(items, 2)[0] == [said(1)]


def test_an_output_that_is_sent_is_not_dropped_with_its_call() -> None:
    items = [RULES, *map(said, range(9)), call("a"), call("b"), output("a"), output("b")]
    assert left(items, 5)[0] == [RULES, call("a"), call("b"), output("a"), output("b")]
    assert left(items, 3)[0] == [RULES, call("b"), output("b")]
    assert left(items, 2)[0] is None


@pytest.mark.parametrize("items", [[said(0)], [said(0), said(1)], [RULES, said(0)]])
def test_nothing_is_left_where_the_last_item_is_too_long(items: list[Any]) -> None:
    assert left(items, 0)[0] is None


def test_a_long_input_is_rendered_a_few_times() -> None:
    found, asked = left(list(map(said, range(1000))), 10)
    assert (len(found or ()), asked <= 11) == (10, True)
