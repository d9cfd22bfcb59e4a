"""What a carrier stands for among the items that a client sends: each turn once, none lost."""

from __future__ import annotations

from typing import Any

import pytest

from vllmops_responses.server.carriers.carrier_merge import (
    Item,
    convert_messages_to_items,
    drop_unneeded_fields,
    extract_readable_part,
    find_carrier,
    merge_history,
)
from vllmops_responses.server.wire_format import ApiError

OLD = "vllm:2:k:a256gcm-zlib:old"
NEW = "vllm:2:k:a256gcm-zlib:new"
FOREIGN = "gAAAAABo"


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def assistant_message(text: str, **more: Any) -> Item:
    part: Item = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    return {"type": "message", "role": "assistant", "content": [part], **more}


def reasoning_item(text: str, **more: Any) -> Item:
    content = [{"type": "reasoning_text", "text": text}] if text else None
    return {"type": "reasoning", "summary": [], "content": content, **more}


def carrier_item(text: str) -> Item:
    return reasoning_item("", id="rs_9", encrypted_content=text)


def call(name: str) -> Item:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


def output(name: str, text: str = "done") -> Item:
    return {"type": "function_call_output", "call_id": name, "output": text}


FIRST = [user("1"), reasoning_item("hm", id="rs_1"), assistant_message("one", id="msg_1")]
SECOND = [*FIRST, user("2"), assistant_message("two", id="msg_2")]
ASKED = [user("1"), assistant_message("a moment", id="msg_1"), call("a"), call("b")]
SYSTEM = {"role": "system", "content": "be brief"}


def conversation(history: list[Item], items: list[Item]) -> list[Item]:
    """What is made of a request whose latest carrier holds `history`."""
    found = find_carrier(items, None)
    at = found.item_index if found else -1
    before, kept = merge_history(history, items, at)
    return [*before, *(items[n] for n in kept)]


# Of each way in which a client may send what it has: the items, and what they amount to.
SENT: dict[str, tuple[list[Item], list[Item], list[Item]]] = {
    "the carrier alone": (FIRST, [carrier_item(NEW), user("2")], [*FIRST, user("2")]),
    "the last answer": (
        SECOND,
        [assistant_message("two", id="msg_2"), carrier_item(NEW), user("3")],
        [*SECOND, user("3")],
    ),
    "everything, a carrier in each answer": (
        SECOND,
        [*FIRST, carrier_item(OLD), *SECOND[3:], carrier_item(NEW), user("3")],
        [*SECOND, user("3")],
    ),
    "everything, in words of its own": (
        FIRST,
        [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1"}]},
            {"role": "assistant", "content": "one"},
            carrier_item(NEW),
            user("2"),
        ],
        [*FIRST, user("2")],
    ),
    "the same question again": (FIRST, [carrier_item(NEW), user("1")], [*FIRST, user("1")]),
    "the same question after an answer that said nothing": (
        [user("1")],
        [user("1"), carrier_item(NEW), user("1")],
        [user("1"), user("1")],
    ),
    "a turn without a carrier behind it": (
        FIRST,
        [*FIRST, carrier_item(NEW), user("2"), assistant_message("one", id="msg_8"), user("3")],
        [*FIRST, user("2"), assistant_message("one", id="msg_8"), user("3")],
    ),
    "reasoning first, by ids": (
        FIRST,
        [
            user("1"),
            carrier_item(NEW),
            reasoning_item("hm", id="rs_1"),
            assistant_message("one", id="msg_1"),
            user("2"),
        ],
        [*FIRST, user("2")],
    ),
    "reasoning first, by words": (
        FIRST,
        [user("1"), carrier_item(NEW), {"role": "assistant", "content": "one"}, user("2")],
        [*FIRST, user("2")],
    ),
    "reasoning first, without ids, a call last": (
        ASKED,
        [
            carrier_item(NEW),
            reasoning_item("hm"),
            assistant_message("a moment"),
            call("a"),
            call("b"),
            output("a"),
        ],
        [*ASKED, output("a")],
    ),
    "all behind the carrier": (FIRST, [carrier_item(NEW), *FIRST, user("2")], [*FIRST, user("2")]),
    "calls and outputs in turn": (
        ASKED,
        [user("1"), carrier_item(NEW), call("a"), output("a"), call("b"), output("b")],
        [*ASKED, output("a"), output("b")],
    ),
    "an output before its answer had ended": (
        ASKED,
        [*ASKED[:3], output("a"), call("b"), carrier_item(NEW), output("b"), user("2")],
        [*ASKED, output("a"), output("b"), user("2")],
    ),
    "outputs that it holds": (
        [*ASKED, output("a"), output("b"), assistant_message("ok")],
        [*ASKED, output("a"), output("b"), assistant_message("ok"), carrier_item(NEW), user("2")],
        [*ASKED, output("a"), output("b"), assistant_message("ok"), user("2")],
    ),
    "an output of no call": (
        FIRST,
        [output("x"), carrier_item(NEW), user("2")],
        [*FIRST, user("2")],
    ),
    "other instructions than before": (
        [SYSTEM, *FIRST],
        [{**SYSTEM, "content": "it is noon"}, *FIRST, carrier_item(NEW), user("2")],
        [{**SYSTEM, "content": "it is noon"}, *FIRST, user("2")],
    ),
    "no instructions any more": (
        [SYSTEM, *FIRST],
        [carrier_item(NEW), user("2")],
        [SYSTEM, *FIRST, user("2")],
    ),
    "an id that is none": (
        FIRST,
        [carrier_item(NEW), {**user("2"), "id": ["x"]}],
        [*FIRST, {**user("2"), "id": ["x"]}],
    ),
}


