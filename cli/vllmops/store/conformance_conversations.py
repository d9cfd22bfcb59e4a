"""What a backend promises of conversations, as checks that run against a real one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from msgspec.structs import replace

from .backend import EVERYBODY, CursorUnknown, Query
from .conformance_bench import ANN, BOB, CID, SHORT_S, Bench, Failed, check, response, same
from .conversation_store import Held
from .conversation_store import unpacked as unpacked_entry
from .conversations import Conversation, Entry, Outcome
from .store import ResponseStore

DONE, GONE, LOCKED, TAKEN = Outcome.DONE, Outcome.GONE, Outcome.LOCKED, Outcome.TAKEN


def conversation(name: str = "", *, owner: str = ANN, **rest: object) -> Conversation:
    name = name or f"conv_{secrets.token_hex(8)}"
    return replace(Conversation(id=name, owner=owner), **rest)


def entry(name: str, text: str = "hello") -> Entry:
    return Entry(name, b'{"role":"user","content":"%b"}' % text.encode())


async def said(store: ResponseStore, kept: Conversation) -> list[str]:
    """The ids of a conversation's items."""
    page = await store.conversations.page(
        EVERYBODY, kept.id, after=None, limit=1000, descending=False
    )
    return [one.id for one in page.entries] if page else ["there is none"]


async def held(store: ResponseStore, kept: Conversation, holder: str) -> Held:
    found = await store.conversations.hold(kept.owner, kept.id, holder)
    if not isinstance(found, Held):
        raise Failed(f"{holder!r} could not hold the conversation: {found.value}")
    return found


@check("gives back a conversation as it was stored, and its items in order", conversations=True)
async def kept_whole(bench: Bench) -> None:
    store = await bench.open()
    large = Entry("large", b'{"content":"%b"}' % secrets.token_hex(200_000).encode(), True)
    odd = Entry("id with ' \" % $1 \\ \U0001f600", b'{"content":"\xe2\x82\xac \\u0000"}')
    made = conversation(metadata=b'{"k":"\xe2\x82\xac"}')
    same(await store.conversations.create(made, [odd, large]), DONE, "storing it")
    same(await store.conversations.create(made, []), TAKEN, "storing it again")
    same(await store.conversations.get(ANN, made.id), replace(made, size=2), "what is there")
    more = [entry(f"i{number:03}", str(number)) for number in range(120)]
    for start in range(0, 120, 20):
        same(await store.conversations.add(ANN, made.id, more[start : start + 20]), DONE, "adding")
    wanted = [odd, large, *more]
    for descending in (False, True):
        found: list[Entry] = []
        while True:
            page = await store.conversations.page(
                ANN,
                made.id,
                after=found[-1].id if found else None,
                limit=50,
                descending=descending,
            )
            assert page
            found += page.entries
            if not page.more:
                break
        same(found, wanted[::-1] if descending else wanted, "its items, page by page")
    with contextlib.suppress(CursorUnknown):
        await store.conversations.page(ANN, made.id, after="x", limit=1, descending=True)
        raise Failed("a list began behind an unknown item")
    same(await store.conversations.entry(ANN, made.id, odd.id), odd, "one item")
    same(await store.conversations.entry(ANN, made.id, "x"), None, "an unknown item")
    same(await store.conversations.add(ANN, made.id, [entry("new"), more[3]]), TAKEN, "an id twice")
    same(await store.conversations.delete_entry(ANN, made.id, more[3].id), DONE, "taking one out")
    same(await store.conversations.delete_entry(ANN, made.id, more[3].id), GONE, "and again")
    same(await store.conversations.add(ANN, made.id, [more[3]]), DONE, "its id anew")
    wanted = [odd, large, *more[:3], *more[4:], more[3]]
    hold = await held(store, made, "h")
    same([await unpacked_entry(one) for one in hold.entries], wanted, "what a turn reads")
    same(
        await store.conversations.update(ANN, made.id, b'{"other":"1"}'),
        replace(made, metadata=b'{"other":"1"}', size=len(wanted)),
        "with other metadata",
    )
    same(await store.conversations.get(ANN, "conv_x"), None, "an unknown one")
    same(await store.conversations.add(ANN, "conv_x", [entry("i")]), GONE, "adding to that")
    same(await store.conversations.update(ANN, "conv_x", b"{}"), None, "updating that")


@check("deletes a conversation for good", conversations=True)
async def deleted(bench: Bench) -> None:
    store, other = await bench.open(), await bench.open()
    made = conversation()
    await store.conversations.create(made, [entry("old")])
    hold = await held(store, made, "h")
    same(await other.conversations.delete(ANN, made.id), True, "deleting what is held")
    same(await store.conversations.delete(ANN, made.id), False, "deleting again")
    same(await store.conversations.get(ANN, made.id), None, "what is there")
    same(await store.conversations.entry(ANN, made.id, "old"), None, "its item")
    run = response()
    outcome = await store.conversations.finish(hold, [entry("new")], run, new=True)
    same(outcome, GONE, "ending a turn after that")
    same(await store.get(ANN, run.id), None, "its response")
    await store.conversations.renew()
    same(await store.conversations.hold(ANN, made.id, "h"), GONE, "holding it after that")
    same(await store.conversations.create(made, []), DONE, "its id anew")
    same(await said(store, made), [], "the items of the new one")


