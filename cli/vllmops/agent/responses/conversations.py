"""Conversations: the objects of OpenAI's API, and the turns of responses that are made with one.

A request with ``conversation`` holds that conversation from its start. When its response completes,
the store keeps the response and adds the turn's items in one step. Meanwhile, everybody else who
wants to change the items gets 409 ``conversation_locked``. A response that fails or is cancelled
adds nothing. A response with ``"store": false`` adds its turn, too: the conversation is what the
client wants kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeGuard
from uuid import uuid4

import msgspec
from openai.types.responses.response import Conversation as Reference

from ...store.backend import BROKEN, CursorUnknown, Response
from ...store.conversation_store import Held
from ...store.conversations import Conversation, Entry, Outcome
from ...store.ids import valid
from ...store.store import ResponseStore
from . import wire
from .carried import COMPACTION, readable
from .parameters import KEY, PAIRS, VALUE
from .wire import ENCODE, ENCRYPTED, LOGPROBS, Refused, check_include

PARAM = "conversation"
REFERENCE = "item_reference"  # which vLLM takes for an item, and cannot render
AT_ONCE = 20  # items that one request can add, in OpenAI's API
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
# What OpenAI's types require of an item and clients may leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "message": {"status": "completed", "content": []},
    "function_call": {"status": "completed"},
    "function_call_output": {"status": "completed"},
    "reasoning": {"summary": []},
}
PARTS: dict[str, dict[str, Any]] = {
    "output_text": {"annotations": []},
    "input_image": {"detail": "auto"},
}


class Created(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that creates a conversation."""

    items: list[msgspec.Raw] | None = None
    metadata: dict[str, str] | None = None


