"""Turns of a conversation: what they hold, what hinders them, and that they let go of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllmops.agent.responses.conversations import ConversationObjects, ConversationTurns, parts
from vllmops.agent.responses.wire import Refused
from vllmops.store import opening
from vllmops.store.backend import StoreUnavailable
from vllmops.store.conversations import Conversation, Entry, Outcome
from vllmops.store.store import ResponseStore

CONVERSATION = "conv_1"


def turn(*items: Any, response: str = "resp_1") -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(request_id=response),
        owner="",
        began=1.0,
        items=msgspec.json.encode(items),
        held=None,
    )


def user(name: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": "hi", "id": name}


@asynccontextmanager
async def opened(**given: Any) -> AsyncIterator[ResponseStore]:
    """A store with a conversation of one item, ``msg_kept``."""
    async with ResponseStore(opening.backend("memory://"), **given) as store:
        kept = [Entry("msg_kept", msgspec.json.encode(user("msg_kept")))]
        made = Conversation(id=CONVERSATION, owner="")
        assert await store.conversations.create(made, kept) is Outcome.DONE
        yield store


async def free(store: ResponseStore) -> bool:
    """Whether nobody holds the conversation."""
    outcome, _ = await store.backend.hold("", CONVERSATION, "other")
    await store.backend.release(CONVERSATION, "other")
    return outcome is Outcome.DONE


CHOOSES = """
import asyncio, sys
from types import SimpleNamespace
from tests.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops.agent.responses.serving import StoredResponses
from vllmops.agent.responses.wire import Refused

class Store:
    async def get(self, who, name):
        return name == "taken"

async def main():
    serving = StoredResponses.__new__(StoredResponses)
    serving.store = Store()
    for store, conversation in ((True, None), (False, "conv_1"), (True, "conv_1"), (False, None)):
        for name in ("\\0", "x" * 257, "a/b", "taken", "mine"):
            request = SimpleNamespace(
                request_id=name, store=store, model_fields_set={"request_id"}
            )
            try:
                await serving.check_id(request, conversation)
            except Refused as error:
                print(error.status, error.param)
            else:
                print("taken up")

asyncio.run(main())
"""


def test_an_id_that_a_request_chooses_is_checked_wherever_the_store_gets_it() -> None:
    """A conversation is held in that name, also where the response is not stored."""
    done = subprocess.run([sys.executable, "-c", CHOOSES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = ["400 request_id"] * 3
    keeps, holds, both, neither = (done.stdout.splitlines()[n : n + 5] for n in (0, 5, 10, 15))
    assert keeps == both == [*wrong, keeps[3], "taken up"]
    assert keeps[3] != "taken up"
    assert holds == [*wrong, "taken up", "taken up"]
    assert neither == ["taken up"] * 5


@pytest.mark.parametrize(
    ("name", "param"),
    [("msg_kept", "input"), (["msg_kept"], None), ({"id": 1}, None), (5, None), ("a/b", None)],
)
def test_an_id_of_any_type_leaves_no_hold(name: Any, param: str | None) -> None:
    async def main() -> None:
        async with opened() as store:
            turns, given = ConversationTurns(store), turn(user(name))
            if param is None:
                await turns.begin(given, CONVERSATION)
                assert not await free(store)
                await turns.release(given)
            else:
                with pytest.raises(Refused) as caught:
                    await turns.begin(given, CONVERSATION)
                assert (caught.value.status, caught.value.param) == (400, param)
            assert await free(store)

    asyncio.run(main())


def test_what_can_not_be_read_leaves_no_hold() -> None:
    async def main() -> None:
        async with opened() as store:
            with pytest.raises(msgspec.DecodeError):
                await ConversationTurns(store).begin(turn(1), CONVERSATION)
            assert await free(store)

    asyncio.run(main())
