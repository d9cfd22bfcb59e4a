"""Every backend keeps every promise, and each check finds a backend that does not."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllmops.model.environment import STORE_CLASS
from vllmops.support.errors import VllmopsError
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import (
    FINISHED,
    RUNNING,
    EventChunk,
    Limits,
    Response,
    ResponseQuery,
)
from vllmops_responses.store.backends.memory import Memory
from vllmops_responses.store.backends.memory_conversations import StoredConversation
from vllmops_responses.store.conformance.check_harness import StoreBench
from vllmops_responses.store.conformance.response_checks import (
    CHECKS,
    CheckResult,
    collect_caveats,
    run_check,
    run_checks,
)
from vllmops_responses.store.conversation_backend import (
    ConversationBackend,
    ConversationItem,
    ConversationResult,
    ItemAddition,
)
from vllmops_responses.store.response_store import ResponseStore

from ...support.extent import programs
from ...support.promises import TIMED, without_timed

pytestmark = programs


@pytest.fixture
def untimed_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    without_timed(monkeypatch)


async def collect_check_results(url: str) -> list[CheckResult]:
    return [item async for item in run_checks(url)]


def test_every_backend_keeps_every_promise(url: str, untimed_promises: None) -> None:
    outcomes = asyncio.run(collect_check_results(url))
    assert [item for item in outcomes if item.problem] == []
    assert len(outcomes) == len(CHECKS) >= 18


def test_every_backend_keeps_what_it_promises_about_times(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CHECKS.keys() - set(TIMED):
        monkeypatch.delitem(CHECKS, name)
    outcomes = asyncio.run(collect_check_results(url))
    assert [item for item in outcomes if item.problem] == []
    assert len(outcomes) == len(CHECKS) == len(TIMED)


class Careless(Memory):
    """A backend that a user might write; each of these has one defect."""


class LosesInput(Careless):
    async def create(self, response: Response) -> bool:
        return await super().create(replace(response, input=response.body))


class Overwrites(Careless):
    async def create(self, response: Response) -> bool:
        await self.delete("*", response.id)
        return await super().create(response)


class CompletesWhatWasCancelled(Careless):
    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        return await super().put(response, unless_status=())


class Resurrects(Careless):
    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        if self.peek_response(response.id) is None:
            return await self.create(response)
        return await super().put(response, unless_status=unless_status)


class ForgetsWhichRun(Careless):
    def find_run(self, response: Response) -> Response | None:
        return self.find_response(response.owner, response.id)


class SwapsTwice(Careless):
    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed_statuses: Collection[str] = RUNNING,
        error: str = "",
    ) -> Any:
        swap = await super().set_status(
            owner, response_id, status, allowed_statuses=allowed_statuses, error=error
        )
        return replace(swap, changed=swap.response is not None)


class ShowsEverybodyEverything(Careless):
    def find_response(self, owner: str, response_id: str) -> Response | None:
        return super().find_response("*", response_id)


class ListsBackwards(Careless):
    async def list_responses(self, owner: str, query: ResponseQuery) -> Any:
        return await super().list_responses(owner, replace(query, descending=not query.descending))


class ForgetsTurns(Careless):
    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        turns = await super().list_turns(owner, response_id)
        return [replace(item, previous_id=None) for item in turns[-50:]]


class EvictsTheOldest(Careless):
    def mark_used(self, response: Response) -> None:
        pass


class EvictsWhatRuns(Careless):
    def evict_lru(self, owner: str, spared_id: str) -> None:
        share = self.shares[owner]
        share.finished_ids, share.under_way = share.under_way, share.finished_ids
        super().evict_lru(owner, spared_id)
        share.finished_ids, share.under_way = share.under_way, share.finished_ids


class KnowsNoShares(Careless):
    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, replace(limits, max_per_key=None))


class EvictsFromWhoHasLeast(Careless):
    def find_largest_owner(self, spared_response: Response) -> str:
        level = min(self.levels)
        return next(iter(self.levels[level]))


class KeepsTooMuch(Careless):
    def evict_lru(self, owner: str, spared_id: str) -> None:
        self.limits = replace(self.limits, max_size=2 * self.limits.max_size)


class NeverExpires(Careless):
    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, replace(limits, ttl_s=1e9))


class WaitsForTheDead(Careless):
    def expire_lease(self, response_id: str) -> bool:
        return False


class EndsWhatLapsed(Careless):
    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        return not response.is_running and await super().put(response, unless_status=unless_status)


class RunsOn(Careless):
    async def select_running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        return set(ids)


class LosesEvents(Careless):
    async def append_events(self, response: Response, chunk: EventChunk) -> bool:
        return chunk.first_number == 50 or await super().append_events(response, chunk)


class KeepsEveryEvent(Careless):
    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, replace(limits, max_events=10**9))


class KeepsEventsForEver(Careless):
    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, replace(limits, events_kept_s=1e9))


class CountsOthers(Careless):
    async def collect_stats(self, owner: str) -> Any:
        return await super().collect_stats("*")


class ListsItemsBackwards(Careless):
    async def list_items(
        self,
        owner: str,
        conversation_id: str,
        *,
        after_id: str | None,
        limit: int,
        descending: bool,
    ) -> Any:
        return await super().list_items(
            owner, conversation_id, after_id=after_id, limit=limit, descending=not descending
        )


class DeletesNoItems(Careless):
    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        found = self.find_conversation(owner, conversation_id)
        return found is not None


class AddsAndStoresApart(Careless):
    async def add_items(
        self, addition: ItemAddition, response: Response | None = None, *, is_new: bool = False
    ) -> ConversationResult:
        outcome = await super().add_items(addition)
        if response is not None:
            await (self.create(response) if is_new else self.put(response))
        return outcome


class LetsEverybodyHold(Careless):
    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        if found := self.find_conversation(owner, conversation_id):
            found.holder = ""
        return await super().hold_conversation(owner, conversation_id, holder)


class HoldsForEver(Careless):
    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        done = await super().hold_conversation(owner, conversation_id, holder)
        if found := self.find_conversation(owner, conversation_id):
            found.held_until += 1e9
        return done


class ShowsEverybodysConversations(Careless):
    def find_conversation(self, owner: str, conversation_id: str) -> StoredConversation | None:
        return super().find_conversation("*", conversation_id)


class KeepsEveryConversation(Careless):
    def evict_conversations(self, spared_id: str) -> None:
        pass


class KeepsFewItems(Careless):
    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        outcome, entries = await super().hold_conversation(owner, conversation_id, holder)
        return outcome, entries[:1000]


class MakesNoRoomForTurns(Careless):
    async def add_items(
        self, addition: ItemAddition, response: Response | None = None, *, is_new: bool = False
    ) -> ConversationResult:
        limits, self.limits = self.limits, Limits()
        try:
            return await super().add_items(addition, response, is_new=is_new)
        finally:
            self.limits = limits


FOUND: dict[type[Careless], str] = {
    LosesInput: "gives back what",
    Overwrites: "stores an id once",
    CompletesWhatWasCancelled: "changes a status",
    Resurrects: "deletes for good",
    ForgetsWhichRun: "deletes for good",
    SwapsTwice: "changes a status",
    ShowsEverybodyEverything: "keeps owners apart",
    ListsBackwards: "lists in order",
    ForgetsTurns: "puts a conversation together",
    EvictsTheOldest: "evicts what was used",
    EvictsWhatRuns: "evicts what was used",
    KeepsTooMuch: "evicts what was used",
    KnowsNoShares: "lets an owner have",
    EvictsFromWhoHasLeast: "evicts from the owner",
    NeverExpires: "expires",
    WaitsForTheDead: "fails runs whose server has gone",
    EndsWhatLapsed: "takes up again",
    RunsOn: "stops a run",
    LosesEvents: "keeps a stream's events",
    KeepsEveryEvent: "keeps no more of a stream",
    KeepsEventsForEver: "keeps no more of a stream",
    CountsOthers: "counts",
    ListsItemsBackwards: "gives back a conversation",
    KeepsFewItems: "adds thousands of items",
    DeletesNoItems: "deletes a conversation",
    AddsAndStoresApart: "adds a turn",
    MakesNoRoomForTurns: "makes room for",
    LetsEverybodyHold: "lets one turn",
    HoldsForEver: "lets go of",
    ShowsEverybodysConversations: "keeps the conversations of owners",
    KeepsEveryConversation: "keeps no more conversations",
}


@pytest.mark.parametrize("defect", FOUND, ids=lambda item: item.__name__)
def test_a_check_finds_each_defect(defect: type[Careless], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_factory, "load_backend_class", lambda _: defect)
    monkeypatch.setenv(STORE_CLASS, "a.user.s.Own")
    (name,) = [item for item in CHECKS if item.startswith(FOUND[defect])]
    sound = asyncio.run(run_check(name, CHECKS[name], "memory://"))
    assert sound.problem
    assert "Error" not in sound.problem.partition(":")[0]


def test_no_check_is_without_a_defect_that_it_finds() -> None:
    found = {name for name in CHECKS for start in FOUND.values() if name.startswith(start)}
    # These look at what the store does around a backend, or at servers.
    assert set(CHECKS) - found == {
        "takes no id that can't be one",
        "replaces what runs, and nothing else",
        "stores no credentials of tools",
        "is opened by several at once",
    }


@pytest.fixture
def own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, str]]:
    """A class of a user's own in a module; gives the environment that names it."""

    def write(body: str) -> dict[str, str]:
        (tmp_path / "own.py").write_text(
            "from vllmops_responses.store.backends.memory import Memory\n"
            "from vllmops_responses.store.conformance.response_checks import make_response\n"
            f"class Own(Memory):\n    {body}\n"
        )
        return {STORE_CLASS: "own.Own", "PYTHONPATH": str(tmp_path)}

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def test_the_command(vllmops: Any, tmp_path: Path, untimed_promises: None) -> None:
    path = tmp_path / "own.db"
    answer = vllmops("responses", "check-store", f"sqlite:///{path}", "--json")
    data = json.loads(answer.out)["data"]
    assert [item["name"] for item in data["checks"]] == list(CHECKS)
    assert {item["problem"] for item in data["checks"]} == {""}
    assert (answer.code, answer.err) == (0, "")
    assert data["caveats"] == []
    # It leaves nothing behind.
    with closing(sqlite3.connect(path)) as kept:
        assert kept.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_the_command_on_a_class_with_a_defect(vllmops: Any, own_class: Any) -> None:
    env = own_class("async def delete(self, owner, response_id): raise KeyError(response_id)")
    answer = vllmops("responses", "check-store", "memory://", env=env)
    assert answer.code == 1
    assert "deletes for good: KeyError: 'resp_" in answer.out
    assert "checks failed" in answer.out
    assert "note: everything is gone with the process" in answer.out


