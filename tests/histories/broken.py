"""Backends on SQLite with one defect each, for the checker to find."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from vllmops_responses.store.backend import EVERYBODY, Backend, EventChunk, EventLog, Limits
from vllmops_responses.store.backends.sqlite import Sqlite
from vllmops_responses.store.compression import deflate
from vllmops_responses.store.conversation_backend import (
    ConversationItem,
    ConversationResult,
    ItemAddition,
    ItemPage,
)
from vllmops_responses.store.stored_response import Response


class Broken(Sqlite):
    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, limits, "vllmops")


class LosesAddition(Broken):
    async def add_items(
        self, addition: ItemAddition, *args: Any, **kwargs: Any
    ) -> ConversationResult:
        return await super().add_items(replace(addition, entries=[]), *args, **kwargs)


class TearsAddition(Broken):
    async def add_items(
        self, addition: ItemAddition, *args: Any, **kwargs: Any
    ) -> ConversationResult:
        torn = replace(addition, entries=list(addition.entries)[:1])
        return await super().add_items(torn, *args, **kwargs)


class DoublesAddition(Broken):
    async def add_items(
        self, addition: ItemAddition, *args: Any, **kwargs: Any
    ) -> ConversationResult:
        entries = list(addition.entries)
        again = [replace(one, id=one.id + "x") for one in entries]
        twice = replace(addition, entries=entries + again)
        return await super().add_items(twice, *args, **kwargs)


class SwapsOrder(Broken):
    async def add_items(
        self, addition: ItemAddition, *args: Any, **kwargs: Any
    ) -> ConversationResult:
        swapped = replace(addition, entries=list(addition.entries)[::-1])
        return await super().add_items(swapped, *args, **kwargs)


class AddsWhatItRefuses(Broken):
    async def add_items(
        self, addition: ItemAddition, *args: Any, **kwargs: Any
    ) -> ConversationResult:
        outcome = await super().add_items(addition, *args, **kwargs)
        return (
            ConversationResult.LOCKED
            if outcome is ConversationResult.DONE and not addition.holder
            else outcome
        )


class ReadsStale(Broken):
    kept: ClassVar[dict[str, ItemPage | None]] = {}

    async def list_items(self, owner: str, conversation_id: str, **given: Any) -> ItemPage | None:
        if conversation_id not in self.kept:
            self.kept[conversation_id] = await super().list_items(owner, conversation_id, **given)
        return self.kept[conversation_id]


class LosesOldest(Broken):
    async def list_items(self, *args: Any, **given: Any) -> ItemPage | None:
        found = await super().list_items(*args, **given)
        return found and ItemPage(found.entries[1:], found.has_more)


class ForgetsHold(Broken):
    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        held = await super().hold_conversation(owner, conversation_id, holder)
        await self.release_conversation(conversation_id, holder)
        return held

    async def add_items(
        self, addition: ItemAddition, *args: Any, **kwargs: Any
    ) -> ConversationResult:
        return await super().add_items(replace(addition, holder=""), *args, **kwargs)


class HoldSeesNothing(Broken):
    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        outcome, entries = await super().hold_conversation(owner, conversation_id, holder)
        return outcome, entries[:-2]


class DropsOwner(Broken):
    async def list_items(self, owner: str, *args: Any, **given: Any) -> ItemPage | None:
        return await super().list_items(EVERYBODY, *args, **given)


class DropsOwnerOfResponses(Broken):
    async def get(self, owner: str, response_id: str) -> Response | None:
        return await super().get(EVERYBODY, response_id)


class KeepsDeleted(Broken):
    async def delete(self, owner: str, response_id: str) -> bool:
        return await self.get(owner, response_id) is not None


class KeepsDeletedConversation(Broken):
    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        return await self.get_conversation(owner, conversation_id) is not None


class StatusGoesBack(Broken):
    seen: ClassVar[dict[str, int]] = {}

    async def get(self, owner: str, response_id: str) -> Response | None:
        found = await super().get(owner, response_id)
        self.seen[response_id] = self.seen.get(response_id, 0) + 1
        if found and self.seen[response_id] % 2 == 0:
            return replace(found, status="queued")
        return found


class CompletesCancelled(Broken):
    async def put(self, response: Response, **_: Any) -> bool:
        return await super().put(response, unless_status=())


class LosesAnswer(Broken):
    seen: ClassVar[dict[str, int]] = {}

    async def get(self, owner: str, response_id: str) -> Response | None:
        found = await super().get(owner, response_id)
        self.seen[response_id] = self.seen.get(response_id, 0) + 1
        if found and found.status == "completed" and self.seen[response_id] % 2:
            body = deflate(
                json.dumps({"id": found.id, "status": "completed", "output": []}).encode()
            )
            return replace(found, body=body)
        return found


class LosesResponse(Broken):
    async def put(self, response: Response, **given: Any) -> bool:
        done = await super().put(response, **given)
        await self.delete(response.owner, response.id)
        return done


class DoublesEvent(Broken):
    async def read_events(self, owner: str, response_id: str, after_number: int) -> EventLog | None:
        found = await super().read_events(owner, response_id, after_number - 1)
        if found is None or after_number < 0:
            return found
        later = [
            EventChunk(one.first_number + 1, one.last_number + 1, one.events)
            for one in found.chunks[:1]
        ]
        return EventLog([*later, *found.chunks[1:]], found.running)


class LosesEvents(Broken):
    async def append_events(self, response: Response, chunk: EventChunk) -> bool:
        return chunk.first_number > 0 or await super().append_events(response, chunk)


class ForgetsBeginning(Broken):
    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        turns = await super().list_turns(owner, response_id)
        return [replace(turn, previous_id=None) for turn in turns[-1:]]


class FollowsStale(Broken):
    first: ClassVar[dict[str, bytes]] = {}

    async def create(self, response: Response) -> bool:
        self.first[response.id] = response.body
        return await super().create(response)

    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        turns = await super().list_turns(owner, response_id)
        return [replace(turn, body=self.first.get(turn.id, turn.body)) for turn in turns]


BROKEN: Sequence[type[Backend]] = Broken.__subclasses__()
