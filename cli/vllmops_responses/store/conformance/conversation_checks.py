"""What a backend promises of conversations, as checks that run against a real one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from msgspec.structs import replace

from ..backend import EVERYBODY, CursorUnknown, ResponseQuery
from ..conversation_backend import Conversation, ConversationItem, ConversationResult
from ..conversation_store import ConversationHold
from ..conversation_store import try_unpack_item as unpacked_entry
from ..response_store import ResponseStore
from .check_harness import (
    ANN,
    BOB,
    CID,
    SHORT_S,
    CheckFailed,
    StoreBench,
    expect_equal,
    make_response,
    register_check,
)

DONE, GONE, LOCKED, TAKEN = (
    ConversationResult.DONE,
    ConversationResult.GONE,
    ConversationResult.LOCKED,
    ConversationResult.TAKEN,
)


def make_conversation(name: str = "", *, owner: str = ANN, **rest: object) -> Conversation:
    name = name or f"conv_{secrets.token_hex(8)}"
    return replace(Conversation(id=name, owner=owner), **rest)


def make_item(name: str, text: str = "hello") -> ConversationItem:
    return ConversationItem(name, b'{"role":"user","content":"%b"}' % text.encode())


async def list_item_ids(store: ResponseStore, conversation: Conversation) -> list[str]:
    """The ids of a conversation's items."""
    page = await store.conversations.list_items(
        EVERYBODY, conversation.id, after_id=None, limit=1000, descending=False
    )
    return [one.id for one in page.entries] if page else ["there is none"]


async def hold_or_fail(
    store: ResponseStore, conversation: Conversation, holder: str
) -> ConversationHold:
    found = await store.conversations.hold(conversation.owner, conversation.id, holder)
    if not isinstance(found, ConversationHold):
        raise CheckFailed(f"{holder!r} could not hold the conversation: {found.value}")
    return found


@register_check(
    "gives back a conversation as it was stored, and its items in order", conversations=True
)
async def check_conversation_round_trip(bench: StoreBench) -> None:
    store = await bench.open_store()
    large = ConversationItem(
        "large", b'{"content":"%b"}' % secrets.token_hex(200_000).encode(), True
    )
    odd = ConversationItem("id with ' \" % $1 \\ \U0001f600", b'{"content":"\xe2\x82\xac \\u0000"}')
    made = make_conversation(metadata=b'{"k":"\xe2\x82\xac"}')
    expect_equal(await store.conversations.create(made, [odd, large]), DONE, "storing it")
    expect_equal(await store.conversations.create(made, []), TAKEN, "storing it again")
    expect_equal(
        await store.conversations.get(ANN, made.id), replace(made, size=2), "what is there"
    )
    more = [make_item(f"i{number:03}", str(number)) for number in range(120)]
    for start in range(0, 120, 20):
        expect_equal(
            await store.conversations.add_items(ANN, made.id, more[start : start + 20]),
            DONE,
            "adding",
        )
    wanted = [odd, large, *more]
    for descending in (False, True):
        found: list[ConversationItem] = []
        while True:
            page = await store.conversations.list_items(
                ANN,
                made.id,
                after_id=found[-1].id if found else None,
                limit=50,
                descending=descending,
            )
            assert page
            found += page.entries
            if not page.has_more:
                break
        expect_equal(found, wanted[::-1] if descending else wanted, "its items, page by page")
    with contextlib.suppress(CursorUnknown):
        await store.conversations.list_items(ANN, made.id, after_id="x", limit=1, descending=True)
        raise CheckFailed("a list began behind an unknown item")
    expect_equal(await store.conversations.get_item(ANN, made.id, odd.id), odd, "one item")
    expect_equal(await store.conversations.get_item(ANN, made.id, "x"), None, "an unknown item")
    expect_equal(
        await store.conversations.add_items(ANN, made.id, [make_item("new"), more[3]]),
        TAKEN,
        "an id twice",
    )
    expect_equal(
        await store.conversations.remove_item(ANN, made.id, more[3].id), DONE, "taking one out"
    )
    expect_equal(await store.conversations.remove_item(ANN, made.id, more[3].id), GONE, "and again")
    expect_equal(await store.conversations.add_items(ANN, made.id, [more[3]]), DONE, "its id anew")
    wanted = [odd, large, *more[:3], *more[4:], more[3]]
    hold = await hold_or_fail(store, made, "h")
    expect_equal([await unpacked_entry(one) for one in hold.entries], wanted, "what a turn reads")
    expect_equal(
        await store.conversations.set_metadata(ANN, made.id, b'{"other":"1"}'),
        replace(made, metadata=b'{"other":"1"}', size=len(wanted)),
        "with other metadata",
    )
    expect_equal(await store.conversations.get(ANN, "conv_x"), None, "an unknown one")
    expect_equal(
        await store.conversations.add_items(ANN, "conv_x", [make_item("i")]), GONE, "adding to that"
    )
    expect_equal(
        await store.conversations.set_metadata(ANN, "conv_x", b"{}"), None, "updating that"
    )


