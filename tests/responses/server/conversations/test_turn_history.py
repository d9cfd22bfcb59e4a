"""The turns before a request, as vLLM reads them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace
from tests.responses.server.test_wire_format import CALL, REASONING, USER, turn

from vllmops_responses.server.conversations.turn_history import (
    CACHE_BYTES,
    ConversationPart,
    HistoryReader,
)
from vllmops_responses.server.wire_format import ApiError
from vllmops_responses.store.backend import Response
from vllmops_responses.store.compression import deflate
from vllmops_responses.store.conversation_backend import ConversationItem

MESSAGE = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "a"}],
}
CUSTOM = {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"}


class Parser:
    """Reads items as they are, and knows which."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        self.read += items
        return list(items)


def make_stored_turn(given: list[Any], output: list[Any]) -> Response:
    """A turn as the store keeps it."""
    made = turn(given, output)
    return replace(made, body=deflate(made.body), input=deflate(made.input))


def read_history(
    turns: list[Response], history: HistoryReader | None = None, *, harmony: bool = False
) -> ConversationPart:
    return asyncio.run((history or HistoryReader(Parser(), harmony=harmony)).read_turns(turns))


def test_a_conversation_has_every_item_once() -> None:
    turns = [make_stored_turn([USER], [REASONING, MESSAGE, CALL]), make_stored_turn([], [CUSTOM])]
    items = [USER, REASONING, MESSAGE, CALL]
    assert read_history(turns).items == read_history(turns).parsed_items == [*items, CUSTOM]
    assert read_history(turns, harmony=True).items == items


def test_history_size_counts_unpacked_bytes() -> None:
    made = turn([USER], [MESSAGE])
    assert read_history([make_stored_turn([USER], [MESSAGE])] * 2).size == 2 * len(
        made.body + made.input
    )


@pytest.mark.parametrize("damage", [b"junk", deflate(b"{"), deflate(b'[{"a":1}]')[:-1]])
def test_damage_is_no_fault_of_the_client(damage: bytes) -> None:
    history = HistoryReader(Parser(), harmony=False)
    turns = [
        replace(make_stored_turn([USER], [MESSAGE]), **{name: damage}) for name in ("body", "input")
    ]
    for one in turns:
        with pytest.raises(ApiError, match="A stored turn is damaged") as caught:
            read_history([one], history)
        assert caught.value.status == 500
    for answer in (False, True):
        with pytest.raises(ApiError, match="A stored item is damaged"):
            asyncio.run(history.read_conversation_items([ConversationItem("a", damage, answer)]))


@pytest.mark.parametrize(
    "silent",
    [
        {**MESSAGE, "content": []},
        {**MESSAGE, "content": [{"type": "refusal", "refusal": "no"}]},
        {**REASONING, "content": None},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ],
)
def test_items_without_text_are_left_out(silent: dict[str, Any]) -> None:
    assert read_history([make_stored_turn([USER], [silent, MESSAGE])]).items == [USER, MESSAGE]


def test_encrypted_content_is_left_out() -> None:
    secret = {**REASONING, "encrypted_content": "x"}
    hidden = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"}
    assert read_history([make_stored_turn([secret, hidden], [secret])]).items == [
        REASONING,
        REASONING,
    ]


def test_an_answer_is_parsed_once_and_an_input_each_time() -> None:
    parser = Parser()
    history = HistoryReader(parser, harmony=False)
    turns = [make_stored_turn([USER], [MESSAGE]), make_stored_turn([USER], [CALL])]
    assert read_history(turns[:1], history).parsed_items == [USER, MESSAGE]
    assert read_history(turns, history).parsed_items == [USER, MESSAGE, USER, CALL]
    assert [parser.read.count(item) for item in (USER, MESSAGE, CALL)] == [3, 1, 1]


def test_cache_of_parsed_turns_is_bounded_in_bytes() -> None:
    history = HistoryReader(list, harmony=False)
    for number in range(40):
        # It packs well, and what counts is what it is unpacked.
        text = f"{number}" * (CACHE_BYTES // 48)
        read_history([make_stored_turn([], [{**CUSTOM, "input": text}])], history)
    assert 4 < len(history.answers) < 16
    assert history.answers.currsize <= CACHE_BYTES


def test_many_small_answers_that_are_kept_ready_are_bounded() -> None:
    history = HistoryReader(list, harmony=False)
    read_history(
        [make_stored_turn([], [{**CUSTOM, "input": f"{number}"}]) for number in range(30_000)],
        history,
    )
    assert 10_000 < len(history.answers) < 22_000


def test_an_answer_too_large_to_be_kept_ready_is_read() -> None:
    large = {**CUSTOM, "input": "x" * CACHE_BYTES}
    history = HistoryReader(list, harmony=False)
    assert read_history([make_stored_turn([USER], [large])], history).parsed_items == [USER, large]
    assert not history.answers


def test_items_of_a_conversation_are_read_as_turns_are() -> None:
    parser = Parser()
    history = HistoryReader(parser, harmony=False)
    given, answer = {"role": "user", "content": "a"}, MESSAGE
    empty = {"type": "message", "role": "assistant", "content": []}
    entries = [
        ConversationItem(str(number), deflate(json.dumps(item).encode()), item is not given)
        for number, item in enumerate((given, answer, empty))
    ]
    for _ in range(2):
        part = asyncio.run(history.read_conversation_items(entries))
        assert part.items == part.parsed_items == [given, answer]
    # What the model made is parsed once.
    assert parser.read == [given, answer, given]
