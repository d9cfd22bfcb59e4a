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

from vllmops_responses.server.conversations.conversation_turns import (
    CREATED,
    ConversationsApi,
    ConversationTurns,
    build_content_parts,
    parse_request_body,
    validate_new_items,
)
from vllmops_responses.server.wire_format import ApiError
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import StoreUnavailable
from vllmops_responses.store.conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
)
from vllmops_responses.store.response_store import ResponseStore

CONVERSATION = "conv_1"


def turn(*items: Any, response: str = "resp_1") -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(request_id=response),
        owner="",
        began=1.0,
        items=msgspec.json.encode(items),
        hold=None,
    )


def user(name: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": "hi", "id": name}


@asynccontextmanager
async def open_store(**given: Any) -> AsyncIterator[ResponseStore]:
    """A store with a conversation of one item, ``msg_kept``."""
    async with ResponseStore(backend_factory.make_backend("memory://"), **given) as store:
        kept = [ConversationItem("msg_kept", msgspec.json.encode(user("msg_kept")))]
        made = Conversation(id=CONVERSATION, owner="")
        assert await store.conversations.create(made, kept) is ConversationResult.DONE
        yield store


async def is_conversation_free(store: ResponseStore) -> bool:
    """Whether nobody holds the conversation."""
    outcome, _ = await store.backend.hold_conversation("", CONVERSATION, "other")
    await store.backend.release_conversation(CONVERSATION, "other")
    return outcome is ConversationResult.DONE


CHOOSES = """
import asyncio, sys
from types import SimpleNamespace
from tests.responses.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops_responses.server.serving import StoreBackedServing
from vllmops_responses.server.wire_format import ApiError

class Store:
    async def get(self, who, name):
        return name == "taken"

async def main():
    serving = StoreBackedServing.__new__(StoreBackedServing)
    serving.store = Store()
    for store, conversation in ((True, None), (False, "conv_1"), (True, "conv_1"), (False, None)):
        for name in ("\\0", "x" * 257, "a/b", "taken", "mine"):
            request = SimpleNamespace(
                request_id=name, store=store, model_fields_set={"request_id"}
            )
            try:
                await serving.validate_response_id(request, conversation)
            except ApiError as error:
                print(error.status, error.param)
            else:
                print("taken up")

asyncio.run(main())
"""


def test_an_id_that_a_request_chooses_is_checked_wherever_the_store_gets_it() -> None:
    """A conversation is held in that name, also where the response is not stored."""
    done = subprocess.run(
        [sys.executable, "-c", CHOOSES], capture_output=True, text=True, check=False
    )
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
        async with open_store() as store:
            turns, given = ConversationTurns(store), turn(user(name))
            if param is None:
                await turns.begin_turn(given, CONVERSATION)
                assert not await is_conversation_free(store)
                await turns.release_turn(given)
            else:
                with pytest.raises(ApiError) as caught:
                    await turns.begin_turn(given, CONVERSATION)
                assert (caught.value.status, caught.value.param) == (400, param)
            assert await is_conversation_free(store)

    asyncio.run(main())


def test_a_reference_can_not_be_in_a_conversation() -> None:
    for reference in ({"type": "item_reference", "id": "msg_kept"}, {"id": "msg_kept"}):
        with pytest.raises(ApiError, match="item_reference") as caught:
            validate_new_items([msgspec.Raw(msgspec.json.encode(reference))])
        assert (caught.value.status, caught.value.param) == (400, "items")


def test_the_ids_of_the_items_of_a_conversation() -> None:
    async def main() -> None:
        async with open_store() as store:
            turns = ConversationTurns(store)
            assert await turns.list_item_ids("", CONVERSATION) == {"msg_kept"}
            assert await turns.list_item_ids("other", CONVERSATION) == set()
            assert await turns.list_item_ids("", "conv_none") == set()
            assert await is_conversation_free(store)

    asyncio.run(main())


def test_two_items_with_one_id_are_refused_before_the_model_answers() -> None:
    async def main() -> None:
        async with open_store() as store:
            turns = ConversationTurns(store)
            with pytest.raises(ApiError) as caught:
                await turns.begin_turn(turn(user("a"), user("b"), user("a")), CONVERSATION)
            assert (caught.value.status, caught.value.param) == (400, "input")
            assert await is_conversation_free(store)
            # These get an id each.
            given = turn(user("a/b"), user("a/b"), user(""), user(""), user(None), user(None))
            await turns.begin_turn(given, CONVERSATION)
            assert await turns.finish_turn(given, None, b'{"output":[]}', is_new=True)

    asyncio.run(main())


def test_unreadable_item_leaves_no_hold() -> None:
    async def main() -> None:
        async with open_store() as store:
            with pytest.raises(msgspec.DecodeError):
                await ConversationTurns(store).begin_turn(turn(1), CONVERSATION)
            assert await is_conversation_free(store)

    asyncio.run(main())


async def wait_until_free(store: ResponseStore) -> None:
    while not await is_conversation_free(store):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_hold_that_nobody_waits_for_any_more_is_let_go(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend may have done it when the caller is cancelled, or has no time left."""

    async def main() -> None:
        async with open_store(deadline_s=60 if cancelled else 0.2) as store:
            hold, held = store.backend.hold_conversation, asyncio.Event()

            async def slow(*given: Any) -> Any:
                await hold(*given)
                held.set()
                await asyncio.sleep(600)

            with monkeypatch.context() as late:
                late.setattr(store.backend, "hold_conversation", slow)
                begun = asyncio.create_task(
                    ConversationTurns(store).begin_turn(turn(), CONVERSATION)
                )
                if cancelled:
                    await held.wait()
                    begun.cancel()
                with pytest.raises(asyncio.CancelledError if cancelled else StoreUnavailable):
                    await begun
            await wait_until_free(store)

    asyncio.run(main())


def test_a_turn_whose_end_fails_lets_go_once_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with open_store() as store:
            turns, given = ConversationTurns(store), turn()
            await turns.begin_turn(given, CONVERSATION)

            async def down(*_: Any, **__: Any) -> Any:
                raise OSError("it is down")

            with monkeypatch.context() as outage:
                outage.setattr(store.backend, "add_items", down)
                with pytest.raises(StoreUnavailable):
                    await turns.finish_turn(given, None, b'{"output":[]}', is_new=True)
            release = store.backend.release_conversation

            async def refuse_release(name: str, holder: str) -> None:
                if holder == given.request.request_id:
                    raise OSError("it is down")
                await release(name, holder)

            with monkeypatch.context() as outage:
                outage.setattr(store.backend, "release_conversation", refuse_release)
                await turns.release_turn(given)
                assert store.conversations.retries
                assert not await is_conversation_free(store)
            await wait_until_free(store)
            await asyncio.sleep(0)  # what is done takes itself off
            assert not {*store.conversations.releases, *store.conversations.retries}

    asyncio.run(main())


def test_the_end_of_a_store_waits_for_no_outage_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_store() as store:
            turns, given = ConversationTurns(store), turn()
            await turns.begin_turn(given, CONVERSATION)

            async def down(*_: Any) -> None:
                raise OSError("it is down")

            monkeypatch.setattr(store.backend, "release_conversation", down)
            await turns.release_turn(given)
            (task,) = store.conversations.retries
        assert task.cancelled()

    asyncio.run(main())


def test_a_part_whose_type_is_no_text_is_shown_as_it_is() -> None:
    content = [{"type": ["output_text"]}, {"type": {}}, {"type": None}, {"text": "a"}]
    assert build_content_parts(content, "user", ()) == content
    assert build_content_parts([{"type": "input_image"}], "user", ()) == [
        {"type": "input_image", "detail": "auto"}
    ]


@pytest.mark.parametrize("after", ["msg_unknown", "\0", "\ud800"])
def test_a_list_behind_no_item_is_refused(after: str) -> None:
    async def main() -> None:
        async with open_store() as store:
            with pytest.raises(ApiError) as caught:
                await ConversationsApi(store).list_items("", CONVERSATION, after_id=after)
            assert (caught.value.status, caught.value.param) == (400, "after")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"metadata":{"a":1}}', "metadata"),
        (b'{"metadata":"x"}', "metadata"),
        (b'{"items":"x"}', "items"),
        (b'{"foo":1}', "foo"),
        (b"[]", None),
    ],
)
def test_error_names_the_invalid_field_of_a_body(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request_body(CREATED, body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_item_that_is_not_in_utf_8_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        validate_new_items([msgspec.Raw(b'{"role":"user","content":"\xed\xa0\x80"}')])
    assert (caught.value.status, caught.value.param) == (400, "items")
