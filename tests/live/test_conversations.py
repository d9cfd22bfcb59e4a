"""Conversations of a real vLLM with two API servers, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
)
from openai.types.conversations import Conversation, ConversationDeletedResource
from openai.types.conversations.conversation_item import ConversationItem
from openai.types.conversations.conversation_item_list import ConversationItemList
from pydantic import TypeAdapter

from . import clients
from .clients import MODEL, SPEAKS, background, connect, say, wait_until_response_ends
from .conftest import Live

ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
OURS = "/v1/responses", "/v1/conversations"


@pytest.fixture(scope="module")
def client(text_pair: Live) -> Any:
    return connect(clients.base(text_pair))


@pytest.fixture(scope="module")
def stranger(text_pair: Live) -> Any:
    return connect(clients.base(text_pair), "two")


def list_conversation_items(client: Any, conversation: Any, order: str = "asc") -> list[Any]:
    return list(client.conversations.items.list(conversation.id, order=order, limit=100))


def roles(client: Any, conversation: Any) -> list[str]:
    return [item.role for item in list_conversation_items(client, conversation)]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def test_a_conversation_and_its_items(client: Any, stranger: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "lamp", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "c", "output": "on"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "theirs"}
    said = {"role": "assistant", "content": "I see"}
    first = [user("on"), thought, call, done, said]
    made = client.conversations.create(items=first, metadata={"who": "ann"})
    Conversation.model_validate(made.model_dump())
    assert made.metadata == {"who": "ann"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    page = client.conversations.items.create(
        made.id, items=[{"role": "user", "content": [image]}, {**user("mine"), "id": "msg_mine"}]
    )
    ConversationItemList.model_validate(page.model_dump())
    assert [item.type for item in page.data] == ["message", "message"]
    found = list_conversation_items(client, made)
    for item in found:
        ITEM.validate_python(item.model_dump(), strict=True)
        assert client.conversations.items.retrieve(item.id, conversation_id=made.id) == item
    kinds = ["message", "reasoning", "function_call", "function_call_output", *["message"] * 3]
    assert [item.type for item in found] == kinds
    assert list_conversation_items(client, made, "desc") == found[::-1]
    part = client.conversations.items.list(made.id, order="asc", after=found[1].id, limit=2)
    assert (part.data, part.has_more) == (found[2:4], True)
    wanted = ["reasoning.encrypted_content"]
    whole = client.conversations.items.list(made.id, order="asc", include=wanted).data[1]
    assert (whole.encrypted_content, found[1].encrypted_content) == ("theirs", None)
    left = client.conversations.items.delete("msg_mine", conversation_id=made.id)
    assert left == made
    assert len(list_conversation_items(client, made)) == 6
    changed = client.conversations.update(made.id, metadata={"other": "1"})
    assert client.conversations.retrieve(made.id) == changed
    assert changed.metadata == {"other": "1"}
    attempts: list[Callable[[], Any]] = [
        lambda: stranger.conversations.retrieve(made.id),
        lambda: stranger.conversations.delete(made.id),
        lambda: stranger.conversations.items.list(made.id),
        lambda: say(stranger, conversation=made.id),
        lambda: client.conversations.items.retrieve("msg_mine", conversation_id=made.id),
        lambda: client.conversations.items.delete("msg_mine", conversation_id=made.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    gone = client.conversations.delete(made.id)
    assert gone == ConversationDeletedResource(
        id=made.id, deleted=True, object="conversation.deleted"
    )
    attempts = [
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.items.create(made.id, items=[user("x")]),
        lambda: say(client, conversation=made.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()


def test_invalid_conversation_requests_are_refused(client: Any) -> None:
    made = client.conversations.create(items=[{**user("a"), "id": "msg_a"}])
    empty = client.conversations.create()
    page = client.conversations.items.list(empty.id)
    ConversationItemList.model_validate(page.model_dump())
    assert (page.data, page.has_more) == ([], False)
    before = say(client)
    create, add = client.conversations.create, client.conversations.items.create
    attempts: list[Callable[[], Any]] = [
        lambda: create(items=[user("x")] * 21),
        lambda: create(items=[{"type": "nonsense"}]),
        lambda: create(metadata={str(number): "" for number in range(17)}),
        lambda: create(metadata={"x" * 65: ""}),
        lambda: create(metadata={"x": "y" * 513}),
        lambda: create(metadata={"x": 1}),
        lambda: create(extra_body={"unknown": 1}),
        lambda: add(made.id, items=[user("x")] * 21),
        lambda: add(made.id, items=[{**user("x"), "id": "msg_a"}]),
        lambda: client.conversations.items.list(made.id, after="msg_x"),
        lambda: client.conversations.items.list(made.id, limit=101),
        lambda: client.conversations.items.list(made.id, include=["x"]),
        lambda: say(client, conversation=made.id, previous_response_id=before.id),
        lambda: say(client, extra_body={"conversation": {"name": made.id}}),
        lambda: say(client, extra_body={"conversation": ""}),
        lambda: say(client, [{**user("x"), "id": "msg_a"}], conversation=made.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.BadRequestError):
            attempt()
    assert len(list_conversation_items(client, made)) == 1
    say(client, conversation=made.id)  # what was refused holds it no more
    assert say(client, extra_body={"conversation": None}).conversation is None


def test_an_item_that_no_request_could_use_is_refused(client: Any) -> None:
    unknown = {"type": "wobble", "id": "wb_1"}
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,YQ=="}
    sealed = {"type": "compaction", "id": "cmp_1", "encrypted_content": "a"}
    for item in (unknown, sealed, {"role": "user", "content": [file]}):
        with pytest.raises(openai.BadRequestError) as raised:
            client.conversations.create(items=[user("a"), item])
        assert raised.value.param == "items[1]"
    refusal = {"type": "refusal", "refusal": "I won't."}
    answer = {"type": "message", "id": "msg_a", "role": "assistant", "status": "completed"}
    asked = [user("a"), {**answer, "content": [refusal]}]
    made = client.conversations.create(items=asked)
    assert say(client, conversation=made.id).output
    assert say(client, [*asked, user("b")]).output
    (kept,) = client.conversations.items.retrieve("msg_a", conversation_id=made.id).content
    assert kept.model_dump(exclude_none=True) == refusal


@pytest.mark.parametrize("way", ["id", "object"])
def test_turns_of_every_kind(client: Any, way: str) -> None:
    speak: Callable[..., Any] = partial(say, client, **SPEAKS)
    made = client.conversations.create(items=[user("you are a lamp")])
    named = made.id if way == "id" else {"id": made.id}
    first = speak("one", conversation=named)
    assert first.conversation.id == made.id
    assert client.responses.retrieve(first.id).conversation.id == made.id
    unstored = speak("two", conversation=named, store=False)
    events = list(speak("three", conversation=named, stream=True))
    assert all(event.response.conversation.id == made.id for event in (events[0], events[-1]))
    run = wait_until_response_ends(client, speak("four", conversation=named, background=True).id)
    assert run.conversation.id == made.id
    stream = speak("five", conversation=named, background=True, stream=True)
    last = list(stream)[-1].response
    items = list_conversation_items(client, made)
    assert [item.role for item in items] == ["user", *["user", "assistant"] * 5]
    texts = [item.content[0].text for item in items]
    answers = [one.output_text for one in (first, unstored, events[-1].response, run, last)]
    assert texts[2::2] == answers
    assert texts[1::2] == ["one", "two", "three", "four", "five"]
    # Each turn reads what was said before it, as if the client had sent it.
    outputs: list[Any] = []
    for text, one in zip(
        texts[1::2], (first, unstored, events[-1].response, run, last), strict=True
    ):
        outputs += [user(text), *one.output]
    sent = [user("you are a lamp"), *outputs, user("six")]
    explicit = speak(sent, store=False)
    assert speak("six", conversation=named).usage.input_tokens == explicit.usage.input_tokens


def test_a_session_of_the_agents_sdk(text_pair: Live, client: Any) -> None:
    async def converse() -> tuple[str, list[Any]]:
        own = openai.AsyncOpenAI(base_url=clients.base(text_pair), api_key="one")
        agent = Agent(
            name="keeper",
            model=OpenAIResponsesModel(MODEL, own),
            model_settings=ModelSettings(**SPEAKS),
        )
        session: Any = OpenAIConversationsSession(openai_client=own)
        quiet = RunConfig(tracing_disabled=True)
        for text in ("one", "two"):
            await Runner.run(agent, text, session=session, run_config=quiet)
        assert (await session.pop_item())["role"] == "assistant"
        streamed = Runner.run_streamed(agent, "three", session=session, run_config=quiet)
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == "on"
        items, named = await session.get_items(), session.session_id
        assert await session.get_items(limit=2) == items[-2:]
        again = OpenAIConversationsSession(conversation_id=named, openai_client=own)
        assert await again.get_items() == items
        await session.clear_session()
        await own.close()
        return named, items

    named, items = asyncio.run(converse())
    assert [item["role"] for item in items] == ["user", "assistant", "user", "user", "assistant"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(named)


def test_two_at_once_never_mix(client: Any) -> None:
    made = client.conversations.create()

    def turn(number: int) -> Any:
        options = ({}, {"background": True}, {"stream": True}, {"store": False})[number % 4]
        try:
            answer = say(client, f"turn {number}", conversation=made.id, **options)
        except openai.ConflictError as error:
            return error.code
        if options.get("stream"):
            answer = list(answer)[-1].response
        if options.get("background"):
            answer = wait_until_response_ends(client, answer.id)
        assert answer.status in {"completed", "incomplete"}
        return f"turn {number}", answer.output_text

    with ThreadPoolExecutor(8) as pool:
        done = set(pool.map(turn, range(24))) - {"conversation_locked"}
    assert done
    turns: list[list[str]] = []
    for item in list_conversation_items(client, made):
        if item.role == "user":
            turns.append([])
        turns[-1].append(item.content[0].text)
    # An answer that says nothing has no item.
    assert sorted((asked, "".join(answer)) for asked, *answer in turns) == sorted(done)


def test_a_body_not_declared_as_json_is_refused(client: Any, text_pair: Any) -> None:
    made = client.conversations.create()
    url, key = f"{clients.base(text_pair)}/conversations", {"Authorization": "Bearer one"}
    for path in ("", f"/{made.id}", f"/{made.id}/items"):
        for kind in ({}, {"Content-Type": "text/plain"}):
            answer = httpx.post(url + path, content=b"{}", headers={**key, **kind})
            assert (answer.status_code, "json" in answer.json()["error"]["message"]) == (400, True)


def test_a_conversation_in_use(client: Any) -> None:
    made = client.conversations.create(items=[user("a")])
    run = background(client, conversation=made.id)
    (item,) = list_conversation_items(client, made)
    attempts: list[Callable[[], Any]] = [
        lambda: say(client, conversation=made.id),
        lambda: client.conversations.items.create(made.id, items=[user("b")]),
        lambda: client.conversations.items.delete(item.id, conversation_id=made.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.ConflictError) as caught:
            attempt()
        assert caught.value.code == "conversation_locked"
    counted = client.responses.input_tokens.count(model=MODEL, input="x", conversation=made.id)
    assert counted.input_tokens > 0  # which changes nothing
    client.responses.cancel(run.id)
    say(client, "after", conversation=made.id, **SPEAKS)  # at once
    assert roles(client, made) == ["user", "user", "assistant"]  # nothing of what was cancelled
    failed = say(
        client, conversation=made.id, background=True, extra_body={"logit_bias": {"99999999": 1}}
    )
    assert wait_until_response_ends(client, failed.id).status == "failed"
    say(client, conversation=made.id)  # at once
    # What is deleted meanwhile stays so, and its response is kept.
    run = say(client, conversation=made.id, background=True, max_output_tokens=300)
    client.conversations.delete(made.id)
    assert wait_until_response_ends(client, run.id).status in {"completed", "incomplete"}
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_a_client_that_leaves_lets_go(client: Any) -> None:
    made = client.conversations.create()
    stream = say(client, conversation=made.id, stream=True, max_output_tokens=3000)
    next(iter(stream))
    stream.close()
    began = time.monotonic()
    while True:
        try:
            say(client, "next", conversation=made.id)
            break
        except openai.ConflictError:
            assert time.monotonic() - began < 5
            time.sleep(0.1)
    assert roles(client, made)[0] == "user"


def test_the_api_s_description_says_what_routes_take_and_answer(text_pair: Live) -> None:
    paths = httpx.get(f"{text_pair.url}/openapi.json").json()["paths"]
    ours = {path: paths[path] for path in paths if path.startswith(OURS)}
    operations = [(path, *one) for path in ours for one in ours[path].items()]
    assert len(operations) == 16
    for path, method, operation in operations:
        name = f"{method} {path}"
        assert {"200", "4XX", "5XX"} <= operation["responses"].keys(), name
        takes = method == "post" and not path.endswith("/cancel")
        assert ("requestBody" in operation) == takes, name