class Updated(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that updates a conversation."""

    metadata: dict[str, str] | None


class Added(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that adds items."""

    items: list[msgspec.Raw]


class Named(msgspec.Struct):
    """The part of an item that identifies it."""

    id: Any = None
    type: Any = None


class Answer(msgspec.Struct):
    """The items of a response."""

    output: list[msgspec.Raw] = []


class InConversation(msgspec.Struct):
    """The part of a response that names its conversation."""

    conversation: dict[str, Any] | None = None


# The field that an error of msgspec's is about.
PLACE = re.compile(r"(?:\$\.|field `)(\w+)")
CREATED, UPDATED = msgspec.json.Decoder(Created), msgspec.json.Decoder(Updated)
ADDED, NAMED = msgspec.json.Decoder(Added), msgspec.json.Decoder(Named)
ANSWER, RAWS = msgspec.json.Decoder(Answer), msgspec.json.Decoder(list[msgspec.Raw])
IN_CONVERSATION = msgspec.json.Decoder(InConversation)


class ConversationTurns:
    """The turns of responses that are made with a conversation.

    Args:
        store: that keeps both.
    """

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def begin(self, turn: Any, conversation_id: str, *, adds: bool = True) -> None:
        """Read the items of the conversation of a turn, and hold it.

        Args:
            turn: a `serving.Turn`.
            conversation_id: of the conversation.
            adds: whether the turn will add to it; else it is not held.

        Raises:
            Refused: there is no such conversation, another turn holds it, it is full, or an item
                of the input has an id that is in it.
            StoreUnavailable: the store is down.
        """
        kept = self.store.conversations
        if adds:
            holder = holder_of(turn.request.request_id, turn.began)
            held = await kept.hold(turn.owner, conversation_id, holder)
        else:
            held = await kept.look(turn.owner, conversation_id)
        if not isinstance(held, Held):
            raise refusal(held, conversation_id, param=PARAM)
        turn.held = held
        try:
            outcome = self.hindrance(held, RAWS.decode(turn.items))
            if outcome is not Outcome.DONE:
                raise refusal(outcome, conversation_id, param="input", limit=self.limit)
        except BaseException:
            await self.release(turn)
            raise

    def hindrance(self, held: Held, given: Sequence[msgspec.Raw]) -> Outcome:
        """What keeps the items of an input out of a conversation; `DONE` if nothing does.

        Raises:
            Refused: one of them is a reference to an item.
        """
        if len(held.entries) + len(given) >= self.limit:
            return Outcome.FULL
        known = [NAMED.decode(item) for item in given]
        # Before its id counts as one that is in the conversation.
        check_no_reference((item.type for item in known), "input")
        names = [item.id for item in known if can_name(item.id)]
        twice = len(set(names)) < len(names)
        if twice or not {entry.id for entry in held.entries}.isdisjoint(names):
            return Outcome.TAKEN
        return Outcome.DONE

    async def finish(self, turn: Any, response: Response | None, body: bytes, *, new: bool) -> bool:
        """Add a turn to its conversation, and store its response, both or neither.

        Where the conversation was deleted meanwhile, the response alone is stored.

        Args:
            turn: a `serving.Turn` that holds a conversation.
            response: to be stored, None for one that is not.
            body: the response as JSON.
            new: whether it is created; else it is put.

        Returns:
            False where the id is taken, or the run is gone or over.

        Raises:
            Refused: the hold has lapsed, and another request has changed the conversation.
            StoreUnavailable: the store is down.
        """
        held: Held = turn.held
        entries = made(RAWS.decode(turn.items))
        entries += made(ANSWER.decode(body).output, answer=True, used={one.id for one in entries})
        outcome = await self.store.conversations.finish(held, entries, response, new=new)
        if outcome is Outcome.GONE:
            if response is None:
                return True
            return await (self.store.create if new else self.store.put)(response)
        if outcome in {Outcome.DONE, Outcome.REFUSED}:
            return outcome is Outcome.DONE
        raise refusal(outcome, held.conversation_id)

    async def release(self, turn: Any) -> None:
        """Let go of a turn's conversation, if it still holds one."""
        if turn is not None and turn.held is not None:
            await self.store.conversations.release(turn.held)

    async def release_run(self, run: Response) -> None:
        """Let go of the conversation of a run that was stopped, in whatever process it runs."""
        conversation = conversation_of(run)
        if conversation:
            holder = holder_of(run.id, run.created_at)
            await self.store.conversations.release_holder(conversation, holder)

    @property
    def limit(self) -> int:
        """How many items a conversation can have."""
        return self.store.backend.limits.max_items


class ConversationObjects:
    """The objects of OpenAI's API for conversations.

    Args:
        store: that keeps them.
    """

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.kept = store.conversations

    async def create(self, who: str, body: bytes) -> bytes:
        """Create a conversation.

        Raises:
            Refused: the request is invalid.
            StoreUnavailable: the store is down.
        """
        given = decoded(CREATED, body or b"{}")
        metadata = checked(given.metadata or {})
        entries = added(given.items or [])
        made_now = Conversation(id=f"conv_{uuid4().hex}", owner=who, metadata=metadata)
        outcome = await self.kept.create(made_now, entries)
        if outcome is not Outcome.DONE:
            raise refusal(outcome, made_now.id, param="items")
        return document(made_now)

    async def retrieve(self, who: str, conversation_id: str) -> bytes:
        """A conversation.

        Raises:
            Refused: there is none.
            StoreUnavailable: the store is down.
        """
        return document(found(await self.kept.get(who, conversation_id), conversation_id))

    async def update(self, who: str, conversation_id: str, body: bytes) -> bytes:
        """Replace the metadata of a conversation.

        Raises:
            Refused: the request is invalid, or there is no such conversation.
            StoreUnavailable: the store is down.
        """
        metadata = checked(decoded(UPDATED, body).metadata or {})
        changed = await self.kept.update(who, conversation_id, metadata)
        return document(found(changed, conversation_id))

    async def delete(self, who: str, conversation_id: str) -> bytes:
        """Delete a conversation with its items; responses that were made with it stay.

        Raises:
            Refused: there is none.
            StoreUnavailable: the store is down.
        """
        if not await self.kept.delete(who, conversation_id):
            raise refusal(Outcome.GONE, conversation_id)
        return ENCODE({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add(
        self, who: str, conversation_id: str, body: bytes, include: Collection[str]
    ) -> bytes:
        """Add items to a conversation; the list of them.

        Raises:
            Refused: the request is invalid, there is no such conversation, or a response that is
                made with it is in progress.
            StoreUnavailable: the store is down.
        """
        check_include(include)
        entries = added(decoded(ADDED, body).items)
        outcome = await self.kept.add(who, conversation_id, entries)
        if outcome is not Outcome.DONE:
            limit = self.store.backend.limits.max_items
            raise refusal(outcome, conversation_id, param="items", limit=limit)
        return listed(entries, include, more=False)

    async def page(
        self,
        who: str,
        conversation_id: str,
        include: Collection[str] = (),
        *,
        after: str | None = None,
        limit: int = 20,
        descending: bool = True,
    ) -> bytes:
        """A page of the items of a conversation.

        Raises:
            Refused: there is no such conversation, or no such item, or `include` is invalid.
            StoreUnavailable: the store is down.
        """
        check_include(include)
        try:
            page = await self.kept.page(
                who, conversation_id, after=after, limit=limit, descending=descending
            )
        except CursorUnknown as error:
            message = f"No item with id '{after}' in this conversation."
            raise Refused(400, message, "after") from error
        if page is None:
            raise refusal(Outcome.GONE, conversation_id)
        return listed(page.entries, include, more=page.more)

    async def item(
        self, who: str, conversation_id: str, item_id: str, include: Collection[str] = ()
    ) -> bytes:
        """An item of a conversation.

        Raises:
            Refused: there is none, or `include` is invalid.
            StoreUnavailable: the store is down.
        """
        check_include(include)
        entry = await self.kept.entry(who, conversation_id, item_id)
        if entry is None:
            raise no_item(item_id)
        with wire.stored("item"):
            return ENCODE(shown(entry, include))

    async def delete_item(self, who: str, conversation_id: str, item_id: str) -> bytes:
        """Delete an item of a conversation; the conversation.

        Raises:
            Refused: there is none, or a response that is made with the conversation is in
                progress.
            StoreUnavailable: the store is down.
        """
        kept = found(await self.kept.get(who, conversation_id), conversation_id)
        outcome = await self.kept.delete_entry(who, conversation_id, item_id)
        if outcome is Outcome.GONE:
            raise no_item(item_id)
        if outcome is not Outcome.DONE:
            raise refusal(outcome, conversation_id)
        return document(kept)


def named(request: Any) -> str | None:
    """The conversation that a request names, None if it names none.

    Args:
        request: vLLM's ResponsesRequest.

    Raises:
        Refused: it is no such name, or the request has another history as well.
    """
    given = (request.model_extra or {}).get(PARAM)
    if given is None:
        return None
    if request.previous_response_id is not None:
        message = "previous_response_id can't be used with conversation: send only one of them"
        raise Refused(400, message, "previous_response_id")
    if isinstance(given, dict) and given.keys() == {"id"}:
        given = given["id"]
    if not (isinstance(given, str) and given):
        raise Refused(400, "conversation must be the id of one, or an object with that id", PARAM)
    return given


def named_in(response: Any, turn: Any) -> Any:
    """Write into a response which conversation it was made with.

    Args:
        response: vLLM's, or OpenAI's in an event.
        turn: a `serving.Turn`, or None.
    """
    if turn is not None and turn.held is not None:
        reference = Reference(id=turn.held.conversation_id)
        declared = vars(response)  # as in `fields.fill`; vLLM's response does not declare it
        known = PARAM in declared
        (declared if known else response.__pydantic_extra__)[PARAM] = reference
    return response


def conversation_of(response: Response) -> str:
    """The id of the conversation that a stored response was made with, empty if there is none."""
    try:
        reference = IN_CONVERSATION.decode(response.body).conversation or {}
    except BROKEN:
        return ""
    name = reference.get("id")
    return name if isinstance(name, str) else ""


def holder_of(response_id: str, created_at: float) -> str:
    """How a run of a response is named as the holder of a conversation."""
    return f"{response_id}:{created_at!r}"


def can_name(given: Any) -> TypeGuard[str]:
    """Whether it can be the id of an item; one with another id gets a new one."""
    return isinstance(given, str) and valid(given) and "/" not in given


def made(
    items: Sequence[msgspec.Raw], *, answer: bool = False, used: Collection[str] = ()
) -> list[Entry]:
    """Items as entries of a conversation; those without an id of their own get one.

    Args:
        items: as JSON.
        answer: whether the model made them.
        used: ids that are used already.
    """
    entries: list[Entry] = []
    seen = set(used)
    for item in items:
        body = bytes(item)
        head = NAMED.decode(body)
        name = head.id
        if not can_name(name) or (answer and name in seen):
            name = f"{PREFIXES.get(kind_of(head.type), 'item')}_{uuid4().hex}"
        seen.add(name)
        entries.append(Entry(name, body, answer))
    return entries


def added(items: list[msgspec.Raw]) -> list[Entry]:
    """The items that a client adds to a conversation.

    Raises:
        Refused: they are too many, or no items, or two have the same id.
    """
    if len(items) > AT_ONCE:
        message = f"{len(items)} items are too many: at most {AT_ONCE} can be added at a time"
        raise Refused(400, message, "items")
    try:
        decoded_items = [wire.ITEM.decode(item) for item in items]
    except BROKEN as error:
        raise Refused(400, f"Invalid items: {error}", "items") from error
    check_no_reference((item.get("type") for item in decoded_items), "items")
    # Imported here, because they import vLLM.
    from ..adapters.responses import renders, valid_item  # noqa: PLC0415

    for n, item in enumerate(decoded_items):
        if not valid_item(item):
            raise Refused(400, f"items[{n}] is no valid item of an input", f"items[{n}]")
        if item.get("type") == COMPACTION:  # no turn would have what it stands for
            message = f"items[{n}], a compaction item, can't be in a conversation: send it as input"
            raise Refused(400, message, f"items[{n}]")
        part = None if wire.silent(item) else readable(item)
        if part and not renders(part):  # nor could any request with the conversation
            kind = kind_of(item.get("type"))
            raise Refused(400, f"items[{n}], a {kind}, can't be rendered by vLLM", f"items[{n}]")
    entries = made(items)
    if twice := [name for name, count in Counter(one.id for one in entries).items() if count > 1]:
        raise Refused(400, f"Two of the items have the same id: {twice[0]!r}.", "items")
    return entries


def check_no_reference(types: Iterable[Any], param: str) -> None:
    """Refuse a reference to an item: no request with the conversation could be rendered any more.

    Args:
        types: of the items.
        param: that they are in.

    Raises:
        Refused: there is one.
    """
    if REFERENCE in types:
        raise Refused(400, f"Unsupported input item type: {REFERENCE}", param)


def shown(entry: Entry, include: Collection[str] = ()) -> dict[str, Any]:
    """An item as clients see it: with its id, its type, and all that OpenAI's types require."""
    item = wire.ITEM.decode(entry.body)
    kind = kind_of(item.get("type"))
    complete = {**item, "id": entry.id, "type": kind}
    for name, value in DEFAULTS.get(kind, {}).items():
        if complete.get(name) is None:
            complete[name] = value
    if kind == "message":
        complete["content"] = parts(complete["content"], complete.get("role"), include)
    elif kind == "reasoning" and ENCRYPTED not in include:
        complete.pop("encrypted_content", None)
    return complete


def parts(content: Any, role: Any, include: Collection[str]) -> Any:
    """The content of a message in parts."""
    if isinstance(content, str):
        content = [
            {"type": "output_text" if role == "assistant" else "input_text", "text": content}
        ]
    if not isinstance(content, list):
        return content
    left_out = frozenset() if LOGPROBS in include else frozenset({"logprobs"})
    return [
        {**PARTS.get(kind_of(part.get("type")), {}), **without(part, left_out)}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def without(part: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in names}


def kind_of(given: Any) -> str:
    """The type of an item, or of a part; a message needs to name none."""
    return given if isinstance(given, str) and given else "message"


def listed(entries: Sequence[Entry], include: Collection[str], *, more: bool) -> bytes:
    """A page of items; OpenAI's type wants texts as the ids of an empty one, too."""
    with wire.stored("item"):
        data = [shown(entry, include) for entry in entries]
    ends = {
        "first_id": entries[0].id if entries else "",
        "last_id": entries[-1].id if entries else "",
    }
    return ENCODE({"object": "list", "data": data, **ends, "has_more": more})


def document(conversation: Conversation) -> bytes:
    """A conversation as clients see it."""
    return ENCODE(
        {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created_at),
            "metadata": msgspec.Raw(conversation.metadata),
        }
    )


def decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """The body of a request.

    Raises:
        Refused: it is no such JSON.
    """
    try:
        return decoder.decode(body)
    except BROKEN as error:
        place = PLACE.search(f"{error}")
        raise Refused(400, f"Invalid request: {error}", place and place[1]) from error


def checked(metadata: dict[str, str]) -> bytes:
    """Metadata as JSON.

    Raises:
        Refused: it is more than OpenAI's API allows.
    """
    if len(metadata) > PAIRS:
        raise Refused(400, f"metadata has more than {PAIRS} pairs", "metadata")
    for name, value in metadata.items():
        if len(name) > KEY:
            message = f"the key {name[:KEY]!r}… has more than {KEY} characters"
            raise Refused(400, message, "metadata")
        if len(value) > VALUE:
            message = f"the value of {name!r} has more than {VALUE} characters"
            raise Refused(400, message, f"metadata.{name}")
    return ENCODE(metadata)


def found(conversation: Conversation | None, conversation_id: str) -> Conversation:
    """A conversation that is there.

    Raises:
        Refused: it is not.
    """
    if conversation is None:
        raise refusal(Outcome.GONE, conversation_id)
    return conversation


def no_item(item_id: str) -> Refused:
    return Refused(404, f"Item with id '{item_id}' not found.", "item_id")


def refusal(
    outcome: Outcome,
    conversation_id: str,
    *,
    param: str = "conversation_id",
    limit: int = 0,
) -> Refused:
    """Why a conversation could not be changed, as an answer."""
    if outcome is Outcome.GONE:
        param = PARAM if param == PARAM else "conversation_id"
        return Refused(404, f"Conversation with id '{conversation_id}' not found.", param)
    if outcome is Outcome.LOCKED:
        message = (
            f"Conversation '{conversation_id}' is in use by another request. "
            "Try again once that one has ended."
        )
        return Refused(409, message, PARAM, "conversation_locked")
    if outcome is Outcome.FULL:
        message = f"A conversation can have {limit} items at most. Begin another one."
        return Refused(400, message, param)
    return Refused(400, "An item has an id that is in the conversation already.", param)
