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
from collections.abc import Collection, Sequence
from typing import Any, TypeGuard
from uuid import uuid4

import msgspec
from openai.types.responses.response import Conversation as Reference

from ...store.backend import BROKEN, CursorUnknown, Response
from ...store.conversation_backend import Conversation, ConversationItem, ConversationResult
from ...store.conversation_store import ConversationHold
from ...store.ids import is_valid_id
from ...store.response_store import ResponseStore
from .. import wire_format
from ..carriers.carrier_merge import COMPACTION, extract_readable_part
from ..item_rendering import is_reference
from ..wire_format import ENCODE, ENCRYPTED, LOGPROBS, ApiError, validate_include

PARAM = "conversation"
# The limits of metadata: pairs, characters of a key, characters of a value.
PAIRS, KEY, VALUE = 16, 64, 512
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


class CreateConversationRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that creates a conversation."""

    items: list[msgspec.Raw] | None = None
    metadata: dict[str, str] | None = None


class UpdateConversationRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that updates a conversation."""

    metadata: dict[str, str] | None


class CreateItemsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that adds items."""

    items: list[msgspec.Raw]


class ItemIdentity(msgspec.Struct):
    """The part of an item that identifies it."""

    id: Any = None
    type: Any = None


class RawResponseOutput(msgspec.Struct):
    """The items of a response."""

    output: list[msgspec.Raw] = []


class ConversationField(msgspec.Struct):
    """The part of a response that names its conversation."""

    conversation: dict[str, Any] | None = None


# The field that an error of msgspec's is about.
PLACE = re.compile(r"(?:\$\.|field `)(\w+)")
CREATED, UPDATED = (
    msgspec.json.Decoder(CreateConversationRequest),
    msgspec.json.Decoder(UpdateConversationRequest),
)
ADDED, NAMED = msgspec.json.Decoder(CreateItemsRequest), msgspec.json.Decoder(ItemIdentity)
ANSWER, RAWS = msgspec.json.Decoder(RawResponseOutput), msgspec.json.Decoder(list[msgspec.Raw])
IN_CONVERSATION = msgspec.json.Decoder(ConversationField)


class ConversationTurns:
    """The turns of responses that are made with a conversation.

    Args:
        store: that keeps both.
    """

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def begin_turn(self, turn: Any, conversation_id: str, *, adds: bool = True) -> None:
        """Read the items of the conversation of a turn, and hold it.

        Args:
            turn: a `serving.Turn`.
            conversation_id: of the conversation.
            adds: whether the turn will add to it; else it is not held.

        Raises:
            ApiError: there is no such conversation, another turn holds it, it is full, or an item
                of the input has an id that is in it.
            StoreUnavailable: the store is down.
        """
        kept = self.store.conversations
        if adds:
            holder = format_holder(turn.request.request_id, turn.began)
            held = await kept.hold(turn.owner, conversation_id, holder)
        else:
            held = await kept.read_without_hold(turn.owner, conversation_id)
        if not isinstance(held, ConversationHold):
            raise make_outcome_error(held, conversation_id, param=PARAM)
        turn.hold = held
        try:
            outcome = self.check_input_items(held, RAWS.decode(turn.items))
            if outcome is not ConversationResult.DONE:
                raise make_outcome_error(
                    outcome, conversation_id, param="input", limit=self.max_items
                )
        except BaseException:
            await self.release_turn(turn)
            raise

    def check_input_items(
        self, hold: ConversationHold, input_items: Sequence[msgspec.Raw]
    ) -> ConversationResult:
        """What keeps the items of an input out of a conversation; `DONE` if nothing does."""
        if len(hold.entries) + len(input_items) >= self.max_items:
            return ConversationResult.FULL
        known = [NAMED.decode(item) for item in input_items]
        names = [item.id for item in known if is_valid_item_id(item.id)]
        twice = len(set(names)) < len(names)
        if twice or not {entry.id for entry in hold.entries}.isdisjoint(names):
            return ConversationResult.TAKEN
        return ConversationResult.DONE

    async def list_item_ids(self, owner: str, conversation_id: str) -> set[str]:
        """The ids of the items of a conversation; none if there is no such conversation."""
        read = await self.store.conversations.read_without_hold(owner, conversation_id)
        return {entry.id for entry in read.entries} if isinstance(read, ConversationHold) else set()

    async def finish_turn(
        self, turn: Any, response: Response | None, body: bytes, *, is_new: bool
    ) -> bool:
        """Add a turn to its conversation, and store its response, both or neither.

        Where the conversation was deleted meanwhile, the response alone is stored.

        Args:
            turn: a `serving.Turn` that holds a conversation.
            response: to be stored, None for one that is not.
            body: the response as JSON.
            is_new: whether it is created; else it is put.

        Returns:
            False where the id is taken, or the run is gone or over.

        Raises:
            ApiError: the hold has lapsed, and another request has changed the conversation.
            StoreUnavailable: the store is down.
        """
        held: ConversationHold = turn.hold
        entries = make_conversation_items(RAWS.decode(turn.items))
        entries += make_conversation_items(
            ANSWER.decode(body).output, answer=True, used_ids={one.id for one in entries}
        )
        outcome = await self.store.conversations.finish_turn(held, entries, response, is_new=is_new)
        if outcome is ConversationResult.GONE:
            if response is None:
                return True
            return await (self.store.create if is_new else self.store.put)(response)
        if outcome in {ConversationResult.DONE, ConversationResult.REFUSED}:
            return outcome is ConversationResult.DONE
        raise make_outcome_error(outcome, held.conversation_id)

    async def release_turn(self, turn: Any) -> None:
        """Let go of a turn's conversation, if it still holds one."""
        if turn is not None and turn.hold is not None:
            await self.store.conversations.release_hold(turn.hold)

    async def release_run(self, run: Response) -> None:
        """Let go of the conversation of a run that was stopped, in whatever process it runs."""
        conversation = extract_conversation_id(run)
        if conversation:
            holder = format_holder(run.id, run.created_at)
            await self.store.conversations.release_conversation(conversation, holder)

    @property
    def max_items(self) -> int:
        """How many items a conversation can have."""
        return self.store.backend.limits.max_items