@check("adds a turn to its conversation with its response, both or neither", conversations=True)
async def both_or_neither(bench: Bench) -> None:
    store = await bench.open()
    made = conversation()
    await store.conversations.create(made, [entry("a")])
    finish = store.conversations.finish

    first = response("r1")
    hold = await held(store, made, "h1")
    same(await finish(hold, [entry("b"), entry("c")], first, new=True), DONE, "a new response")
    same((await store.get(ANN, "r1"), await said(store, made)), (first, ["a", "b", "c"]), "both")

    hold = await held(store, made, "h2")
    same(await finish(hold, [entry("d")], first, new=True), Outcome.REFUSED, "a taken id")
    same(await finish(hold, [entry("a")], response("r2"), new=True), TAKEN, "an item's id twice")
    same((await store.get(ANN, "r2"), await said(store, made)), (None, ["a", "b", "c"]), "neither")

    run = response("r3", status="in_progress")
    await store.create(run)
    over = replace(run, status="completed", body=b'{"status":"completed"}')
    same(await finish(hold, [entry("d")], over, new=False), DONE, "a run that ends")
    same(
        (await store.get(ANN, "r3"), await said(store, made)), (over, ["a", "b", "c", "d"]), "both"
    )

    hold = await held(store, made, "h4")
    same(await finish(hold, [entry("e")], over, new=False), Outcome.REFUSED, "a run that is over")
    same(await said(store, made), ["a", "b", "c", "d"], "its conversation")
    same(await finish(hold, [entry("e")], None, new=False), DONE, "a turn without a response")
    same(await said(store, made), ["a", "b", "c", "d", "e"], "its conversation")


@check("adds thousands of items in one turn", conversations=True)
async def many(bench: Bench) -> None:
    store = await bench.open()
    names = [f"i{number}" for number in range(6000)]
    made, other = conversation(), conversation()
    items = [entry(name) for name in names]
    same(await store.conversations.create(other, items), DONE, "creating a conversation of many")
    await store.conversations.create(made, [])
    hold = await held(store, made, "h")
    outcome = await store.conversations.finish(hold, items, response("r1"), new=True)
    same(outcome, DONE, "ending a turn with many")
    for each in (made, other):
        same([one.id for one in (await held(store, each, "h2")).entries], names, "its items")


@check("makes room for a response that a turn stores", conversations=True)
async def room(bench: Bench) -> None:
    store = await bench.open(max_size=4)
    made = conversation()
    await store.conversations.create(made, [])
    for number in range(8):
        hold = await held(store, made, f"h{number}")
        outcome = await store.conversations.finish(hold, [], response(f"r{number}"), new=True)
        same(outcome, DONE, "ending a turn")
    page = await store.page(ANN, Query(descending=False))
    same([one.id for one in page.responses], ["r4", "r5", "r6", "r7"], "what is left")


@check("lets one turn at a time hold a conversation", conversations=True)
async def one_at_a_time(bench: Bench) -> None:
    stores = [await bench.open(), await bench.open()]
    made = conversation()
    await stores[0].conversations.create(made, [entry("a")])

    async def turn(number: int) -> bool:
        store = stores[number % 2]
        hold = await store.conversations.hold(ANN, made.id, f"h{number}")
        if not isinstance(hold, Held):
            same(hold, LOCKED, "why a turn can't hold it")
            return False
        before = [one.id for one in hold.entries]
        await asyncio.sleep(0.02)
        added = [entry(f"q{number}"), entry(f"a{number}")]
        same(await store.conversations.finish(hold, added, None, new=True), DONE, "ending a turn")
        now = await said(store, made)
        same(now[: len(before) + 2], [*before, *(one.id for one in added)], "what a turn leaves")
        return True

    for _ in range(5):
        done = await asyncio.gather(*(turn(number) for number in range(10)))
        await stores[0].conversations.delete(ANN, made.id)
        await stores[0].conversations.create(made, [entry("a")])
        if not any(done):
            raise Failed("none of ten turns could hold it")
    hold = await held(stores[0], made, "h")
    for attempt in (
        stores[1].conversations.add(ANN, made.id, [entry("b")]),
        stores[1].conversations.delete_entry(ANN, made.id, "a"),
        stores[1].conversations.hold(ANN, made.id, "other"),
    ):
        same(await attempt, LOCKED, "changing what another holds")
    await stores[1].backend.release(made.id, "other")
    same(
        await stores[1].conversations.hold(ANN, made.id, "other"), LOCKED, "after another's release"
    )
    await held(stores[0], made, "h")
    await stores[0].conversations.release(hold)
    same(await stores[1].conversations.add(ANN, made.id, [entry("b")]), DONE, "once it is free")


