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

from vllmops.model.environment import STORE_CLASS
from vllmops.support.errors import VllmopsError

from .. import backend_factory
from ..backend import (
    EVERYBODY,
    FINISHED,
    GONE,
    ConversationBroken,
    CursorUnknown,
    Response,
    ResponseQuery,
)
from ..conversation_backend import require_conversations
from ..response_store import ResponseStore, encode_response, unpack_response
from . import conversation_checks
from .check_harness import (
    ANN,
    BOB,
    CHECKS,
    CID,
    OF_CONVERSATIONS,
    SHORT_S,
    Check,
    CheckFailed,
    StoreBench,
    expect_equal,
    make_response,
    register_check,
)

__all__ = ["CHECKS", "CheckResult", "collect_caveats", "make_response", "run_check", "run_checks"]

assert conversation_checks  # which adds them
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


async def collect_caveats(url: str) -> list[str]:
    """See whether a store can be checked; says how it could lose what it has acknowledged.

    Args:
        url: as `backend_factory.make_backend` takes it; a user's own class has to be empty.

    Raises:
        VllmopsError: ``store.unavailable``, ``store.schema`` or ``store.not-empty``.
    """
    backend_factory.make_backend(url)  # tells what is wrong with it as it was given
    bench = StoreBench(make_scratch_url(url))
    store = await bench.open_store()
    count = (await store.collect_stats(EVERYBODY)).response_count
    if count:
        await store.close()
        raise VllmopsError(
            "store.not-empty",
            f"{count} responses are in the store, and the checks would delete them",
            "an empty store",
        )
    try:
        async with store.backend_call():
            caveats = await store.backend.list_caveats()
    finally:
        await bench.close()
    if not can_store_conversations(url):
        caveats.append("it keeps no conversations: /v1/conversations and `conversation` get 501")
    return caveats


def can_store_conversations(url: str) -> bool:
    """Whether the backend of a URL keeps conversations."""
    try:
        require_conversations(backend_factory.make_backend(url))
    except VllmopsError:
        return False
    return True


async def run_checks(url: str) -> AsyncIterator[CheckResult]:
    """Run every check on a store of its own, as `collect_caveats` has found it can be.

    Several at a time, for they mostly sleep; but a user's own class knows of no namespaces.
    """
    places = asyncio.Semaphore(1 if STORE_CLASS in os.environ else AT_ONCE)

    async def run_limited(name: str, function: Check) -> CheckResult:
        async with places:
            return await run_check(name, function, make_scratch_url(url))

    skipped = set() if can_store_conversations(url) else OF_CONVERSATIONS
    checks = [item for item in CHECKS.items() if item[0] not in skipped]
    for task in [asyncio.create_task(run_limited(*item)) for item in checks]:
        yield await task


def make_scratch_url(url: str) -> str:
    """The same database, and a store in it that nobody else has."""
    plain, _ = backend_factory.split_namespace(url)
    return f"{plain}{'&' if '?' in plain else '?'}namespace=check_{secrets.token_hex(4)}"


async def run_check(name: str, function: Check, url: str) -> CheckResult:
    bench, began, problem = StoreBench(url), time.monotonic(), ""
    try:
        async with asyncio.timeout(CHECK_S):
            await function(bench)
    except Exception as error:
        problem = (
            f"{error}" if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        )
    finally:
        with contextlib.suppress(Exception):
            await bench.close()
    return CheckResult(name, problem, time.monotonic() - began)


def list_ids(responses: list[Response]) -> list[str]:
    return [item.id for item in responses]


async def get_status(store: ResponseStore, response: Response) -> str | None:
    found = await store.get(response.owner, response.id)
    return found.status if found else None


@register_check("gives back what was stored")
async def check_round_trip(bench: StoreBench) -> None:
    store = await bench.open_store()
    large = msgspec.json.encode({"status": "completed", "output": [secrets.token_hex(500_000)]})
    for made in (
        make_response(previous_id="resp_x", error="why ' not \u20ac"),
        make_response(body=large, input=b'[{"role":"user","content":"\xe2\x82\xac \\u0000"}]'),
        make_response(
            "id with ' \" % $1 ? {} : \\ \U0001f600", model="m' OR 1=1 -- \u00e9", owner=""
        ),
        make_response("x" * 256, status="queued"),
    ):
        expect_equal(await store.create(made), True, "stored")
        expect_equal(await store.get(made.owner, made.id), made, "what it gives back")
    expect_equal(await store.get(ANN, "resp_unknown"), None, "an unknown one")


