"""What is left of a conversation after its compaction, and how it is asked for."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.items import ITEMS

from vllmops.model.environment import COMPACTION_PROMPT
from vllmops_responses.server.carriers import carrier_merge, compaction
from vllmops_responses.server.item_rendering import render_item
from vllmops_responses.server.wire_format import ApiError

USER = {"role": "user", "content": "light, please"}
CALL = {"type": "function_call", "call_id": "c", "name": "lamp", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "it is on"}
SPOKEN = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
LONGEST = 1000
WRONG: list[Any] = [0, -1, 1.5, "9", True, []]


def texts(items: list[Any]) -> list[str]:
    return [carrier_merge.extract_text(item["content"]) for item in items]


def test_messages_and_calls_without_outputs_are_left() -> None:
    rules = {"role": "developer", "content": "be brief"}
    waiting = {**CALL, "call_id": "d"}
    left = compaction.build_compacted_items(
        [rules, USER, SPOKEN, CALL, OUTPUT, waiting], "all done"
    )
    assert [left[0], left[1], left[3]] == [rules, USER, waiting]
    assert "all done" in texts(left[2:3])[0]
    again = compaction.build_compacted_items([*left, SPOKEN], "again")
    assert [again[0], again[1], again[3]] == [rules, USER, waiting]
    assert [sum(map(compaction.is_summary, items)) for items in (left, again)] == [1, 1]


def test_a_summary_makes_one_message_with_those_of_the_user_beside_it() -> None:
    picture: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    left = compaction.build_compacted_items([USER, picture], "summary")
    (one,) = compaction.join_summary_messages([*left, {"role": "user", "content": "go on"}])
    assert [part["type"] for part in one["content"]] == [
        *("input_text", "input_image", "input_text", "input_text")
    ]
    assert one["content"][0]["text"] == "light, please\n\n"
    apart: list[Any] = [USER, USER, SPOKEN]
    assert compaction.join_summary_messages(apart) == apart
    assert compaction.join_summary_messages([*left, SPOKEN, USER])[1:] == [SPOKEN, USER]


@pytest.mark.parametrize(
    "asked",
    [
        *("x", [], {}, [1], [{}], [{"type": "other"}]),
        *[[{"type": "compaction", "compact_threshold": wrong}] for wrong in WRONG],
    ],
)
def test_an_invalid_threshold_is_none(asked: Any) -> None:
    request = SimpleNamespace(context_management=asked)
    assert compaction.parse_compact_threshold(request, LONGEST) is None


def test_a_threshold() -> None:
    def parse_threshold(**fields: Any) -> int | None:
        entry = {"type": "compaction", **fields}
        return compaction.parse_compact_threshold(
            SimpleNamespace(context_management=[entry]), LONGEST
        )

    assert compaction.parse_compact_threshold(SimpleNamespace(), LONGEST) is None
    assert [
        parse_threshold(compact_threshold=7),
        parse_threshold(compact_threshold=None),
        parse_threshold(),
    ] == [7, 800, 800]


class Model:
    """Takes the place of vLLM, which would summarize what its length allows.

    Args:
        length: in characters.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[str] = []

    async def fits(self, words: list[Any]) -> bool:
        return len(json.dumps(words)) < self.length

    async def answer(self, words: list[Any]) -> Any:
        self.asked.append(json.dumps(words))
        text = f"summary {len(self.asked)}"
        item = SimpleNamespace(model_dump=lambda **_: {**SPOKEN, "content": text})
        details = SimpleNamespace(cached_tokens=1, reasoning_tokens=2)
        usage = SimpleNamespace(input_tokens=10, output_tokens=5)
        usage.input_tokens_details = usage.output_tokens_details = details
        return SimpleNamespace(output=[item], usage=usage)

    def compact_items(self, items: list[Any]) -> compaction.CompactedConversation:
        return asyncio.run(
            compaction.compact_conversation(self.answer, self.fits, items, "summarize")
        )