@check("lets go of a conversation whose server has gone", conversations=True)
async def lapse(bench: Bench) -> None:
    store, other = await bench.open(lease_s=SHORT_S), await bench.open(lease_s=SHORT_S)
    made = conversation()
    await store.conversations.create(made, [])
    hold = await held(store, made, "h1")
    for _ in range(4):
        await asyncio.sleep(SHORT_S / 3)
        await store.conversations.renew()
    same(await other.conversations.hold(ANN, made.id, "h2"), LOCKED, "what is renewed")
    store.conversations.holds.clear()
    await asyncio.sleep(SHORT_S + 0.2)
    second = await held(other, made, "h2")
    finish = store.conversations.finish
    same(await finish(hold, [entry("a")], response("r"), new=True), LOCKED, "the first one's end")
    same(await store.get(ANN, "r"), None, "its response")
    store.conversations.holds.add(hold)
    await store.conversations.renew()
    outcome = await other.conversations.finish(second, [entry("b")], None, new=True)
    same((outcome, await said(store, made)), (DONE, ["b"]), "the second one's end")
    await held(store, made, "h3")
    store.conversations.holds.clear()
    await asyncio.sleep(SHORT_S + 0.2)
    same(await store.conversations.add(ANN, made.id, [entry("c")]), DONE, "adding after a lapse")
    lost = Held(made.id, ANN, "h3", [])
    same(await finish(lost, [entry("d")], None, new=True), LOCKED, "a turn that was overtaken")
    late = await held(store, made, "h4")
    await asyncio.sleep(SHORT_S + 0.2)
    outcome = await finish(late, [entry("e")], None, new=True)
    same((outcome, await said(store, made)), (DONE, ["b", "c", "e"]), "a late end, in nobody's way")


@check("keeps the conversations of owners apart", conversations=True)
async def apart(bench: Bench) -> None:
    store = await bench.open()
    kept = store.conversations
    made = conversation()
    await kept.create(made, [entry("a")])
    for owner in (BOB, ""):
        same(await kept.get(owner, made.id), None, "what another gets")
        same(await kept.update(owner, made.id, b"{}"), None, "what he updates")
        same(await kept.delete(owner, made.id), False, "what he deletes")
        page = await kept.page(owner, made.id, after=None, limit=9, descending=True)
        same(page, None, "his page")
        same(await kept.entry(owner, made.id, "a"), None, "his item")
        same(await kept.delete_entry(owner, made.id, "a"), GONE, "what he takes out")
        same(await kept.add(owner, made.id, [entry("b")]), GONE, "what he adds")
        same(await kept.hold(owner, made.id, "h"), GONE, "what he holds")
        same(await kept.list(owner, None, 9), [], "his list")
        same(await kept.create(replace(made, owner=owner), []), TAKEN, "taking its id")
    same(await said(store, made), ["a"], "its items")
    whole = replace(made, size=1)
    newer = conversation(owner=BOB, created_at=made.created_at + 1)
    await kept.create(newer, [])
    same(await kept.list(ANN, None, 9), [whole], "the owner's list")
    same(await kept.list(EVERYBODY, None, 9), [newer, whole], "everybody's list")
    same(await kept.list(EVERYBODY, newer.id, 9), [whole], "behind the newest")
    with contextlib.suppress(CursorUnknown):
        await kept.list(ANN, newer.id, 9)
        raise Failed("another's conversation was taken as the list's beginning")


@check("keeps no more conversations and items than it may, and for no longer", conversations=True)
async def bounds(bench: Bench) -> None:
    store = await bench.open(max_size=4, max_per_key=3, max_items=5, ttl_s=1.5)
    kept = store.conversations

    async def left() -> list[str]:
        return sorted(one.id for one in await kept.list(EVERYBODY, None, 99))

    for name, owner in (("b1", BOB), ("a1", ANN), ("a2", ANN), ("a3", ANN)):
        await kept.create(conversation(name, owner=owner), [])
    await kept.get(ANN, "a1")
    await kept.create(conversation("a4"), [])
    same(await left(), ["a1", "a3", "a4", "b1"], "once a2 was used longest ago of Ann's")
    hold = await kept.hold(ANN, "a3", "h")
    await kept.create(conversation("c1", owner=CID), [])
    same(await left(), ["a3", "a4", "b1", "c1"], "once all had too many, and Ann most")
    await kept.create(conversation("c2", owner=CID), [])
    same(await left(), ["a3", "b1", "c1", "c2"], "once a3 was held, and a4 was not")
    full = [entry(f"i{number}") for number in range(5)]
    same(await kept.add(CID, "c1", full), DONE, "as many items as may be")
    same(await kept.add(CID, "c1", [entry("x")]), Outcome.FULL, "one more")
    await asyncio.sleep(1)
    await kept.get(CID, "c2")
    await asyncio.sleep(0.7)
    await store.sweep()
    same(await left(), ["a3", "c2"], "what was used, or is held")
    del hold