@register_check("takes no id that can't be one")
async def check_invalid_ids(bench: StoreBench) -> None:
    store = await bench.open_store()
    for odd in ("", "a\0b", "\ud800", "x" * 257):
        with contextlib.suppress(VllmopsError):
            await store.create(replace(make_response(), id=odd))
            raise CheckFailed(f"it took the id {odd!r}")
        expect_equal(await store.get(ANN, odd), None, "what it has by that id")
        expect_equal(await store.delete(ANN, odd), False, "what it deletes by that id")
        expect_equal(await store.list_turns(ANN, odd), [], "the conversation by that id")
        expect_equal(await store.read_events(ANN, odd, -1), None, "the events by that id")
        expect_equal(
            (await store.set_status(ANN, odd, "cancelled")).response, None, "what it cancels"
        )
        expect_equal(
            (await store.list_responses(EVERYBODY, ResponseQuery(model=odd or "\0"))).responses,
            [],
            "a model",
        )


@register_check("stores an id once, however many try")
async def check_unique_ids(bench: StoreBench) -> None:
    stores = [await bench.open_store(), await bench.open_store()]
    tried = [make_response("resp_same", owner=owner) for owner in (ANN, BOB) * 10]
    done = await asyncio.gather(
        *(stores[number % 2].create(item) for number, item in enumerate(tried))
    )
    expect_equal(done.count(True), 1, "how many of twenty were stored")
    winner = tried[done.index(True)]
    expect_equal(await stores[0].get(EVERYBODY, "resp_same"), winner, "what is there")


@register_check("replaces what runs, and nothing else")
async def check_conditional_put(bench: StoreBench) -> None:
    store = await bench.open_store()
    made = make_response(status="queued", input=b'["its own"]')
    await store.create(made)
    under_way = replace(made, status="in_progress", body=b'{"status":"in_progress"}', input=b"[]")
    expect_equal(await store.put(under_way), True, "putting what was queued")
    expect_equal(
        await store.get(ANN, made.id), replace(under_way, input=made.input), "what is there"
    )
    done = replace(made, status="completed", body=b'{"status":"completed"}')
    expect_equal(
        await store.put(done, unless_status={"in_progress"}), False, "put unless it is as it is"
    )
    expect_equal(await store.put(done, unless_status={"cancelled"}), True, "put unless cancelled")
    expect_equal(
        await store.put(replace(made, status="failed")), False, "putting what has finished"
    )
    expect_equal(
        await store.put(replace(made, status="failed"), unless_status=()), True, "put in any case"
    )
    expect_equal(
        await store.put(make_response(status="queued")), False, "putting what was never there"
    )
    expect_equal(
        await store.put(replace(made, owner=BOB), unless_status=()), False, "somebody else's"
    )
    expect_equal(await get_status(store, made), "failed", "its status")


@register_check("changes a status once, however many try")
async def check_compare_and_set(bench: StoreBench) -> None:
    stores = [await bench.open_store(), await bench.open_store()]
    made = make_response(status="queued")
    await stores[0].create(made)
    swaps = await asyncio.gather(
        *(stores[number % 2].set_status(ANN, made.id, "cancelled") for number in range(20))
    )
    expect_equal([swap.changed for swap in swaps].count(True), 1, "how many of twenty changed it")
    expect_equal(
        {swap.response and swap.response.status for swap in swaps}, {"cancelled"}, "their answers"
    )
    expect_equal(
        await stores[1].put(replace(made, status="completed")), False, "completing it after that"
    )
    found = await stores[1].get(ANN, made.id)
    expect_equal(
        found and msgspec.json.decode(encode_response(found))["status"],
        "cancelled",
        "what a client sees",
    )
    swap = await stores[0].set_status(
        ANN, made.id, "failed", allowed_statuses={"cancelled"}, error="why"
    )
    expect_equal(
        (swap.changed, swap.response and swap.response.error),
        (True, "why"),
        "a change that is allowed",
    )
    expect_equal(
        (await stores[0].set_status(ANN, "resp_x", "failed")).response, None, "an unknown one"
    )


