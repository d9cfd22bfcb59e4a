"""What a store does about the conversations that it holds for the turns of its process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from vllmops.store.backend import Limits
from vllmops.store.conversation_store import Held
from vllmops.store.conversations import Conversation
from vllmops.store.memory import Memory
from vllmops.store.store import ResponseStore


class Noting(Memory):
    """Tells which holds it was to renew."""

    def __init__(self) -> None:
        super().__init__("memory://", Limits())
        self.renewed: list[Mapping[str, str]] = []

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        self.renewed.append(dict(holders))


def test_a_hold_that_has_lapsed_does_not_keep_the_next_from_being_renewed() -> None:
    async def run() -> None:
        backend, names = Noting(), [f"conv_{n}" for n in range(16)]
        async with ResponseStore(backend) as store:
            kept, lapsed, held = store.conversations, list[Held](), list[Held]()
            for name in names:
                await kept.create(Conversation(id=name, owner=""), [])
                for holder, holds in (("first", lapsed), ("second", held)):
                    given = await kept.hold("", name, holder)
                    assert isinstance(given, Held)
                    holds.append(given)
                    backend.kept[name].until = 0.0  # as if the store had been away for that long
            await kept.renew()
            assert backend.renewed == [dict.fromkeys(names, "second")]
            for one in lapsed:
                await kept.release(one)
            await kept.renew()
            assert backend.renewed[-1] == dict.fromkeys(names, "second")

    asyncio.run(run())