def test_a_class_without_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(Memory):
        """A user's own, of a time before there were conversations."""

        hold_conversation = ConversationBackend.hold_conversation

    monkeypatch.setattr(backend_factory, "load_backend_class", lambda _: Older)
    monkeypatch.setenv(STORE_CLASS, "a.user.s.Own")
    (note,) = [
        note for note in asyncio.run(collect_caveats("memory://")) if "conversations" in note
    ]
    assert "501" in note
    store = ResponseStore(Older("memory://", Limits()))
    with pytest.raises(VllmopsError, match="Older keeps no conversations"):
        asyncio.run(store.conversations.get("", "conv_x"))


def test_the_command_deletes_nothing(vllmops: Any, own_class: Any) -> None:
    env = own_class("async def open(self): await self.create(make_response())")
    answer = vllmops("responses", "check-store", "memory://", "--json", env=env)
    assert (answer.code, answer.error["code"]) == (1, "store.not-empty")


def test_interrupted_check_leaves_no_tables(tmp_path: Path) -> None:
    async def main() -> None:
        bench = StoreBench(f"sqlite:///{tmp_path}/a.db?namespace=check")
        backend = (await bench.open_store()).backend
        drop, began = backend.delete_store, asyncio.Event()

        async def slow() -> None:
            if not began.is_set():
                began.set()
                await asyncio.sleep(600)
            await drop()

        backend.delete_store = slow  # type: ignore[method-assign]
        ending = asyncio.create_task(bench.close())
        await began.wait()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending

    asyncio.run(main())
    with closing(sqlite3.connect(tmp_path / "a.db")) as file:
        assert not file.execute("SELECT name FROM sqlite_master").fetchall()
