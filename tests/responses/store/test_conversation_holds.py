"""What a store does about the conversations that it holds for the turns of its process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from vllmops_responses.store.backend import Limits
from vllmops_responses.store.backends.memory import Memory
from vllmops_responses.store.conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
)
from vllmops_responses.store.conversation_store import ConversationHold
from vllmops_responses.store.response_store import ResponseStore


class Noting(Memory):
    """Tells which holds it was to renew."""

    def __init__(self) -> None:
        super().__init__("memory://", Limits())
        self.renewed: list[Mapping[str, str]] = []

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        self.renewed.append(dict(holders))


class Slow(Memory):
    """Holds for a caller who has left, as a database's server does."""

    def __init__(self) -> None:
        super().__init__("memory://", Limits())
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()

    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        self.asked.set()
        await self.goes_on.wait()
        return await super().hold_conversation(owner, conversation_id, holder)


def test_a_caller_that_leaves_leaves_no_hold_behind() -> None:
    async def run() -> None:
        backend = Slow()
        async with ResponseStore(backend) as store:
            await store.conversations.create(Conversation(id="conv", owner=""), [])
            task = asyncio.create_task(store.conversations.hold("", "conv", "gone"))
            await backend.asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            backend.goes_on.set()
            await asyncio.wait(store.conversations.releases)
            assert not backend.stored_conversations["conv"].is_held

    asyncio.run(run())


def test_a_hold_that_has_lapsed_does_not_keep_the_next_from_being_renewed() -> None:
    async def run() -> None:
        backend, names = Noting(), [f"conv_{n}" for n in range(16)]
        async with ResponseStore(backend) as store:
            kept, lapsed, held = (
                store.conversations,
                list[ConversationHold](),
                list[ConversationHold](),
            )
            for name in names:
                await kept.create(Conversation(id=name, owner=""), [])
                for holder, holds in (("first", lapsed), ("second", held)):
                    given = await kept.hold("", name, holder)
                    assert isinstance(given, ConversationHold)
                    holds.append(given)
                    backend.stored_conversations[
                        name
                    ].held_until = 0.0  # as if the store had been away for that long
            await kept.renew_holds()
            assert backend.renewed == [dict.fromkeys(names, "second")]
            for one in lapsed:
                await kept.release_hold(one)
            await kept.renew_holds()
            assert backend.renewed[-1] == dict.fromkeys(names, "second")

    asyncio.run(run())