@register_check("deletes a conversation for good", conversations=True)
async def check_conversation_delete(bench: StoreBench) -> None:
    store, other = await bench.open_store(), await bench.open_store()
    made = make_conversation()
    await store.conversations.create(made, [make_item("old")])
    hold = await hold_or_fail(store, made, "h")
    expect_equal(await other.conversations.delete(ANN, made.id), True, "deleting what is held")
    expect_equal(await store.conversations.delete(ANN, made.id), False, "deleting again")
    expect_equal(await store.conversations.get(ANN, made.id), None, "what is there")
    expect_equal(await store.conversations.get_item(ANN, made.id, "old"), None, "its item")
    run = make_response()
    outcome = await store.conversations.finish_turn(hold, [make_item("new")], run, is_new=True)
    expect_equal(outcome, GONE, "ending a turn after that")
    expect_equal(await store.get(ANN, run.id), None, "its response")
    await store.conversations.renew_holds()
    expect_equal(await store.conversations.hold(ANN, made.id, "h"), GONE, "holding it after that")
    expect_equal(await store.conversations.create(made, []), DONE, "its id anew")
    expect_equal(await list_item_ids(store, made), [], "the items of the new one")


@register_check(
    "adds a turn to its conversation with its response, both or neither", conversations=True
)
async def check_atomic_turns(bench: StoreBench) -> None:
    store = await bench.open_store()
    made = make_conversation()
    await store.conversations.create(made, [make_item("a")])
    finish = store.conversations.finish_turn

    first = make_response("r1")
    hold = await hold_or_fail(store, made, "h1")
    expect_equal(
        await finish(hold, [make_item("b"), make_item("c")], first, is_new=True),
        DONE,
        "a new response",
    )
    expect_equal(
        (await store.get(ANN, "r1"), await list_item_ids(store, made)),
        (first, ["a", "b", "c"]),
        "both",
    )

    hold = await hold_or_fail(store, made, "h2")
    expect_equal(
        await finish(hold, [make_item("d")], first, is_new=True),
        ConversationResult.REFUSED,
        "a taken id",
    )
    expect_equal(
        await finish(hold, [make_item("a")], make_response("r2"), is_new=True),
        TAKEN,
        "an item's id twice",
    )
    expect_equal(
        (await store.get(ANN, "r2"), await list_item_ids(store, made)),
        (None, ["a", "b", "c"]),
        "neither",
    )

    run = make_response("r3", status="in_progress")
    await store.create(run)
    over = replace(run, status="completed", body=b'{"status":"completed"}')
    expect_equal(await finish(hold, [make_item("d")], over, is_new=False), DONE, "a run that ends")
    expect_equal(
        (await store.get(ANN, "r3"), await list_item_ids(store, made)),
        (over, ["a", "b", "c", "d"]),
        "both",
    )

    hold = await hold_or_fail(store, made, "h4")
    expect_equal(
        await finish(hold, [make_item("e")], over, is_new=False),
        ConversationResult.REFUSED,
        "a run that is over",
    )
    expect_equal(await list_item_ids(store, made), ["a", "b", "c", "d"], "its conversation")
    expect_equal(
        await finish(hold, [make_item("e")], None, is_new=False), DONE, "a turn without a response"
    )
    expect_equal(await list_item_ids(store, made), ["a", "b", "c", "d", "e"], "its conversation")


@register_check("adds thousands of items in one turn", conversations=True)
async def check_large_turns(bench: StoreBench) -> None:
    store = await bench.open_store()
    names = [f"i{number}" for number in range(6000)]
    made, other = make_conversation(), make_conversation()
    items = [make_item(name) for name in names]
    expect_equal(
        await store.conversations.create(other, items), DONE, "creating a conversation of many"
    )
    await store.conversations.create(made, [])
    hold = await hold_or_fail(store, made, "h")
    outcome = await store.conversations.finish_turn(hold, items, make_response("r1"), is_new=True)
    expect_equal(outcome, DONE, "ending a turn with many")
    for each in (made, other):
        expect_equal(
            [one.id for one in (await hold_or_fail(store, each, "h2")).entries], names, "its items"
        )