@register_check("deletes for good")
async def check_delete(bench: StoreBench) -> None:
    store, other = await bench.open_store(), await bench.open_store()
    made = make_response(status="in_progress")
    await store.create(made)
    await store.append_events(made, 0, [b'{"n":0}'])
    expect_equal(await other.delete(ANN, made.id), True, "deleting")
    expect_equal(await store.delete(ANN, made.id), False, "deleting again")
    expect_equal(await store.get(ANN, made.id), None, "what is there")
    expect_equal(await store.put(replace(made, status="completed")), False, "putting after that")
    expect_equal(await store.append_events(made, 1, [b'{"n":1}']), False, "an event after that")
    expect_equal((await store.list_responses(ANN, ResponseQuery())).responses, [], "the list")
    again = replace(made, created_at=made.created_at + 1)
    expect_equal(await store.create(again), True, "the same id anew")
    expect_equal(
        await store.put(replace(made, status="completed")), False, "the old run after that"
    )
    expect_equal(await store.append_events(made, 1, [b'{"n":1}']), False, "an old event after that")
    log = await store.read_events(ANN, made.id, -1)
    expect_equal(log and log.chunks, [], "events of the new one")
    expect_equal(await get_status(store, again), "in_progress", "the new one's status")


@register_check("keeps owners apart")
async def check_owner_isolation(bench: StoreBench) -> None:
    store = await bench.open_store()
    made = make_response(status="in_progress")
    await store.create(made)
    await store.append_events(made, 0, [b"{}"])
    for owner in (BOB, ""):
        expect_equal(await store.get(owner, made.id), None, "what another gets")
        expect_equal(await store.delete(owner, made.id), False, "what another deletes")
        expect_equal(
            (await store.set_status(owner, made.id, "cancelled")).response, None, "what he cancels"
        )
        expect_equal(await store.list_turns(owner, made.id), [], "his conversation")
        expect_equal((await store.list_responses(owner, ResponseQuery())).responses, [], "his list")
        expect_equal(
            [event async for event in store.follow_events(owner, made.id)], [], "his events"
        )
        expect_equal((await store.collect_stats(owner)).response_count, 0, "his count")
        with contextlib.suppress(CursorUnknown):
            await store.list_responses(owner, ResponseQuery(after_id=made.id))
            raise CheckFailed("another's id was taken as the list's beginning")
        expect_equal(await store.create(replace(made, owner=owner)), False, "taking its id")
        theirs = make_response(owner=owner, previous_id=made.id)
        await store.create(theirs)
        with contextlib.suppress(ConversationBroken):
            await store.list_turns(owner, theirs.id)
            raise CheckFailed("another's turn was part of a conversation")
        mine = make_response(previous_id=theirs.id)
        await store.create(mine)
        with contextlib.suppress(ConversationBroken):
            await store.list_turns(ANN, mine.id)
            raise CheckFailed("a conversation went on behind another's turn")
        expect_equal(await store.list_turns(ANN, theirs.id), [], "a conversation that another ends")
        for item in (theirs, mine):
            await store.delete(EVERYBODY, item.id)
    asked = [ANN, BOB, "", EVERYBODY] * 3
    found = await asyncio.gather(*(store.get(owner, made.id) for owner in asked))
    expect_equal(found, [made, None, None, made] * 3, "what several get at once")
    expect_equal(
        list_ids((await store.list_responses(EVERYBODY, ResponseQuery())).responses),
        [made.id],
        "everybody's list",
    )
    expect_equal(await store.delete(EVERYBODY, made.id), True, "deleting as everybody")


