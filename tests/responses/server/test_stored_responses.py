"""What clients see of stored responses, without vLLM."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from vllmops_responses.server.conversations.conversation_turns import (
    ConversationTurns,
)
from vllmops_responses.server.stored_responses import StoredResponsesApi
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Limits, Response
from vllmops_responses.store.response_store import ResponseStore

DELTA = b'{"type":"response.output_text.delta"}'
RUN = Response(id="r", owner="", model="m", status="in_progress", body=b'{"status":"completed"}')


class Late(ResponseStore):
    """Whose run, which seemed to be lost, ends just before it is looked at again."""

    async def get(self, owner: str, response_id: str) -> Response | None:
        await self.append_events(RUN, 2, [DELTA])
        await self.put(replace(RUN, status="completed"))
        return await super().get(owner, response_id)


class Again(Late):
    """Whose run is put back into the queue just before it is looked at, and seems lost again."""

    again = False

    async def get(self, owner: str, response_id: str) -> Response | None:
        if self.again:
            return await super().get(owner, response_id)
        self.again = await self.put(replace(RUN, status="queued"))
        return await ResponseStore.get(self, owner, response_id)


@pytest.mark.parametrize("kind", [Late, Again])
def test_the_events_of_a_run_that_seemed_lost_come_before_its_end(
    kind: type[ResponseStore],
) -> None:
    async def read() -> list[str]:
        async with kind(backend_factory.make_backend("memory://", Limits(lease_s=0.01))) as store:
            await store.create(RUN)
            await store.append_events(RUN, 0, [b'{"type":"response.created"}'] * 2)
            await asyncio.sleep(0.05)
            stored = StoredResponsesApi(store, ConversationTurns(store), print)
            return [frame.type async for frame in stored.follow_events("", "r")]

    assert asyncio.run(read()) == [
        *("response.created", "response.created"),
        *("response.output_text.delta", "response.completed"),
    ]
