"""What is left of an input that is too long for the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllmops_responses.server.conversations.truncation import (
    select_fitting_items,
)

RULES = {"role": "developer", "content": "be brief"}


def user_message(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{number}"}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "lamp", "arguments": "{}"}


def output(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "on"}


def truncate_items(items: list[Any], most: int) -> tuple[list[Any] | None, int]:
    """What is left for a model that takes so many items, and how often it was asked."""
    asked = 0

    async def fits(some: list[Any]) -> bool:
        nonlocal asked
        asked += 1
        return len(some) <= most

    return asyncio.run(select_fitting_items(items, fits)), asked


@pytest.mark.parametrize("most", range(1, 9))
def test_truncation_drops_as_few_of_the_oldest_items_as_possible(most: int) -> None:
    items = list(map(user_message, range(9)))
    assert truncate_items(items, most)[0] == items[-most:]


def test_rules_are_kept_wherever_they_are() -> None:
    items = [RULES, user_message(0), user_message(1), RULES, user_message(2), user_message(3)]
    assert truncate_items(items, 4)[0] == [RULES, RULES, user_message(2), user_message(3)]


def test_an_output_goes_with_its_call() -> None:
    items = [user_message(0), call("a"), call("b"), output("a"), output("b"), user_message(1)]
    assert truncate_items(items, 5)[0] == items[1:]
    assert truncate_items(items, 4)[0] == [call("b"), output("b"), user_message(1)]
    assert truncate_items(items, 2)[0] == [user_message(1)]


def test_an_output_that_is_sent_is_not_dropped_with_its_call() -> None:
    items = [RULES, *map(user_message, range(9)), call("a"), call("b"), output("a"), output("b")]
    assert truncate_items(items, 5)[0] == [RULES, call("a"), call("b"), output("a"), output("b")]
    assert truncate_items(items, 3)[0] == [RULES, call("b"), output("b")]
    assert truncate_items(items, 2)[0] is None


@pytest.mark.parametrize(
    "items", [[user_message(0)], [user_message(0), user_message(1)], [RULES, user_message(0)]]
)
def test_truncation_fails_if_the_last_item_alone_is_too_long(items: list[Any]) -> None:
    assert truncate_items(items, 0)[0] is None


def test_a_long_input_is_rendered_a_few_times() -> None:
    found, asked = truncate_items(list(map(user_message, range(1000))), 10)
    assert (len(found or ()), asked <= 11) == (10, True)