@register_check("lists in order, page by page")
async def check_paging(bench: StoreBench) -> None:
    store = await bench.open_store()
    made = [
        make_response(
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
        (ResponseQuery(descending=descending, model=model, status=status), owner)
        for descending in (True, False)
        for model in (None, "m1", "none")
        for status in (None, "completed", "failed")
        for owner in (ANN, EVERYBODY)
    ]:
        wanted = list_ids(
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
            page = await store.list_responses(owner, replace(query, limit=limit))
            found += list_ids(page.responses)
            while page.has_more:
                page = await store.list_responses(
                    owner, replace(query, limit=limit, after_id=found[-1])
                )
                found += list_ids(page.responses)
            expect_equal(found, wanted, f"{query} of {len(wanted)}")
        if len(wanted) > 5:
            page = await store.list_responses(owner, replace(query, limit=3, before_id=wanted[4]))
            expect_equal(
                (list_ids(page.responses), page.has_more), (wanted[1:4], True), "the three before"
            )
            page = await store.list_responses(owner, replace(query, before_id=wanted[2]))
            expect_equal(
                (list_ids(page.responses), page.has_more), (wanted[:2], False), "all before"
            )
            page = await store.list_responses(
                owner, replace(query, after_id=wanted[0], before_id=wanted[4])
            )
            expect_equal(
                (list_ids(page.responses), page.has_more), (wanted[1:4], False), "those between"
            )
    for odd in ("", "*"):
        expect_equal(
            (await store.list_responses(ANN, ResponseQuery(model=odd))).responses,
            [],
            f"those of model {odd!r}",
        )
    for query in (ResponseQuery(after_id="resp_x"), ResponseQuery(before_id="resp_x")):
        with contextlib.suppress(CursorUnknown):
            await store.list_responses(ANN, query)
            raise CheckFailed(f"{query} began somewhere")


@register_check("puts a conversation together, and says where it is broken")
async def check_turn_chains(bench: StoreBench) -> None:
    store = await bench.open_store()
    turns: list[Response] = []
    for number in range(200):
        before = turns[-1].id if turns else None
        turns.append(make_response(f"resp_{number}", previous_id=before, input=b"[%d]" % number))
        await store.create(turns[-1])
    kept = await store.list_turns(ANN, "resp_199")
    expect_equal([await unpack_response(item) for item in kept], turns, "two hundred turns")
    branch = make_response(previous_id="resp_99", status="in_progress")
    await store.create(branch)
    kept = await store.list_turns(ANN, branch.id)
    expect_equal([await unpack_response(item) for item in kept], [*turns[:100], branch], "a branch")
    expect_equal(await store.list_turns(ANN, "resp_x"), [], "an unknown one")
    await store.delete(ANN, "resp_50")
    for broken in ("resp_199", branch.id, "resp_51"):
        try:
            await store.list_turns(ANN, broken)
        except ConversationBroken as error:
            expect_equal(error.missing, "resp_50", "what is missing")
        else:
            raise CheckFailed("a turn is gone, and no error was raised")
    expect_equal(
        list_ids(await store.list_turns(ANN, "resp_49")),
        list_ids(turns[:50]),
        "what came before it",
    )
    for name, before in (("resp_a", "resp_b"), ("resp_b", "resp_a")):
        await store.create(make_response(name, previous_id=before))
    with contextlib.suppress(ConversationBroken):
        await store.list_turns(ANN, "resp_a")
        raise CheckFailed("a chain that bites its own tail had a beginning")
    # Read again and again, its bodies would fill the memory.
    found = await store.backend.list_turns(ANN, "resp_a")
    expect_equal(
        sorted(list_ids(found)),
        ["resp_a", "resp_b"],
        "the turns of a chain that bites its own tail",
    )


@register_check("evicts what was used longest ago, and what runs last")
async def check_lru_eviction(bench: StoreBench) -> None:
    store = await bench.open_store(max_size=4)
    first, running, third, fourth = (
        make_response("r1"),
        make_response("r2", status="in_progress"),
        make_response("r3"),
        make_response("r4", previous_id="r3"),
    )
    for item in (first, running, third, fourth):
        await store.create(item)
    await store.append_events(running, 0, [b"{}"])
    await store.get(ANN, "r1")
    await store.list_turns(ANN, "r4")  # uses r3, too
    await store.create(make_response("r5"))
    expect_equal(
        await list_stored_ids(store), ["r2", "r3", "r4", "r5"], "once r1 was used longest ago"
    )
    await store.touch(ANN, ["r3"])
    await store.create(make_response("r6", status="queued"))
    expect_equal(await list_stored_ids(store), ["r2", "r3", "r5", "r6"], "once r4 was")
    for name in ("r7", "r8"):
        await store.create(make_response(name, status="queued"))
    expect_equal(await list_stored_ids(store), ["r2", "r6", "r7", "r8"], "what runs")
    expect_equal(
        await store.backend.select_running(["r2", "r6"], renew=False), {"r2", "r6"}, "what runs"
    )
    await store.create(make_response("r9"))
    expect_equal(
        await list_stored_ids(store),
        ["r6", "r7", "r8", "r9"],
        "when there is nothing else to evict",
    )
    expect_equal(
        await store.backend.select_running(["r2", "r6"], renew=True), {"r6"}, "what runs after that"
    )
    expect_equal(
        await store.put(replace(running, status="completed")), False, "putting what was evicted"
    )
    expect_equal(await store.append_events(running, 1, [b"{}"]), False, "an event of it")
    expect_equal(await store.read_events(ANN, "r2", -1), None, "its events")
    expect_equal((await store.collect_stats(EVERYBODY)).evictions, 5, "evictions that were counted")


async def list_stored_ids(store: ResponseStore) -> list[str]:
    return list_ids(
        (await store.list_responses(EVERYBODY, ResponseQuery(descending=False))).responses
    )


@register_check("lets an owner have no more than a share")
async def check_owner_limit(bench: StoreBench) -> None:
    store = await bench.open_store(max_size=9, max_per_key=3)
    await store.create(make_response("b1", owner=BOB))
    for name in ("a1", "a2", "a3"):
        await store.create(make_response(name))
    await store.append_events(replace(make_response("a1"), created_at=0), 0, [b"{}"])  # no such run
    await store.get(ANN, "a1")
    await store.create(make_response("a4", status="queued"))
    expect_equal(
        await list_stored_ids(store),
        ["b1", "a1", "a3", "a4"],
        "once a2 was used longest ago of Ann's",
    )
    await store.create(make_response("a5", status="queued"))
    await store.create(make_response("a6"))
    expect_equal(
        await list_stored_ids(store),
        ["b1", "a4", "a5", "a6"],
        "once a3 and a1 were, and what runs is last",
    )
    await store.create(make_response("a7", status="queued"))
    expect_equal(
        await list_stored_ids(store),
        ["b1", "a4", "a5", "a7"],
        "once a6 was the only one that does not run",
    )
    await store.create(make_response("a8"))
    expect_equal(
        await list_stored_ids(store), ["b1", "a5", "a7", "a8"], "once all others of Ann's ran"
    )
    expect_equal(
        await store.backend.select_running(["a4", "a5"], renew=True), {"a5"}, "what runs after that"
    )
    found = await store.collect_stats(EVERYBODY)
    expect_equal(
        list(found.owners.items()), [(ANN, 3), (BOB, 1)], "how many each has, the fullest first"
    )
    expect_equal(
        (found.evictions, (await store.collect_stats(BOB)).owners),
        (5, {BOB: 1}),
        "evictions, and Bob's",
    )
    smaller = await bench.open_store(max_size=9, max_per_key=2)
    if smaller.backend is not store.backend:  # a process has one memory, and its limits
        await smaller.sweep()
        expect_equal(
            await list_stored_ids(store), ["b1", "a5", "a7"], "once a smaller share was swept"
        )


@register_check("evicts from the owner who has most")
async def check_fair_eviction(bench: StoreBench) -> None:
    store = await bench.open_store(max_size=6)
    for number in range(2):
        await store.create(make_response(f"b{number}", owner=BOB))
    for number in range(20):
        await store.create(
            make_response(f"a{number:02}", status="queued" if number % 2 else "completed")
        )
    expect_equal(
        await list_stored_ids(store),
        ["b0", "b1", "a13", "a15", "a17", "a19"],
        "after twenty of Ann's",
    )
    for number in range(2, 5):
        await store.create(make_response(f"b{number}", owner=BOB))
    found = await store.collect_stats(EVERYBODY)
    expect_equal(found.owners, {ANN: 3, BOB: 3}, "how many each has once Bob has stored three more")
    expect_equal((await store.collect_stats(ANN)).response_count, 3, "Ann's")
    await store.create(make_response("c0", owner=CID))
    expect_equal((await store.collect_stats(CID)).response_count, 1, "Cid's, who has least")
    await store.create(make_response("c1", owner=CID))
    expect_equal(
        (await store.collect_stats(EVERYBODY)).owners,
        {ANN: 2, BOB: 2, CID: 2},
        "after two of Cid's",
    )
    await store.delete(ANN, "a19")
    await store.delete(ANN, "a17")
    await store.create(make_response("c2", owner=CID))
    await store.create(make_response("c3", owner=CID))
    await store.create(make_response("c4", owner=CID))
    expect_equal(
        (await store.collect_stats(EVERYBODY)).owners,
        {CID: 4, BOB: 2},
        "once Ann has deleted all of hers",
    )


@register_check("expires responses that were not used for long")
async def check_expiry(bench: StoreBench) -> None:
    store = await bench.open_store(ttl_s=SHORT_S)
    old, used, running = (
        make_response("old"),
        make_response("used"),
        make_response("running", status="queued"),
    )
    for item in (old, used, running):
        await store.create(item)
    await asyncio.sleep(SHORT_S)
    await store.touch(ANN, ["used"])
    expect_equal((await store.sweep()).expired_count, 1, "how many expired")
    expect_equal(await list_stored_ids(store), ["used", "running"], "what is left")


@register_check("fails runs whose server has gone")
async def check_leases(bench: StoreBench) -> None:
    store = await bench.open_store(lease_s=SHORT_S)
    names = ("kept", "queued", "listed", "followed")
    made = {name: make_response(name, status="in_progress") for name in names}
    for item in made.values():
        await store.create(item)

    async def renew_repeatedly() -> None:
        while True:
            await store.backend.select_running(["kept"], renew=True)
            await asyncio.sleep(SHORT_S / 6)

    expect_equal(
        await store.backend.select_running(["kept"], renew=True), {"kept"}, "what is renewed"
    )
    renewal = asyncio.create_task(renew_repeatedly())
    try:
        await asyncio.sleep(2.2 * SHORT_S)  # some servers know their age in seconds only
        await check_lapsed_runs(store, made)
    finally:
        renewal.cancel()


async def check_lapsed_runs(store: ResponseStore, runs: Mapping[str, Response]) -> None:
    """One of them was renewed, the others were not."""
    expect_equal(await get_status(store, runs["kept"]), "in_progress", "what was renewed")
    found = await store.get(ANN, "queued")
    expect_equal(found and (found.status, found.error), ("failed", GONE), "what nobody renewed")
    seen = found and msgspec.json.decode(encode_response(found))
    expect_equal(seen and seen["error"]["message"], GONE, "the error that a client gets")
    failed = (await store.list_responses(ANN, ResponseQuery(status="failed"))).responses
    expect_equal(
        sorted(list_ids(failed)), ["followed", "listed", "queued"], "the list of what failed"
    )
    expect_equal(
        [event async for event in store.follow_events(ANN, "followed")], [], "its events end"
    )
    expect_equal(
        await store.backend.select_running(runs, renew=True), set(runs), "what may yet tell its end"
    )
    expect_equal(await get_status(store, runs["queued"]), "failed", "what lapsed, until it does")
    ended = replace(runs["queued"], status="completed")
    expect_equal(await store.put(ended), True, "its own end")
    expect_equal(await store.get(ANN, "queued"), ended, "how it ended")
    expect_equal(await store.put(replace(ended, status="failed")), False, "another end of it")
    await store.delete(ANN, "listed")
    expect_equal(
        await store.put(replace(runs["listed"], status="completed")), False, "what was deleted"
    )
    expect_equal(
        await store.backend.select_running(["queued", "listed"], renew=True),
        set(),
        "what has ended",
    )
    expect_equal(
        await store.put(replace(runs["kept"], status="completed")), True, "completing that"
    )


@register_check("takes up again what ran when its server went, once, and its stream goes on")
async def check_rerun(bench: StoreBench) -> None:
    here, there = await bench.open_store(lease_s=SHORT_S), await bench.open_store(lease_s=SHORT_S)
    lapsed = make_response("lapsed", status="in_progress", input=b'["its own"]')
    stopped = make_response("stopped", status="in_progress")
    for item in (lapsed, stopped):
        await here.create(item)
        await here.append_events(item, 0, [b'{"n":0}', b'{"n":1}'])
    await here.put(replace(stopped, status="failed", error="stopped"))
    await asyncio.sleep(2.2 * SHORT_S)
    expect_equal(await get_status(here, lapsed), "failed", "what nobody renewed")
    finished = FINISHED - {"failed"}
    for item in (lapsed, stopped):
        again = replace(item, status="queued", error="", body=b'{"status":"queued","again":1}')
        expect_equal(await there.put(again, unless_status=finished), True, "taking it up")
        expect_equal(
            await here.get(ANN, item.id), replace(again, input=item.input), "what is there"
        )
        following = asyncio.create_task(collect_events(here, item, 0))
        expect_equal(await there.append_events(item, 2, [b'{"n":2}']), True, "adding to its stream")
        expect_equal(await there.put(replace(item, status="completed")), True, "its end")
        expect_equal(await following, [b'{"n":1}', b'{"n":2}'], "its stream")
        expect_equal(
            await there.put(again, unless_status=finished), False, "taking up what has ended"
        )


async def collect_events(
    store: ResponseStore, response: Response, after_number: int
) -> list[bytes]:
    return [
        event
        async for part in store.follow_events(ANN, response.id, after_number)
        for event in part.events
    ]


@register_check("stops a run that was cancelled, deleted or evicted elsewhere")
async def check_remote_stop(bench: StoreBench) -> None:
    here = await bench.open_store()
    there = await bench.open_store()
    made = [make_response(name, status="in_progress") for name in ("cancelled", "deleted", "kept")]
    stopped: list[str] = []
    both = asyncio.Event()

    def record_stop(name: str) -> None:
        stopped.append(name)
        if len(stopped) == 2:
            both.set()

    for item in made:
        await here.create(item)
        here.track_run(item, partial(record_stop, item.id))
    await there.set_status(ANN, "cancelled", "cancelled")
    await there.delete(ANN, "deleted")
    try:
        await asyncio.wait_for(both.wait(), 1)
    except TimeoutError as error:
        raise CheckFailed(f"within a second it stopped {stopped} alone") from error
    expect_equal(sorted(stopped), ["cancelled", "deleted"], "what was stopped")
    here.untrack_run(made[2])
    expect_equal(list(here.tracked_runs), [], "what is attended")


@register_check("keeps a stream's events, from any number on, in any process")
async def check_event_log(bench: StoreBench) -> None:
    here, there = await bench.open_store(), await bench.open_store()
    made = make_response(status="in_progress")
    await here.create(made)
    events = [msgspec.json.encode({"sequence_number": number}) for number in range(100)]
    begun = [
        asyncio.create_task(collect_events(store, made, after))
        for store in (here, there)
        for after in (-1, 6)
    ]
    for first in range(0, 100, 10):
        expect_equal(
            await here.append_events(made, first, events[first : first + 10]), True, "adding"
        )
        expect_equal(
            await here.append_events(made, first, events[first : first + 10]), True, "adding again"
        )
        await asyncio.sleep(0.02)
    await here.put(replace(made, status="completed"))
    for task, after in zip(begun, (-1, 6) * 2, strict=True):
        expect_equal(await task, events[after + 1 :], f"those behind {after}, followed")
    for after in (-1, 0, 9, 10, 55, 98, 99, 1000, 2**40):
        expect_equal(
            await collect_events(there, made, after),
            events[after + 1 :],
            f"those behind {after}, afterwards",
        )
    expect_equal(await collect_events(here, made, -1000), events, "those behind a number below all")


@register_check("keeps no more of a stream than it should")
async def check_event_bounds(bench: StoreBench) -> None:
    store = await bench.open_store(max_events=50, events_kept_s=SHORT_S)
    made = make_response(status="in_progress")
    await store.create(made)
    for first in range(0, 200, 10):
        await store.append_events(made, first, [b'{"n":%d}' % (first + n) for n in range(10)])
    log = await store.read_events(ANN, made.id, -1)
    expect_equal(
        log and [chunk.first_number for chunk in log.chunks],
        [150, 160, 170, 180, 190],
        "what is left",
    )
    await store.put(replace(made, status="failed"))
    await store.put(made, unless_status=FINISHED - {"failed"})  # it runs again
    await asyncio.sleep(SHORT_S)
    await store.sweep()
    log = await store.read_events(ANN, made.id, -1)
    expect_equal(log and len(log.chunks), 5, "chunks of what runs, after a while")
    await store.append_events(made, 200, [b'{"n":200}'])
    await store.put(replace(made, status="completed"))
    await store.sweep()
    log = await store.read_events(ANN, made.id, -1)
    expect_equal(log and len(log.chunks), 6, "chunks of what has just finished")
    await asyncio.sleep(1.5 * SHORT_S)
    await store.sweep()
    log = await store.read_events(ANN, made.id, -1)
    expect_equal(log and log.chunks, [], "those of what has finished, after a while")
    expect_equal(await get_status(store, made), "completed", "its status")


@register_check("counts what there is")
async def check_stats(bench: StoreBench) -> None:
    store = await bench.open_store()
    empty = await store.collect_stats(EVERYBODY)
    expect_equal(
        (empty.response_count, empty.bytes, empty.event_bytes, empty.oldest),
        (0, 0, 0, None),
        "of nothing",
    )
    made = [
        make_response(owner=owner, status=status, model=f"m{number}", created_at=5.0 + number)
        for number, (owner, status) in enumerate(
            ((ANN, "completed"), (ANN, "failed"), (BOB, "completed"), (BOB, "in_progress"))
        )
    ]
    for item in made:
        await store.create(item)
    await store.append_events(made[3], 0, [b"{}"])
    every = await store.collect_stats(EVERYBODY)
    expect_equal(every.statuses, {"completed": 2, "failed": 1, "in_progress": 1}, "by status")
    expect_equal(every.models, {"m0": 1, "m1": 1, "m2": 1, "m3": 1}, "by model")
    expect_equal((every.response_count, every.oldest), (4, 5.0), "in all, and the oldest")
    hers = await store.collect_stats(ANN)
    expect_equal((hers.response_count, hers.event_bytes), (2, None), "one owner's")
    if not (0 < hers.bytes < every.bytes and every.event_bytes):
        raise CheckFailed(f"bytes: {hers}, and of all {every}")


@register_check("stores no credentials of tools")
async def check_redaction(bench: StoreBench) -> None:
    store = await bench.open_store()
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
    made = make_response(status="in_progress", body=body)
    await store.create(made)
    event = b'{"type":"response.created","response":%s}' % body
    await store.append_events(made, 0, [event])
    await store.put(made)
    kept = await store.backend.get(ANN, made.id)
    found = await store.get(ANN, made.id)
    log = [event async for part in follow_first_batch(store, made) for event in part]
    for where, text in (
        ("body", found and found.body),
        ("log", log[0]),
        ("bytes", kept and kept.body),
    ):
        if not text or word.encode() in text:
            raise CheckFailed(f"the {where}: {text!r}")
    mcp, function = msgspec.json.decode(found.body if found else b"")["tools"]
    expect_equal(mcp["server_url"], "https://h/p", "the URL")
    expect_equal(function, tools[1], "a function, which has none")


async def follow_first_batch(
    store: ResponseStore, response: Response
) -> AsyncIterator[list[bytes]]:
    async for part in store.follow_events(response.owner, response.id):
        yield part.events
        return


@register_check("is opened by several at once")
async def check_concurrent_open(bench: StoreBench) -> None:
    stores = await asyncio.gather(*(bench.open_store() for _ in range(6)))
    made = make_response()
    expect_equal(await stores[0].create(made), True, "storing in one")
    for store in stores:
        expect_equal(await store.get(ANN, made.id), made, "what each of them has")
