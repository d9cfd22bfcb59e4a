"""What every backend promises, as checks that run against a real one.

``vllmops responses check-store URL`` runs them on a store of their own beside what is kept there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ..errors import VllmopsError
from . import conformance_conversations as _checks_of_conversations
from . import opening
from .backend import EVERYBODY, FINISHED, GONE, ConversationBroken, CursorUnknown, Query, Response
from .conformance_bench import (
    ANN,
    BOB,
    CHECKS,
    CID,
    OF_CONVERSATIONS,
    SHORT_S,
    Bench,
    Check,
    Failed,
    check,
    response,
    same,
)
from .conversations import supported
from .store import ResponseStore, document, unpacked

__all__ = ["CHECKS", "CheckResult", "judge", "probe", "response", "run"]

assert _checks_of_conversations  # which adds them
CHECK_S = 60
AT_ONCE = 4


class CheckResult(NamedTuple):
    """What became of a check.

    Args:
        name: what the backend promises.
        problem: how it broke that, empty where it did not.
        seconds: that it took.
    """

    name: str
    problem: str
    seconds: float


async def probe(url: str) -> list[str]:
    """See whether a store can be checked; says how it could lose what it has acknowledged.

    Args:
        url: as `opening.backend` takes it; a user's own class has to be empty.

    Raises:
        VllmopsError: ``store.unavailable``, ``store.schema`` or ``store.not-empty``.
    """
    opening.backend(url)  # tells what is wrong with it as it was given
    bench = Bench(scratch(url))
    store = await bench.open()
    count = (await store.stats(EVERYBODY)).count
    if count:
        await store.close()
        raise VllmopsError(
            "store.not-empty",
            f"{count} responses are in the store, and the checks would delete them",
            "an empty store",
        )
    try:
        async with store.bounded():
            caveats = await store.backend.caveats()
    finally:
        await bench.close()
    if not keeps_conversations(url):
        caveats.append("it keeps no conversations: /v1/conversations and `conversation` get 501")
    return caveats


def keeps_conversations(url: str) -> bool:
    """Whether the backend of a URL keeps conversations."""
    try:
        supported(opening.backend(url))
    except VllmopsError:
        return False
    return True


async def run(url: str) -> AsyncIterator[CheckResult]:
    """Run every check on a store of its own, as `probe` has found it can be.

    Several at a time, for they mostly sleep; but a user's own class knows of no namespaces.
    """
    places = asyncio.Semaphore(1 if opening.CLASS in os.environ else AT_ONCE)

    async def one(name: str, function: Check) -> CheckResult:
        async with places:
            return await judge(name, function, scratch(url))

    skipped = set() if keeps_conversations(url) else OF_CONVERSATIONS
    checks = [item for item in CHECKS.items() if item[0] not in skipped]
    for task in [asyncio.create_task(one(*item)) for item in checks]:
        yield await task


def scratch(url: str) -> str:
    """The same database, and a store in it that nobody else has."""
    plain, _ = opening.namespace(url)
    return f"{plain}{'&' if '?' in plain else '?'}namespace=check_{secrets.token_hex(4)}"


async def judge(name: str, function: Check, url: str) -> CheckResult:
    bench, began, problem = Bench(url), time.monotonic(), ""
    try:
        async with asyncio.timeout(CHECK_S):
            await function(bench)
    except Exception as error:
        problem = f"{error}" if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(Exception):
            await bench.close()
    return CheckResult(name, problem, time.monotonic() - began)


def ids(responses: list[Response]) -> list[str]:
    return [item.id for item in responses]


async def status_of(store: ResponseStore, made: Response) -> str | None:
    found = await store.get(made.owner, made.id)
    return found.status if found else None


@check("gives back what was stored")
async def round_trip(bench: Bench) -> None:
    store = await bench.open()
    large = msgspec.json.encode({"status": "completed", "output": [secrets.token_hex(500_000)]})
    for made in (
        response(previous_id="resp_x", error="why ' not \u20ac"),
        response(body=large, input=b'[{"role":"user","content":"\xe2\x82\xac \\u0000"}]'),
        response("id with ' \" % $1 ? {} : \\ \U0001f600", model="m' OR 1=1 -- \u00e9", owner=""),
        response("x" * 256, status="queued"),
    ):
        same(await store.create(made), True, "stored")
        same(await store.get(made.owner, made.id), made, "what it gives back")
    same(await store.get(ANN, "resp_unknown"), None, "an unknown one")


@check("takes no id that can't be one")
async def odd_ids(bench: Bench) -> None:
    store = await bench.open()
    for odd in ("", "a\0b", "\ud800", "x" * 257):
        with contextlib.suppress(VllmopsError):
            await store.create(replace(response(), id=odd))
            raise Failed(f"it took the id {odd!r}")
        same(await store.get(ANN, odd), None, "what it has by that id")
        same(await store.delete(ANN, odd), False, "what it deletes by that id")
        same(await store.conversation(ANN, odd), [], "the conversation by that id")
        same(await store.log(ANN, odd, -1), None, "the events by that id")
        same((await store.set_status(ANN, odd, "cancelled")).now, None, "what it cancels")
        same((await store.page(EVERYBODY, Query(model=odd or "\0"))).responses, [], "a model")


@check("stores an id once, however many try")
async def once(bench: Bench) -> None:
    stores = [await bench.open(), await bench.open()]
    tried = [response("resp_same", owner=owner) for owner in (ANN, BOB) * 10]
    done = await asyncio.gather(
        *(stores[number % 2].create(item) for number, item in enumerate(tried))
    )
    same(done.count(True), 1, "how many of twenty were stored")
    winner = tried[done.index(True)]
    same(await stores[0].get(EVERYBODY, "resp_same"), winner, "what is there")


@check("replaces what runs, and nothing else")
async def conditional_put(bench: Bench) -> None:
    store = await bench.open()
    made = response(status="queued", input=b'["its own"]')
    await store.create(made)
    under_way = replace(made, status="in_progress", body=b'{"status":"in_progress"}', input=b"[]")
    same(await store.put(under_way), True, "putting what was queued")
    same(await store.get(ANN, made.id), replace(under_way, input=made.input), "what is there")
    done = replace(made, status="completed", body=b'{"status":"completed"}')
    same(await store.put(done, unless_status={"in_progress"}), False, "put unless it is as it is")
    same(await store.put(done, unless_status={"cancelled"}), True, "put unless cancelled")
    same(await store.put(replace(made, status="failed")), False, "putting what has finished")
    same(await store.put(replace(made, status="failed"), unless_status=()), True, "put in any case")
    same(await store.put(response(status="queued")), False, "putting what was never there")
    same(await store.put(replace(made, owner=BOB), unless_status=()), False, "somebody else's")
    same(await status_of(store, made), "failed", "its status")


@check("changes a status once, however many try")
async def compare_and_set(bench: Bench) -> None:
    stores = [await bench.open(), await bench.open()]
    made = response(status="queued")
    await stores[0].create(made)
    swaps = await asyncio.gather(
        *(stores[number % 2].set_status(ANN, made.id, "cancelled") for number in range(20))
    )
    same([swap.changed for swap in swaps].count(True), 1, "how many of twenty changed it")
    same({swap.now and swap.now.status for swap in swaps}, {"cancelled"}, "their answers")
    same(await stores[1].put(replace(made, status="completed")), False, "completing it after that")
    found = await stores[1].get(ANN, made.id)
    same(
        found and msgspec.json.decode(document(found))["status"], "cancelled", "what a client sees"
    )
    swap = await stores[0].set_status(ANN, made.id, "failed", allowed={"cancelled"}, error="why")
    same((swap.changed, swap.now and swap.now.error), (True, "why"), "a change that is allowed")
    same((await stores[0].set_status(ANN, "resp_x", "failed")).now, None, "an unknown one")


@check("deletes for good")
async def delete(bench: Bench) -> None:
    store, other = await bench.open(), await bench.open()
    made = response(status="in_progress")
    await store.create(made)
    await store.append(made, 0, [b'{"n":0}'])
    same(await other.delete(ANN, made.id), True, "deleting")
    same(await store.delete(ANN, made.id), False, "deleting again")
    same(await store.get(ANN, made.id), None, "what is there")
    same(await store.put(replace(made, status="completed")), False, "putting after that")
    same(await store.append(made, 1, [b'{"n":1}']), False, "an event after that")
    same((await store.page(ANN, Query())).responses, [], "the list")
    again = replace(made, created_at=made.created_at + 1)
    same(await store.create(again), True, "the same id anew")
    same(await store.put(replace(made, status="completed")), False, "the old run after that")
    same(await store.append(made, 1, [b'{"n":1}']), False, "an old event after that")
    log = await store.log(ANN, made.id, -1)
    same(log and log.chunks, [], "events of the new one")
    same(await status_of(store, again), "in_progress", "the new one's status")


@check("keeps owners apart")
async def owners(bench: Bench) -> None:
    store = await bench.open()
    made = response(status="in_progress")
    await store.create(made)
    await store.append(made, 0, [b"{}"])
    for owner in (BOB, ""):
        same(await store.get(owner, made.id), None, "what another gets")
        same(await store.delete(owner, made.id), False, "what another deletes")
        same((await store.set_status(owner, made.id, "cancelled")).now, None, "what he cancels")
        same(await store.conversation(owner, made.id), [], "his conversation")
        same((await store.page(owner, Query())).responses, [], "his list")
        same([event async for event in store.follow(owner, made.id)], [], "his events")
        same((await store.stats(owner)).count, 0, "his count")
        with contextlib.suppress(CursorUnknown):
            await store.page(owner, Query(after=made.id))
            raise Failed("another's id was taken as the list's beginning")
        same(await store.create(replace(made, owner=owner)), False, "taking its id")
        theirs = response(owner=owner, previous_id=made.id)
        await store.create(theirs)
        with contextlib.suppress(ConversationBroken):
            await store.conversation(owner, theirs.id)
            raise Failed("another's turn was part of a conversation")
        mine = response(previous_id=theirs.id)
        await store.create(mine)
        with contextlib.suppress(ConversationBroken):
            await store.conversation(ANN, mine.id)
            raise Failed("a conversation went on behind another's turn")
        same(await store.conversation(ANN, theirs.id), [], "a conversation that another ends")
        for item in (theirs, mine):
            await store.delete(EVERYBODY, item.id)
    asked = [ANN, BOB, "", EVERYBODY] * 3
    found = await asyncio.gather(*(store.get(owner, made.id) for owner in asked))
    same(found, [made, None, None, made] * 3, "what several get at once")
    same(ids((await store.page(EVERYBODY, Query())).responses), [made.id], "everybody's list")
    same(await store.delete(EVERYBODY, made.id), True, "deleting as everybody")


@check("lists in order, page by page")
async def pages(bench: Bench) -> None:
    store = await bench.open()
    made = [
        response(
            f"resp_{number:02}",
            owner=BOB if number % 5 == 0 else ANN,
            status=("completed", "in_progress", "failed")[number % 3],
            model=f"m{number % 2}",
            created_at=1e9 + number // 4,  # some at the same moment
        )
        for number in range(40)
    ]
    for item in reversed(made):
        await store.create(item)
    for query, owner in [
        (Query(descending=descending, model=model, status=status), owner)
        for descending in (True, False)
        for model in (None, "m1", "none")
        for status in (None, "completed", "failed")
        for owner in (ANN, EVERYBODY)
    ]:
        wanted = ids(
            [
                item
                for item in (made[::-1] if query.descending else made)
                if owner in {EVERYBODY, item.owner}
                and query.model in {None, item.model}
                and query.status in {None, item.status}
            ]
        )
        for limit in (3, 100):
            found: list[str] = []
            page = await store.page(owner, replace(query, limit=limit))
            found += ids(page.responses)
            while page.more:
                page = await store.page(owner, replace(query, limit=limit, after=found[-1]))
                found += ids(page.responses)
            same(found, wanted, f"{query} of {len(wanted)}")
        if len(wanted) > 5:
            page = await store.page(owner, replace(query, limit=3, before=wanted[4]))
            same((ids(page.responses), page.more), (wanted[1:4], True), "the three before")
            page = await store.page(owner, replace(query, before=wanted[2]))
            same((ids(page.responses), page.more), (wanted[:2], False), "all before")
            page = await store.page(owner, replace(query, after=wanted[0], before=wanted[4]))
            same((ids(page.responses), page.more), (wanted[1:4], False), "those between")
    for odd in ("", "*"):
        same((await store.page(ANN, Query(model=odd))).responses, [], f"those of model {odd!r}")
    for query in (Query(after="resp_x"), Query(before="resp_x")):
        with contextlib.suppress(CursorUnknown):
            await store.page(ANN, query)
            raise Failed(f"{query} began somewhere")


@check("puts a conversation together, and says where it is broken")
async def conversations(bench: Bench) -> None:
    store = await bench.open()
    turns: list[Response] = []
    for number in range(200):
        before = turns[-1].id if turns else None
        turns.append(response(f"resp_{number}", previous_id=before, input=b"[%d]" % number))
        await store.create(turns[-1])
    kept = await store.conversation(ANN, "resp_199")
    same([await unpacked(item) for item in kept], turns, "two hundred turns")
    branch = response(previous_id="resp_99", status="in_progress")
    await store.create(branch)
    kept = await store.conversation(ANN, branch.id)
    same([await unpacked(item) for item in kept], [*turns[:100], branch], "a branch")
    same(await store.conversation(ANN, "resp_x"), [], "an unknown one")
    await store.delete(ANN, "resp_50")
    for broken in ("resp_199", branch.id, "resp_51"):
        try:
            await store.conversation(ANN, broken)
        except ConversationBroken as error:
            same(error.missing, "resp_50", "what is missing")
        else:
            raise Failed("a turn is gone, and no error was raised")
    same(ids(await store.conversation(ANN, "resp_49")), ids(turns[:50]), "what came before it")
    for name, before in (("resp_a", "resp_b"), ("resp_b", "resp_a")):
        await store.create(response(name, previous_id=before))
    with contextlib.suppress(ConversationBroken):
        await store.conversation(ANN, "resp_a")
        raise Failed("a chain that bites its own tail had a beginning")
    # Read again and again, its bodies would fill the memory.
    found = await store.backend.conversation(ANN, "resp_a")
    same(sorted(ids(found)), ["resp_a", "resp_b"], "the turns of a chain that bites its own tail")


@check("evicts what was used longest ago, and what runs last")
async def eviction(bench: Bench) -> None:
    store = await bench.open(max_size=4)
    first, running, third, fourth = (
        response("r1"),
        response("r2", status="in_progress"),
        response("r3"),
        response("r4", previous_id="r3"),
    )
    for item in (first, running, third, fourth):
        await store.create(item)
    await store.append(running, 0, [b"{}"])
    await store.get(ANN, "r1")
    await store.conversation(ANN, "r4")  # uses r3, too
    await store.create(response("r5"))
    same(await left(store), ["r2", "r3", "r4", "r5"], "once r1 was used longest ago")
    await store.touch(ANN, ["r3"])
    await store.create(response("r6", status="queued"))
    same(await left(store), ["r2", "r3", "r5", "r6"], "once r4 was")
    for name in ("r7", "r8"):
        await store.create(response(name, status="queued"))
    same(await left(store), ["r2", "r6", "r7", "r8"], "what runs")
    same(await store.backend.running(["r2", "r6"], renew=False), {"r2", "r6"}, "what runs")
    await store.create(response("r9"))
    same(await left(store), ["r6", "r7", "r8", "r9"], "when there is nothing else to evict")
    same(await store.backend.running(["r2", "r6"], renew=True), {"r6"}, "what runs after that")
    same(await store.put(replace(running, status="completed")), False, "putting what was evicted")
    same(await store.append(running, 1, [b"{}"]), False, "an event of it")
    same(await store.log(ANN, "r2", -1), None, "its events")
    same((await store.stats(EVERYBODY)).evictions, 5, "evictions that were counted")


async def left(store: ResponseStore) -> list[str]:
    return ids((await store.page(EVERYBODY, Query(descending=False))).responses)


@check("lets an owner have no more than a share")
async def share(bench: Bench) -> None:
    store = await bench.open(max_size=9, max_per_key=3)
    await store.create(response("b1", owner=BOB))
    for name in ("a1", "a2", "a3"):
        await store.create(response(name))
    await store.append(replace(response("a1"), created_at=0), 0, [b"{}"])  # no such run
    await store.get(ANN, "a1")
    await store.create(response("a4", status="queued"))
    same(await left(store), ["b1", "a1", "a3", "a4"], "once a2 was used longest ago of Ann's")
    await store.create(response("a5", status="queued"))
    await store.create(response("a6"))
    same(await left(store), ["b1", "a4", "a5", "a6"], "once a3 and a1 were, and what runs is last")
    await store.create(response("a7", status="queued"))
    same(await left(store), ["b1", "a4", "a5", "a7"], "once a6 was the only one that does not run")
    await store.create(response("a8"))
    same(await left(store), ["b1", "a5", "a7", "a8"], "once all others of Ann's ran")
    same(await store.backend.running(["a4", "a5"], renew=True), {"a5"}, "what runs after that")
    found = await store.stats(EVERYBODY)
    same(list(found.owners.items()), [(ANN, 3), (BOB, 1)], "how many each has, the fullest first")
    same((found.evictions, (await store.stats(BOB)).owners), (5, {BOB: 1}), "evictions, and Bob's")
    smaller = await bench.open(max_size=9, max_per_key=2)
    if smaller.backend is not store.backend:  # a process has one memory, and its limits
        await smaller.sweep()
        same(await left(store), ["b1", "a5", "a7"], "once a smaller share was swept")


@check("evicts from the owner who has most")
async def fullest(bench: Bench) -> None:
    store = await bench.open(max_size=6)
    for number in range(2):
        await store.create(response(f"b{number}", owner=BOB))
    for number in range(20):
        await store.create(
            response(f"a{number:02}", status="queued" if number % 2 else "completed")
        )
    same(await left(store), ["b0", "b1", "a13", "a15", "a17", "a19"], "after twenty of Ann's")
    for number in range(2, 5):
        await store.create(response(f"b{number}", owner=BOB))
    found = await store.stats(EVERYBODY)
    same(found.owners, {ANN: 3, BOB: 3}, "how many each has once Bob has stored three more")
    same((await store.stats(ANN)).count, 3, "Ann's")
    await store.create(response("c0", owner=CID))
    same((await store.stats(CID)).count, 1, "Cid's, who has least")
    await store.create(response("c1", owner=CID))
    same((await store.stats(EVERYBODY)).owners, {ANN: 2, BOB: 2, CID: 2}, "after two of Cid's")
    await store.delete(ANN, "a19")
    await store.delete(ANN, "a17")
    await store.create(response("c2", owner=CID))
    await store.create(response("c3", owner=CID))
    await store.create(response("c4", owner=CID))
    same(
        (await store.stats(EVERYBODY)).owners, {CID: 4, BOB: 2}, "once Ann has deleted all of hers"
    )


@check("expires responses that were not used for long")
async def expiry(bench: Bench) -> None:
    store = await bench.open(ttl_s=SHORT_S)
    old, used, running = response("old"), response("used"), response("running", status="queued")
    for item in (old, used, running):
        await store.create(item)
    await asyncio.sleep(SHORT_S)
    await store.touch(ANN, ["used"])
    same((await store.sweep()).expired, 1, "how many expired")
    same(await left(store), ["used", "running"], "what is left")


@check("fails runs whose server has gone")
async def leases(bench: Bench) -> None:
    store = await bench.open(lease_s=SHORT_S)
    names = ("kept", "queued", "listed", "followed")
    made = {name: response(name, status="in_progress") for name in names}
    for item in made.values():
        await store.create(item)

    async def renewing() -> None:
        while True:
            await store.backend.running(["kept"], renew=True)
            await asyncio.sleep(SHORT_S / 6)

    same(await store.backend.running(["kept"], renew=True), {"kept"}, "what is renewed")
    renewal = asyncio.create_task(renewing())
    try:
        await asyncio.sleep(2.2 * SHORT_S)  # some servers know their age in seconds only
        await lapsed(store, made)
    finally:
        renewal.cancel()


async def lapsed(store: ResponseStore, made: Mapping[str, Response]) -> None:
    """One of them was renewed, the others were not."""
    same(await status_of(store, made["kept"]), "in_progress", "what was renewed")
    found = await store.get(ANN, "queued")
    same(found and (found.status, found.error), ("failed", GONE), "what nobody renewed")
    seen = found and msgspec.json.decode(document(found))
    same(seen and seen["error"]["message"], GONE, "the error that a client gets")
    failed = (await store.page(ANN, Query(status="failed"))).responses
    same(sorted(ids(failed)), ["followed", "listed", "queued"], "the list of what failed")
    same([event async for event in store.follow(ANN, "followed")], [], "its events end")
    same(await store.backend.running(made, renew=True), set(made), "what may yet tell its end")
    same(await status_of(store, made["queued"]), "failed", "what lapsed, until it does")
    ended = replace(made["queued"], status="completed")
    same(await store.put(ended), True, "its own end")
    same(await store.get(ANN, "queued"), ended, "how it ended")
    same(await store.put(replace(ended, status="failed")), False, "another end of it")
    await store.delete(ANN, "listed")
    same(await store.put(replace(made["listed"], status="completed")), False, "what was deleted")
    same(await store.backend.running(["queued", "listed"], renew=True), set(), "what has ended")
    same(await store.put(replace(made["kept"], status="completed")), True, "completing that")


@check("takes up again what ran when its server went, once, and its stream goes on")
async def taken_up(bench: Bench) -> None:
    here, there = await bench.open(lease_s=SHORT_S), await bench.open(lease_s=SHORT_S)
    lapsed = response("lapsed", status="in_progress", input=b'["its own"]')
    stopped = response("stopped", status="in_progress")
    for item in (lapsed, stopped):
        await here.create(item)
        await here.append(item, 0, [b'{"n":0}', b'{"n":1}'])
    await here.put(replace(stopped, status="failed", error="stopped"))
    await asyncio.sleep(2.2 * SHORT_S)
    same(await status_of(here, lapsed), "failed", "what nobody renewed")
    finished = FINISHED - {"failed"}
    for item in (lapsed, stopped):
        again = replace(item, status="queued", error="", body=b'{"status":"queued","again":1}')
        same(await there.put(again, unless_status=finished), True, "taking it up")
        same(await here.get(ANN, item.id), replace(again, input=item.input), "what is there")
        following = asyncio.create_task(followed(here, item, 0))
        same(await there.append(item, 2, [b'{"n":2}']), True, "adding to its stream")
        same(await there.put(replace(item, status="completed")), True, "its end")
        same(await following, [b'{"n":1}', b'{"n":2}'], "its stream")
        same(await there.put(again, unless_status=finished), False, "taking up what has ended")


async def followed(store: ResponseStore, made: Response, after: int) -> list[bytes]:
    return [event async for part in store.follow(ANN, made.id, after) for event in part.events]


@check("stops a run that was cancelled, deleted or evicted elsewhere")
async def attendance(bench: Bench) -> None:
    here = await bench.open()
    there = await bench.open()
    made = [response(name, status="in_progress") for name in ("cancelled", "deleted", "kept")]
    stopped: list[str] = []
    both = asyncio.Event()

    def stop(name: str) -> None:
        stopped.append(name)
        if len(stopped) == 2:
            both.set()

    for item in made:
        await here.create(item)
        here.attend(item, partial(stop, item.id))
    await there.set_status(ANN, "cancelled", "cancelled")
    await there.delete(ANN, "deleted")
    try:
        await asyncio.wait_for(both.wait(), 1)
    except TimeoutError as error:
        raise Failed(f"within a second it stopped {stopped} alone") from error
    same(sorted(stopped), ["cancelled", "deleted"], "what was stopped")
    here.leave(made[2])
    same(list(here.attended), [], "what is attended")


@check("keeps a stream's events, from any number on, in any process")
async def events(bench: Bench) -> None:
    here, there = await bench.open(), await bench.open()
    made = response(status="in_progress")
    await here.create(made)
    events = [msgspec.json.encode({"sequence_number": number}) for number in range(100)]
    begun = [
        asyncio.create_task(followed(store, made, after))
        for store in (here, there)
        for after in (-1, 6)
    ]
    for first in range(0, 100, 10):
        same(await here.append(made, first, events[first : first + 10]), True, "adding")
        same(await here.append(made, first, events[first : first + 10]), True, "adding again")
        await asyncio.sleep(0.02)
    await here.put(replace(made, status="completed"))
    for task, after in zip(begun, (-1, 6) * 2, strict=True):
        same(await task, events[after + 1 :], f"those behind {after}, followed")
    for after in (-1, 0, 9, 10, 55, 98, 99, 1000, 2**40):
        same(
            await followed(there, made, after),
            events[after + 1 :],
            f"those behind {after}, afterwards",
        )
    same(await followed(here, made, -1000), events, "those behind a number below all")


@check("keeps no more of a stream than it should")
async def bounded_events(bench: Bench) -> None:
    store = await bench.open(max_events=50, events_kept_s=SHORT_S)
    made = response(status="in_progress")
    await store.create(made)
    for first in range(0, 200, 10):
        await store.append(made, first, [b'{"n":%d}' % (first + n) for n in range(10)])
    log = await store.log(ANN, made.id, -1)
    same(log and [chunk.first for chunk in log.chunks], [150, 160, 170, 180, 190], "what is left")
    await store.put(replace(made, status="failed"))
    await store.put(made, unless_status=FINISHED - {"failed"})  # it runs again
    await asyncio.sleep(SHORT_S)
    await store.sweep()
    log = await store.log(ANN, made.id, -1)
    same(log and len(log.chunks), 5, "chunks of what runs, after a while")
    await store.append(made, 200, [b'{"n":200}'])
    await store.put(replace(made, status="completed"))
    await store.sweep()
    log = await store.log(ANN, made.id, -1)
    same(log and len(log.chunks), 6, "chunks of what has just finished")
    await asyncio.sleep(1.5 * SHORT_S)
    await store.sweep()
    log = await store.log(ANN, made.id, -1)
    same(log and log.chunks, [], "those of what has finished, after a while")
    same(await status_of(store, made), "completed", "its status")


@check("counts what there is")
async def counts(bench: Bench) -> None:
    store = await bench.open()
    empty = await store.stats(EVERYBODY)
    same((empty.count, empty.bytes, empty.event_bytes, empty.oldest), (0, 0, 0, None), "of nothing")
    made = [
        response(owner=owner, status=status, model=f"m{number}", created_at=5.0 + number)
        for number, (owner, status) in enumerate(
            ((ANN, "completed"), (ANN, "failed"), (BOB, "completed"), (BOB, "in_progress"))
        )
    ]
    for item in made:
        await store.create(item)
    await store.append(made[3], 0, [b"{}"])
    every = await store.stats(EVERYBODY)
    same(every.statuses, {"completed": 2, "failed": 1, "in_progress": 1}, "by status")
    same(every.models, {"m0": 1, "m1": 1, "m2": 1, "m3": 1}, "by model")
    same((every.count, every.oldest), (4, 5.0), "in all, and the oldest")
    hers = await store.stats(ANN)
    same((hers.count, hers.event_bytes), (2, None), "one owner's")
    if not (0 < hers.bytes < every.bytes and every.event_bytes):
        raise Failed(f"bytes: {hers}, and of all {every}")


@check("stores no credentials of tools")
async def credentials(bench: Bench) -> None:
    store = await bench.open()
    word = f"hush{secrets.token_hex(8)}"
    tools = [
        {
            "type": "mcp",
            "server_label": "s",
            "server_url": f"https://u:{word}@h/p?key={word}",
            "authorization": word,
            "headers": {"Authorization": f"Bearer {word}", "X": word},
        },
        {
            "type": "function",
            "name": "f",
            "parameters": {"properties": {"token": {"type": "string"}}},
        },
    ]
    body = msgspec.json.encode({"status": "in_progress", "tools": tools, "output": []})
    made = response(status="in_progress", body=body)
    await store.create(made)
    event = b'{"type":"response.created","response":%s}' % body
    await store.append(made, 0, [event])
    await store.put(made)
    kept = await store.backend.get(ANN, made.id)
    found = await store.get(ANN, made.id)
    log = [event async for part in once_only(store, made) for event in part]
    for where, text in (
        ("body", found and found.body),
        ("log", log[0]),
        ("bytes", kept and kept.body),
    ):
        if not text or word.encode() in text:
            raise Failed(f"the {where}: {text!r}")
    mcp, function = msgspec.json.decode(found.body if found else b"")["tools"]
    same(mcp["server_url"], "https://h/p", "the URL")
    same(function, tools[1], "a function, which has none")


async def once_only(store: ResponseStore, made: Response) -> AsyncIterator[list[bytes]]:
    async for part in store.follow(made.owner, made.id):
        yield part.events
        return


@check("is opened by several at once")
async def opened_at_once(bench: Bench) -> None:
    stores = await asyncio.gather(*(bench.open() for _ in range(6)))
    made = response()
    same(await stores[0].create(made), True, "storing in one")
    for store in stores:
        same(await store.get(ANN, made.id), made, "what each of them has")