@pytest.mark.parametrize("way", SENT)
def test_merged_history_has_each_turn_once(way: str) -> None:
    history, items, expected = SENT[way]
    assert conversation(history, items) == expected


def test_a_carrier_that_is_not_among_the_items() -> None:
    assert merge_history(FIRST, [user("2")], -1) == (FIRST, [0])
    assert merge_history(FIRST, [*FIRST, user("2")], -1) == (FIRST, [3])


def test_images_are_told_apart() -> None:
    def image_message(url: str) -> Item:
        return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}

    history = [image_message("data:1"), assistant_message("a cat", id="msg_1")]
    items = [
        carrier_item(NEW),
        image_message("data:2"),
        assistant_message("a cat", id="msg_1"),
        user("2"),
    ]
    assert conversation(history, items) == [*history, image_message("data:2"), user("2")]


# -- where a carrier comes from ------------------------------------------------------------------


def test_the_carrier_that_counts() -> None:
    assert find_carrier([user("1")], None) is None
    assert find_carrier([carrier_item(FOREIGN), user("1")], None) is None
    found = find_carrier(
        [carrier_item(OLD), user("2"), carrier_item(NEW), carrier_item(FOREIGN), user("3")], None
    )
    assert found
    assert (found.text, found.item_index, found.param) == (NEW, 2, "input")
    found = find_carrier(
        [user("3")], {"output": [carrier_item(FOREIGN), assistant_message("x"), carrier_item(NEW)]}
    )
    assert found
    assert (found.text, found.item_index, found.param) == (NEW, -1, "previous_response")
    found = find_carrier([carrier_item(NEW), user("3")], {"output": [carrier_item(NEW)]})
    assert found
    assert (found.text, found.item_index) == (NEW, 0)


@pytest.mark.parametrize(
    ("previous", "why"),
    [
        ("resp_1", "not a response"),
        ({}, "not a response"),
        ({"output": "x"}, "not a response"),
        ({"output": []}, "has no carrier"),
        (
            {
                "output": [
                    assistant_message("x"),
                    7,
                    None,
                    {"type": "reasoning", "encrypted_content": 7},
                ]
            },
            "has no",
        ),
        ({"output": [carrier_item(FOREIGN)]}, "not from this server"),
        ({"output": [carrier_item(OLD)]}, "another carrier"),
    ],
)
def test_a_response_without_one(previous: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        find_carrier([carrier_item(NEW), user("2")], previous)
    assert (caught.value.status, caught.value.param) == (400, "previous_response")


def test_only_the_readable_part_of_a_foreign_item_is_kept() -> None:
    assert extract_readable_part(carrier_item(FOREIGN)) is None
    summary = [{"type": "summary_text", "text": "in short"}]
    item = {**carrier_item(FOREIGN), "summary": summary}
    found = extract_readable_part(item)
    assert found
    assert "encrypted_content" not in found
    assert found["summary"] == summary
    for plain in (
        user("1"),
        reasoning_item("hm"),
        {**reasoning_item("hm"), "encrypted_content": None},
    ):
        assert extract_readable_part(plain) is plain


def test_fields_without_use_for_later_turns_are_dropped() -> None:
    assert drop_unneeded_fields({**assistant_message("x"), "phase": None}) == {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
    }
    assert drop_unneeded_fields(call("a")) == call("a")


# -- histories of format 1 -----------------------------------------------------------------------


def test_chat_messages() -> None:
    function = {"name": "lamp", "arguments": "{}"}
    messages: list[Item] = [
        {"role": "system", "content": "instructions of an earlier turn"},
        {"role": "system", "content": "an item", "type": "message"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:1"}]},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "on it",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "it is on"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]
    found = convert_messages_to_items(messages)
    assert [(item["type"], item.get("role")) for item in found] == [
        ("message", "system"),
        ("message", "user"),
        ("reasoning", None),
        ("message", "assistant"),
        ("function_call", None),
        ("function_call_output", None),
        ("message", "assistant"),
    ]
    assert found[0]["content"] == "an item"
    assert found[4] == {**call("c"), "name": "lamp"}
    assert found[5] == output("c", "it is on")
    assert found[6]["content"][0]["text"] == "done"


def test_harmony_messages() -> None:
    def message(role: str, text: str | None, name: Any = None, **more: Any) -> Item:
        part = {} if text is None else {"type": "text", "text": text}
        return {"author": {"role": role, "name": name}, "content": [part], **more}

    messages = [
        message("system", "x"),
        message("developer", "x"),
        message("user", "light, please"),
        message("assistant", "hm", channel="analysis", recipient=None),
        message("assistant", "{}", channel="commentary", recipient="functions.lamp"),
        message("tool", "it is on", "functions.lamp", channel="commentary"),
        message("assistant", None, channel="analysis"),
        message("assistant", "done", channel="final"),
    ]
    found = convert_messages_to_items(messages)
    assert [item["type"] for item in found] == [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert found[2]["call_id"] == found[3]["call_id"]
    assert (found[2]["name"], found[3]["output"]) == ("lamp", "it is on")