class ConversationsApi:
    """The objects of OpenAI's API for conversations.

    Args:
        store: that keeps them.
    """

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.conversations = store.conversations

    async def create(self, owner: str, body: bytes) -> bytes:
        """Create a conversation.

        Raises:
            ApiError: the request is invalid.
            StoreUnavailable: the store is down.
        """
        given = parse_request_body(CREATED, body or b"{}")
        metadata = encode_metadata(given.metadata or {})
        entries = validate_new_items(given.items or [])
        made_now = Conversation(id=f"conv_{uuid4().hex}", owner=owner, metadata=metadata)
        outcome = await self.conversations.create(made_now, entries)
        if outcome is not ConversationResult.DONE:
            raise make_outcome_error(outcome, made_now.id, param="items")
        return encode_conversation(made_now)

    async def retrieve(self, owner: str, conversation_id: str) -> bytes:
        """A conversation.

        Raises:
            ApiError: there is none.
            StoreUnavailable: the store is down.
        """
        return encode_conversation(
            require_conversation(
                await self.conversations.get(owner, conversation_id), conversation_id
            )
        )

    async def update(self, owner: str, conversation_id: str, body: bytes) -> bytes:
        """Replace the metadata of a conversation.

        Raises:
            ApiError: the request is invalid, or there is no such conversation.
            StoreUnavailable: the store is down.
        """
        metadata = encode_metadata(parse_request_body(UPDATED, body).metadata or {})
        changed = await self.conversations.set_metadata(owner, conversation_id, metadata)
        return encode_conversation(require_conversation(changed, conversation_id))

    async def delete(self, owner: str, conversation_id: str) -> bytes:
        """Delete a conversation with its items; responses that were made with it stay.

        Raises:
            ApiError: there is none.
            StoreUnavailable: the store is down.
        """
        if not await self.conversations.delete(owner, conversation_id):
            raise make_outcome_error(ConversationResult.GONE, conversation_id)
        return ENCODE({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add_items(
        self, owner: str, conversation_id: str, body: bytes, include: Collection[str]
    ) -> bytes:
        """Add items to a conversation; the list of them.

        Raises:
            ApiError: the request is invalid, there is no such conversation, or a response that is
                made with it is in progress.
            StoreUnavailable: the store is down.
        """
        validate_include(include)
        entries = validate_new_items(parse_request_body(ADDED, body).items)
        outcome = await self.conversations.add_items(owner, conversation_id, entries)
        if outcome is not ConversationResult.DONE:
            limit = self.store.backend.limits.max_items
            raise make_outcome_error(outcome, conversation_id, param="items", limit=limit)
        return encode_items_page(entries, include, has_more=False)

    async def list_items(
        self,
        owner: str,
        conversation_id: str,
        include: Collection[str] = (),
        *,
        after_id: str | None = None,
        limit: int = 20,
        descending: bool = True,
    ) -> bytes:
        """A page of the items of a conversation.

        Raises:
            ApiError: there is no such conversation, or no such item, or `include` is invalid.
            StoreUnavailable: the store is down.
        """
        validate_include(include)
        try:
            page = await self.conversations.list_items(
                owner, conversation_id, after_id=after_id, limit=limit, descending=descending
            )
        except CursorUnknown as error:
            message = f"No item with id '{after_id}' in this conversation."
            raise ApiError(400, message, "after") from error
        if page is None:
            raise make_outcome_error(ConversationResult.GONE, conversation_id)
        return encode_items_page(page.entries, include, has_more=page.has_more)

    async def retrieve_item(
        self, owner: str, conversation_id: str, item_id: str, include: Collection[str] = ()
    ) -> bytes:
        """An item of a conversation.

        Raises:
            ApiError: there is none, or `include` is invalid.
            StoreUnavailable: the store is down.
        """
        validate_include(include)
        entry = await self.conversations.get_item(owner, conversation_id, item_id)
        if entry is None:
            raise make_item_not_found_error(item_id)
        with wire_format.translate_damage_errors("item"):
            return ENCODE(build_client_item(entry, include))

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bytes:
        """Delete an item of a conversation; the conversation.

        Raises:
            ApiError: there is none, or a response that is made with the conversation is in
                progress.
            StoreUnavailable: the store is down.
        """
        kept = require_conversation(
            await self.conversations.get(owner, conversation_id), conversation_id
        )
        outcome = await self.conversations.remove_item(owner, conversation_id, item_id)
        if outcome is ConversationResult.GONE:
            raise make_item_not_found_error(item_id)
        if outcome is not ConversationResult.DONE:
            raise make_outcome_error(outcome, conversation_id)
        return encode_conversation(kept)


def parse_conversation_parameter(request: Any) -> str | None:
    """The conversation that a request names, None if it names none.

    Args:
        request: vLLM's ResponsesRequest.

    Raises:
        ApiError: it is no such name, or the request has another history as well.
    """
    given = (request.model_extra or {}).get(PARAM)
    if given is None:
        return None
    if request.previous_response_id is not None:
        message = "previous_response_id can't be used with conversation: send only one of them"
        raise ApiError(400, message, "previous_response_id")
    if isinstance(given, dict) and given.keys() == {"id"}:
        given = given["id"]
    if not (isinstance(given, str) and given):
        raise ApiError(400, "conversation must be the id of one, or an object with that id", PARAM)
    return given


def set_response_conversation(response: Any, turn: Any) -> Any:
    """Write into a response which conversation it was made with.

    Args:
        response: vLLM's, or OpenAI's in an event.
        turn: a `serving.Turn`, or None.
    """
    if turn is not None and turn.hold is not None:
        reference = Reference(id=turn.hold.conversation_id)
        declared = vars(
            response
        )  # as in `response_fields.fill_response`; vLLM's response does not declare it
        known = PARAM in declared
        (declared if known else response.__pydantic_extra__)[PARAM] = reference
    return response


def extract_conversation_id(response: Response) -> str:
    """The id of the conversation that a stored response was made with, empty if there is none."""
    try:
        reference = IN_CONVERSATION.decode(response.body).conversation or {}
    except BROKEN:
        return ""
    name = reference.get("id")
    return name if isinstance(name, str) else ""


def format_holder(response_id: str, created_at: float) -> str:
    """How a run of a response is named as the holder of a conversation."""
    return f"{response_id}:{created_at!r}"


def is_valid_item_id(item_id: Any) -> TypeGuard[str]:
    """Whether it can be the id of an item; one with another id gets a new one."""
    return isinstance(item_id, str) and is_valid_id(item_id) and "/" not in item_id


def make_conversation_items(
    items: Sequence[msgspec.Raw], *, answer: bool = False, used_ids: Collection[str] = ()
) -> list[ConversationItem]:
    """Items as entries of a conversation; those without an id of their own get one.

    Args:
        items: as JSON.
        answer: whether the model made them.
        used_ids: ids that are used already.
    """
    entries: list[ConversationItem] = []
    seen = set(used_ids)
    for item in items:
        body = bytes(item)
        head = NAMED.decode(body)
        name = head.id
        if not is_valid_item_id(name) or (answer and name in seen):
            name = f"{PREFIXES.get(normalize_item_type(head.type), 'item')}_{uuid4().hex}"
        seen.add(name)
        entries.append(ConversationItem(name, body, answer))
    return entries


def validate_new_items(items: list[msgspec.Raw]) -> list[ConversationItem]:
    """The items that a client adds to a conversation.

    Raises:
        ApiError: they are too many, or no items, or two have the same id.
    """
    if len(items) > AT_ONCE:
        message = f"{len(items)} items are too many: at most {AT_ONCE} can be added at a time"
        raise ApiError(400, message, "items")
    try:
        decoded_items = [wire_format.ITEM.decode(item) for item in items]
    except BROKEN as error:
        raise ApiError(400, f"Invalid items: {error}", "items") from error
    if any(map(is_reference, decoded_items)):  # no request with it could be rendered
        raise ApiError(400, "An item_reference can't be in a conversation: add the item", "items")
    # Imported here, because they import vLLM.
    from ..vllm_interface import can_render_item, is_valid_item  # noqa: PLC0415

    for n, item in enumerate(decoded_items):
        if not is_valid_item(item):
            raise ApiError(400, f"items[{n}] is no valid item of an input", f"items[{n}]")
        if item.get("type") == COMPACTION:  # no turn would have what it stands for
            message = f"items[{n}], a compaction item, can't be in a conversation: send it as input"
            raise ApiError(400, message, f"items[{n}]")
        part = None if wire_format.is_empty_answer(item) else extract_readable_part(item)
        if part and not can_render_item(part):  # nor could any request with the conversation
            kind = normalize_item_type(item.get("type"))
            raise ApiError(400, f"items[{n}], a {kind}, can't be rendered by vLLM", f"items[{n}]")
    entries = make_conversation_items(items)
    if twice := [name for name, count in Counter(one.id for one in entries).items() if count > 1]:
        raise ApiError(400, f"Two of the items have the same id: {twice[0]!r}.", "items")
    return entries


def build_client_item(entry: ConversationItem, include: Collection[str] = ()) -> dict[str, Any]:
    """An item as clients see it: with its id, its type, and all that OpenAI's types require."""
    item = wire_format.ITEM.decode(entry.body)
    kind = normalize_item_type(item.get("type"))
    complete = {**item, "id": entry.id, "type": kind}
    for name, value in DEFAULTS.get(kind, {}).items():
        if complete.get(name) is None:
            complete[name] = value
    if kind == "message":
        complete["content"] = build_content_parts(
            complete["content"], complete.get("role"), include
        )
    elif kind == "reasoning" and ENCRYPTED not in include:
        complete.pop("encrypted_content", None)
    return complete


def build_content_parts(content: Any, role: Any, include: Collection[str]) -> Any:
    """The content of a message in parts."""
    if isinstance(content, str):
        content = [
            {"type": "output_text" if role == "assistant" else "input_text", "text": content}
        ]
    if not isinstance(content, list):
        return content
    left_out = frozenset() if LOGPROBS in include else frozenset({"logprobs"})
    return [
        {**PARTS.get(normalize_item_type(part.get("type")), {}), **drop_fields(part, left_out)}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def drop_fields(part: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in names}


def normalize_item_type(item_type: Any) -> str:
    """The type of an item, or of a part; a message needs to name none."""
    return item_type if isinstance(item_type, str) and item_type else "message"


def encode_items_page(
    entries: Sequence[ConversationItem], include: Collection[str], *, has_more: bool
) -> bytes:
    """A page of items; OpenAI's type wants texts as the ids of an empty one, too."""
    with wire_format.translate_damage_errors("item"):
        data = [build_client_item(entry, include) for entry in entries]
    ends = {
        "first_id": entries[0].id if entries else "",
        "last_id": entries[-1].id if entries else "",
    }
    return ENCODE({"object": "list", "data": data, **ends, "has_more": has_more})


def encode_conversation(conversation: Conversation) -> bytes:
    """A conversation as clients see it."""
    return ENCODE(
        {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created_at),
            "metadata": msgspec.Raw(conversation.metadata),
        }
    )


def parse_request_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """The body of a request.

    Raises:
        ApiError: it is no such JSON.
    """
    try:
        return decoder.decode(body)
    except BROKEN as error:
        place = PLACE.search(f"{error}")
        raise ApiError(400, f"Invalid request: {error}", place and place[1]) from error


def encode_metadata(metadata: dict[str, str]) -> bytes:
    """Metadata as JSON.

    Raises:
        ApiError: it is more than OpenAI's API allows.
    """
    if len(metadata) > PAIRS:
        raise ApiError(400, f"metadata has more than {PAIRS} pairs", "metadata")
    for name, value in metadata.items():
        if len(name) > KEY:
            message = f"the key {name[:KEY]!r}… has more than {KEY} characters"
            raise ApiError(400, message, "metadata")
        if len(value) > VALUE:
            message = f"the value of {name!r} has more than {VALUE} characters"
            raise ApiError(400, message, f"metadata.{name}")
    return ENCODE(metadata)


def require_conversation(conversation: Conversation | None, conversation_id: str) -> Conversation:
    """A conversation that is there.

    Raises:
        ApiError: it is not.
    """
    if conversation is None:
        raise make_outcome_error(ConversationResult.GONE, conversation_id)
    return conversation


def make_item_not_found_error(item_id: str) -> ApiError:
    return ApiError(404, f"Item with id '{item_id}' not found.", "item_id")


def make_outcome_error(
    outcome: ConversationResult,
    conversation_id: str,
    *,
    param: str = "conversation_id",
    limit: int = 0,
) -> ApiError:
    """Why a conversation could not be changed, as an answer."""
    if outcome is ConversationResult.GONE:
        param = PARAM if param == PARAM else "conversation_id"
        return ApiError(404, f"Conversation with id '{conversation_id}' not found.", param)
    if outcome is ConversationResult.LOCKED:
        message = (
            f"Conversation '{conversation_id}' is in use by another request. "
            "Try again once that one has ended."
        )
        return ApiError(409, message, PARAM, "conversation_locked")
    if outcome is ConversationResult.FULL:
        message = f"A conversation can have {limit} items at most. Begin another one."
        return ApiError(400, message, param)
    return ApiError(400, "An item has an id that is in the conversation already.", param)