@register_check("makes room for a response that a turn stores", conversations=True)
async def check_turn_eviction(bench: StoreBench) -> None:
    store = await bench.open_store(max_size=4)
    made = make_conversation()
    await store.conversations.create(made, [])
    for number in range(8):
        hold = await hold_or_fail(store, made, f"h{number}")
        outcome = await store.conversations.finish_turn(
            hold, [], make_response(f"r{number}"), is_new=True
        )
        expect_equal(outcome, DONE, "ending a turn")
    page = await store.list_responses(ANN, ResponseQuery(descending=False))
    expect_equal([one.id for one in page.responses], ["r4", "r5", "r6", "r7"], "what is left")


@register_check("lets one turn at a time hold a conversation", conversations=True)
async def check_exclusive_hold(bench: StoreBench) -> None:
    stores = [await bench.open_store(), await bench.open_store()]
    made = make_conversation()
    await stores[0].conversations.create(made, [make_item("a")])

    async def attempt_turn(number: int) -> bool:
        store = stores[number % 2]
        hold = await store.conversations.hold(ANN, made.id, f"h{number}")
        if not isinstance(hold, ConversationHold):
            expect_equal(hold, LOCKED, "why a turn can't hold it")
            return False
        before = [one.id for one in hold.entries]
        await asyncio.sleep(0.02)
        added = [make_item(f"q{number}"), make_item(f"a{number}")]
        expect_equal(
            await store.conversations.finish_turn(hold, added, None, is_new=True),
            DONE,
            "ending a turn",
        )
        now = await list_item_ids(store, made)
        expect_equal(
            now[: len(before) + 2], [*before, *(one.id for one in added)], "what a turn leaves"
        )
        return True

    for _ in range(5):
        done = await asyncio.gather(*(attempt_turn(number) for number in range(10)))
        await stores[0].conversations.delete(ANN, made.id)
        await stores[0].conversations.create(made, [make_item("a")])
        if not any(done):
            raise CheckFailed("none of ten turns could hold it")
    hold = await hold_or_fail(stores[0], made, "h")
    for attempt in (
        stores[1].conversations.add_items(ANN, made.id, [make_item("b")]),
        stores[1].conversations.remove_item(ANN, made.id, "a"),
        stores[1].conversations.hold(ANN, made.id, "other"),
    ):
        expect_equal(await attempt, LOCKED, "changing what another holds")
    await stores[1].backend.release_conversation(made.id, "other")
    expect_equal(
        await stores[1].conversations.hold(ANN, made.id, "other"), LOCKED, "after another's release"
    )
    await hold_or_fail(stores[0], made, "h")
    await stores[0].conversations.release_hold(hold)
    expect_equal(
        await stores[1].conversations.add_items(ANN, made.id, [make_item("b")]),
        DONE,
        "once it is free",
    )


@register_check("lets go of a conversation whose server has gone", conversations=True)
async def check_hold_lapse(bench: StoreBench) -> None:
    store, other = await bench.open_store(lease_s=SHORT_S), await bench.open_store(lease_s=SHORT_S)
    made = make_conversation()
    await store.conversations.create(made, [])
    hold = await hold_or_fail(store, made, "h1")
    for _ in range(4):
        await asyncio.sleep(SHORT_S / 3)
        await store.conversations.renew_holds()
    expect_equal(await other.conversations.hold(ANN, made.id, "h2"), LOCKED, "what is renewed")
    store.conversations.holds.clear()
    await asyncio.sleep(SHORT_S + 0.2)
    second = await hold_or_fail(other, made, "h2")
    finish = store.conversations.finish_turn
    expect_equal(
        await finish(hold, [make_item("a")], make_response("r"), is_new=True),
        LOCKED,
        "the first one's end",
    )
    expect_equal(await store.get(ANN, "r"), None, "its response")
    store.conversations.holds.add(hold)
    await store.conversations.renew_holds()
    outcome = await other.conversations.finish_turn(second, [make_item("b")], None, is_new=True)
    expect_equal((outcome, await list_item_ids(store, made)), (DONE, ["b"]), "the second one's end")
    await hold_or_fail(store, made, "h3")
    store.conversations.holds.clear()
    await asyncio.sleep(SHORT_S + 0.2)
    expect_equal(
        await store.conversations.add_items(ANN, made.id, [make_item("c")]),
        DONE,
        "adding after a lapse",
    )
    lost = ConversationHold(made.id, ANN, "h3", [])
    expect_equal(
        await finish(lost, [make_item("d")], None, is_new=True), LOCKED, "a turn that was overtaken"
    )
    late = await hold_or_fail(store, made, "h4")
    await asyncio.sleep(SHORT_S + 0.2)
    outcome = await finish(late, [make_item("e")], None, is_new=True)
    expect_equal(
        (outcome, await list_item_ids(store, made)),
        (DONE, ["b", "c", "e"]),
        "a late end, in nobody's way",
    )


