"""``vllmops conversations`` on real stores."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vllmops.support.errors import ExitCode
from vllmops_responses.commands.conversations import store_options
from vllmops_responses.store.backend import EVERYBODY
from vllmops_responses.store.conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
)
from vllmops_responses.store.store_source import DirectStore

ONE, TWO = (hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two"))
Kept = dict[str, tuple[Conversation, list[ConversationItem] | None]]


def conversation(number: int, owner: str = ONE) -> Conversation:
    """The higher the number, the newer."""
    return Conversation(
        id=f"conv_{number:04x}",
        owner=owner,
        created_at=1_700_000_000.25 + number,
        metadata=b'{"user":"u%d"}' % number,
    )


def entries(count: int) -> list[ConversationItem]:
    return [
        ConversationItem(
            f"msg_{number}",
            json.dumps(
                {"type": "message", "role": "user", "content": f"line {number}\u2028 😀"}
            ).encode(),
            answer=number % 2 == 1,
        )
        for number in range(count)
    ]


def fill(url: str, *sizes: int) -> None:
    async def run() -> None:
        async with DirectStore(url, create=True) as kept:
            for number, size in enumerate(sizes):
                made = conversation(number, TWO if number % 2 else ONE)
                outcome = await kept.store.conversations.create(made, entries(size))
                assert outcome is ConversationResult.DONE

    asyncio.run(run())


def read_conversations(url: str) -> Kept:
    """All that a store has."""

    async def run() -> Kept:
        async with store_options.open_conversations(None, url) as (_, found):
            return {
                one.id: (one, await store_options.load_items(found, one.id))
                async for one in store_options.iterate_conversations(found)
            }

    return asyncio.run(run())


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/a.db"
    fill(url, 3, 0, 250)
    return url


def test_a_list_has_those_of_all_keys_the_newest_first(vllmops: Any, store: str) -> None:
    words = ("conversations", "list", "--store", store)
    data = vllmops(*words, "--json").data
    shown = [(one["id"], one["items"], one["owner"]) for one in data["conversations"]]
    assert shown == [("conv_0002", 250, ONE), ("conv_0001", 0, TWO), ("conv_0000", 3, ONE)]
    assert data["conversations"][0]["metadata"] == {"user": "u2"}
    assert data["next"] is None
    page = vllmops(*words, "-n", "1", "--json").data
    assert page["next"] == "conv_0002"
    rest = vllmops(*words, "--after", "conv_0002", "--json").data["conversations"]
    assert [one["id"] for one in rest] == ["conv_0001", "conv_0000"]
    assert "--after conv_0002" in vllmops(*words, "-n", "1").out
    for unknown in ("nix", "\udcff"):
        assert vllmops(*words, "--after", unknown, "--json").code == ExitCode.USAGE


def test_more_than_a_page_is_listed_whole(vllmops: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/many.db"
    fill(url, *[0] * 203)
    words = ("conversations", "list", "--store", url, "--json")
    assert len(vllmops(*words, "--all").data["conversations"]) == 203
    assert len(vllmops(*words, "-n", "150").data["conversations"]) == 150


def test_show_prints_a_conversation_with_all_items(vllmops: Any, store: str) -> None:
    words = ("conversations", "show", "conv_0002", "--store", store)
    data = vllmops(*words, "--json").data
    assert [one["id"] for one in data["items"]] == [f"msg_{number}" for number in range(250)]
    assert data["items"][1]["answer"] is True
    assert data["items"][0]["item"]["content"] == "line 0\u2028 😀"
    text = vllmops(*words).out
    assert "msg_249" in text
    assert "line 249" in text
    missing = vllmops("conversations", "show", "nix", "--store", store, "--json")
    assert (missing.code, missing.error["code"]) == (ExitCode.NOT_FOUND, "conversations.unknown")


def test_delete_removes_conversations_and_names_missing_ones(vllmops: Any, store: str) -> None:
    words = ("conversations", "delete", "--store", store)
    answer = vllmops(*words, "conv_0000", "nix", "conv_0001", "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.NOT_FOUND, "conversations.unknown")
    assert "nix" in answer.error["message"]
    assert read_conversations(store).keys() == {"conv_0002"}
    assert vllmops(*words, "conv_0002").out == "conv_0002  deleted\n"
    assert "no conversations" in vllmops("conversations", "list", "--store", store).out


def test_old_ones_are_purged(vllmops: Any, store: str) -> None:
    fresh = Conversation(id="conv_new", owner=TWO)

    async def add() -> None:
        async with DirectStore(store) as opened:
            assert (
                await opened.store.conversations.create(fresh, entries(2))
                is ConversationResult.DONE
            )

    asyncio.run(add())
    words = ("conversations", "purge", "--store", store)
    assert vllmops(*words, "--json").error["code"] == "usage"
    planned = vllmops(*words, "--older-than", "1d", "--dry-run", "--json").data
    assert [one["id"] for one in planned["conversations"]] == [
        "conv_0002",
        "conv_0001",
        "conv_0000",
    ]
    asked = vllmops(*words, "--older-than", "1d")
    assert asked.code == ExitCode.USAGE
    assert "3 of 4 conversations" in asked.err
    assert len(read_conversations(store)) == 4
    assert vllmops(*words, "--older-than", "1d", "--yes").out == "3 deleted\n"
    assert read_conversations(store).keys() == {"conv_new"}
    assert vllmops(*words, "--older-than", "1d", "--yes").out == "nothing to delete\n"


@pytest.mark.parametrize("url", ["sqlite", "postgresql", "redis"], indirect=True)
def test_an_export_is_read_by_every_store(
    vllmops: Any, store: str, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    answer = vllmops("conversations", "export", "--store", store, "-o", str(file), "--json")
    assert answer.data["count"] == 3
    words = ("conversations", "import", str(file), "--store", url, "--json")
    assert vllmops(*words).data["count"] == 3
    assert read_conversations(url) == read_conversations(store)
    again = vllmops(*words).data
    assert (again["count"], again["skipped"]) == (0, 3)


def test_broken_lines_are_named_and_the_others_imported(
    vllmops: Any, store: str, tmp_path: Path
) -> None:
    file, other = tmp_path / "a.jsonl", f"sqlite:///{tmp_path}/b.db"
    vllmops("conversations", "export", "--store", store, "-o", str(file))
    good = file.read_bytes().splitlines()[0]
    whole = json.loads(good)
    twice = {**whole, "items": whole["items"][:1] * 2}
    foreign = {**whole, "conversation": {**whole["conversation"], "owner": "me"}}
    bad = [b"{}", b"[" * 5000, b"\xff", *(json.dumps(one).encode() for one in (twice, foreign))]
    file.write_bytes(b"\n".join([*bad, b"", good]))
    answer = vllmops("conversations", "import", str(file), "--store", other, "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "conversations.broken")
    assert [one["line"] for one in answer.data["broken"]] == [1, 2, 3, 4, 5]
    assert read_conversations(other).keys() == {"conv_0002"}


def test_an_export_of_the_other_kind_is_named(vllmops: Any, store: str, tmp_path: Path) -> None:
    file, other = tmp_path / "a.jsonl", f"sqlite:///{tmp_path}/b.db"
    vllmops("conversations", "export", "--store", store, "-o", str(file))
    answer = vllmops("responses", "import", str(file), "--store", other)
    assert "it is a conversation: vllmops conversations import reads it" in answer.out


def test_a_damaged_one_is_left_out_of_an_export_and_named(
    vllmops: Any, store: str, tmp_path: Path
) -> None:
    async def damage() -> None:
        async with DirectStore(store) as opened:
            broken = ConversationItem("msg_x", b"\x02broken")
            backend = opened.store.backend
            made = Conversation(id="conv_bad", owner=ONE, metadata=b"\x00{}")
            assert await backend.create_conversation(made, [broken]) is ConversationResult.DONE

    asyncio.run(damage())
    file = tmp_path / "a.jsonl"
    answer = vllmops("conversations", "export", "--store", store, "-o", str(file), "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.FAILED, "conversations.broken")
    assert answer.data["damaged"].keys() == {"conv_bad"}
    assert len(file.read_text().split("\n")) == 4
    shown = vllmops("conversations", "show", "conv_bad", "--store", store)
    assert (shown.code, "damaged" in shown.out) == (0, True)


def test_an_export_has_nothing_that_import_does_not_take(
    vllmops: Any, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_options, "LONGEST_LINE", 2000)
    file, other = tmp_path / "a.jsonl", f"sqlite:///{tmp_path}/b.db"
    answer = vllmops("conversations", "export", "--store", store, "-o", str(file), "--json")
    assert (answer.code, answer.data["damaged"].keys()) == (ExitCode.FAILED, {"conv_0002"})
    assert vllmops("conversations", "import", str(file), "--store", other).code == 0
    assert read_conversations(other).keys() == {"conv_0000", "conv_0001"}


def test_a_store_of_one_process_can_not_be_read(vllmops: Any) -> None:
    answer = vllmops("conversations", "list", "--store", "memory://", "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, "usage")


def test_deletion_during_iteration_does_not_end_it(store: str) -> None:
    async def run() -> list[str]:
        async with store_options.open_conversations(None, store) as (_, found):
            seen = []
            async for one in store_options.iterate_conversations(found, page=1):
                seen.append(one.id)
                await found.delete(EVERYBODY, one.id)
            return seen

    assert asyncio.run(run()) == ["conv_0002", "conv_0001", "conv_0000"]