def test_items_that_do_not_fit_are_summarized_in_parts() -> None:
    words = [{"role": "user", "content": f"word-{n:03}"} for n in range(100)]
    model = Model(1000)
    left, usage = model.compact_items(words)
    assert left[:-1] == words
    assert f"summary {len(model.asked)}" in texts(left)[-1]
    assert len(model.asked) > 2
    assert all(f"summary {n}" in asked for n, asked in enumerate(model.asked[1:], 1))
    assert usage.to_dict()["total_tokens"] == 15 * len(model.asked)
    everything = "".join(model.asked)
    lost = [n for n in range(100) if f"word-{n:03}" not in everything]
    assert len(lost) < len(model.asked)  # a word may be cut in two


def test_a_whole_conversation_is_summarized_at_once() -> None:
    model = Model(10**6)
    left, usage = model.compact_items([USER, SPOKEN])
    assert len(model.asked) == 1
    assert (left[0], usage.input, usage.reasoning) == (USER, 10, 2)


def test_a_model_that_is_too_short_is_told() -> None:
    with pytest.raises(ApiError, match="too short"):
        Model(1).compact_items([USER])


def test_an_answer_of_reasoning_alone_is_a_summary() -> None:
    def item(**fields: Any) -> Any:
        return SimpleNamespace(model_dump=lambda **_: fields)

    reasoning = item(type="reasoning", content=[{"type": "reasoning_text", "text": "so far"}])
    assert compaction.extract_output_text([reasoning]) == "so far"
    assert compaction.extract_output_text([reasoning, item(**SPOKEN)]) == "a"
    assert compaction.extract_output_text([]) == ""


def test_a_transcript_has_items_of_every_type() -> None:
    text = compaction.render_transcript(ITEMS)
    for word in ("lamp.txt", "Message from /root/reader", "[web_search_call]", "shell {"):
        assert word in text


def test_the_prompt_is_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compaction.load_summary_prompt() == compaction.PROMPT
    file = tmp_path / "prompt.txt"
    file.write_text("be short\n")
    monkeypatch.setenv(COMPACTION_PROMPT, str(file))
    assert compaction.load_summary_prompt() == "be short"
    file.unlink()
    assert compaction.load_summary_prompt() == compaction.PROMPT


def test_a_request_for_a_compaction_names_a_model() -> None:
    for given in ({}, {"model": None}):
        with pytest.raises(ApiError) as refused:
            compaction.validate_compact_body(json.dumps({"input": "hello", **given}).encode())
        assert (refused.value.status, refused.value.param) == (400, "model")


def test_what_has_no_effect_on_a_compaction_is_told() -> None:
    given = {"model": "m", "input": "hello", "store": True, "client_metadata": {}}
    told = compaction.validate_compact_body(json.dumps(given).encode())
    assert told == {"store", "client_metadata"}


def test_an_answer_that_is_nothing_but_a_compaction_is_valid() -> None:
    item = compaction.make_compaction_item("sealed")
    request = SimpleNamespace(
        request_id="resp_1", previous_response_id=None, model_fields_set=set()
    )

    async def compact() -> Any:
        return item, compaction.SummaryUsage(input=3, output=2)

    def make(**fields: Any) -> Any:
        return compaction.make_response(request, "m", 1.5, **fields)

    async def collect() -> list[Any]:
        return [event async for event in compaction.generate_events(compact, make)]

    events = asyncio.run(collect())
    assert [event.sequence_number for event in events] == list(range(5))
    last = events[-1]
    assert last.type == "response.completed"
    assert (last.response.status, last.response.output) == ("completed", [item])
    assert last.response.usage.total_tokens == 5
    assert events[0].response.output == []


@pytest.mark.parametrize(
    ("items", "triggered"),
    [
        ([{"type": "compaction_trigger"}], True),
        ([{"type": "compaction_trigger"}, USER], False),
        ([USER], False),
        ([], False),
        ("compaction_trigger", False),
    ],
)
def test_only_the_last_item_triggers_a_compaction(items: Any, triggered: bool) -> None:
    read = items
    if isinstance(items, list):
        read = [SimpleNamespace(**render_item(item)) for item in items]
    assert compaction.is_triggered(SimpleNamespace(input=read)) == triggered