@register_check("keeps the conversations of owners apart", conversations=True)
async def check_conversation_owners(bench: StoreBench) -> None:
    store = await bench.open_store()
    kept = store.conversations
    made = make_conversation()
    await kept.create(made, [make_item("a")])
    for owner in (BOB, ""):
        expect_equal(await kept.get(owner, made.id), None, "what another gets")
        expect_equal(await kept.set_metadata(owner, made.id, b"{}"), None, "what he updates")
        expect_equal(await kept.delete(owner, made.id), False, "what he deletes")
        page = await kept.list_items(owner, made.id, after_id=None, limit=9, descending=True)
        expect_equal(page, None, "his page")
        expect_equal(await kept.get_item(owner, made.id, "a"), None, "his item")
        expect_equal(await kept.remove_item(owner, made.id, "a"), GONE, "what he takes out")
        expect_equal(await kept.add_items(owner, made.id, [make_item("b")]), GONE, "what he adds")
        expect_equal(await kept.hold(owner, made.id, "h"), GONE, "what he holds")
        expect_equal(await kept.list_conversations(owner, None, 9), [], "his list")
        expect_equal(await kept.create(replace(made, owner=owner), []), TAKEN, "taking its id")
    expect_equal(await list_item_ids(store, made), ["a"], "its items")
    whole = replace(made, size=1)
    newer = make_conversation(owner=BOB, created_at=made.created_at + 1)
    await kept.create(newer, [])
    expect_equal(await kept.list_conversations(ANN, None, 9), [whole], "the owner's list")
    expect_equal(
        await kept.list_conversations(EVERYBODY, None, 9), [newer, whole], "everybody's list"
    )
    expect_equal(
        await kept.list_conversations(EVERYBODY, newer.id, 9), [whole], "behind the newest"
    )
    with contextlib.suppress(CursorUnknown):
        await kept.list_conversations(ANN, newer.id, 9)
        raise CheckFailed("another's conversation was taken as the list's beginning")


@register_check(
    "keeps no more conversations and items than it may, and for no longer", conversations=True
)
async def check_conversation_limits(bench: StoreBench) -> None:
    store = await bench.open_store(max_size=4, max_per_key=3, max_items=5, ttl_s=1.5)
    kept = store.conversations

    async def list_conversation_ids() -> list[str]:
        return sorted(one.id for one in await kept.list_conversations(EVERYBODY, None, 99))

    for name, owner in (("b1", BOB), ("a1", ANN), ("a2", ANN), ("a3", ANN)):
        await kept.create(make_conversation(name, owner=owner), [])
    await kept.get(ANN, "a1")
    await kept.create(make_conversation("a4"), [])
    expect_equal(
        await list_conversation_ids(),
        ["a1", "a3", "a4", "b1"],
        "once a2 was used longest ago of Ann's",
    )
    hold = await kept.hold(ANN, "a3", "h")
    await kept.create(make_conversation("c1", owner=CID), [])
    expect_equal(
        await list_conversation_ids(),
        ["a3", "a4", "b1", "c1"],
        "once all had too many, and Ann most",
    )
    await kept.create(make_conversation("c2", owner=CID), [])
    expect_equal(
        await list_conversation_ids(), ["a3", "b1", "c1", "c2"], "once a3 was held, and a4 was not"
    )
    full = [make_item(f"i{number}") for number in range(5)]
    expect_equal(await kept.add_items(CID, "c1", full), DONE, "as many items as may be")
    expect_equal(
        await kept.add_items(CID, "c1", [make_item("x")]), ConversationResult.FULL, "one more"
    )
    await asyncio.sleep(1)
    await kept.get(CID, "c2")
    await asyncio.sleep(0.7)
    await store.sweep()
    expect_equal(await list_conversation_ids(), ["a3", "c2"], "what was used, or is held")
    del hold
