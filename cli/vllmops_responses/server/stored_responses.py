"""What clients do with responses that are stored: look at them, follow, cancel and delete them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from functools import partial
from typing import Any

import msgspec

from ..store.backend import BROKEN, ResponseQuery, StoreUnavailable
from ..store.response_store import ResponseStore, encode_response
from . import response_fields, wire_format
from .background.event_writer import retry_while_unavailable
from .conversations.conversation_turns import ConversationTurns
from .wire_format import ApiError, EncodedEvent


class StoredResponsesApi:
    """The stored responses of a server, for their owners.

    Args:
        store: that keeps them.
        conversations: which some of them hold.
        stop: ends a run by its id, if it is one of this process.
    """

    def __init__(
        self,
        store: ResponseStore,
        conversations: ConversationTurns,
        stop: Callable[[str], object],
    ) -> None:
        self.store = store
        self.conversations = conversations
        self.stop = stop

    async def retrieve(self, owner: str, response_id: str, include: Collection[str] = ()) -> bytes:
        """A response as it is now.

        Args:
            owner: asks.
            response_id: of the response.
            include: what else its items are to have.

        Raises:
            ApiError: there is none, or it was made without what is to be included.
            StoreUnavailable: the store is down.
        """
        response = await self.store.get(owner, response_id)
        if response is None:
            raise wire_format.make_not_found_error(response_id)
        if include:
            wire_format.require_included_fields(response, include)
        return encode_response(response)

    async def resume_stream(
        self,
        owner: str,
        response_id: str,
        starting_after: int | None,
        *,
        obfuscate: bool | None = None,
    ) -> AsyncGenerator[EncodedEvent, None]:
        """A background stream after a sequence number, or from its beginning.

        Args:
            owner: asks.
            response_id: of the response.
            starting_after: the sequence number of the last event that is known.
            obfuscate: whether events are to be of like sizes; None: as when it was made.

        Raises:
            ApiError: there is no such response, it was not a background stream, its events are
                gone, or it has ended before that number.
            StoreUnavailable: the store is down.
        """
        after = -1 if starting_after is None else starting_after
        kept = await self.store.read_events(owner, response_id, after - 2)
        if kept is None:
            raise wire_format.make_not_found_error(response_id)
        if not kept.chunks:
            complete = await self.store.read_events(owner, response_id, -1)
            if not (complete and complete.chunks):
                message = "was not created with background and stream, or its events are gone"
                raise ApiError(400, f"Response '{response_id}' {message}.", "stream")
        if not kept.running and after > (end := kept.chunks[-1].last_number if kept.chunks else -1):
            if after == end + 1:
                return wire_format.make_empty_stream()
            # Of a run that was lost or cancelled, events that somebody has seen may be lost, too.
            ended = await self.store.get(owner, response_id)
            if ended and ended.status in {"completed", "incomplete"}:
                message = f"starting_after is {after}, and no such event has been sent"
                raise ApiError(400, message, "starting_after")
        events = self.follow_events(owner, response_id, after)
        return (
            events
            if obfuscate is None
            else response_fields.obfuscate_events(events, should_pad=obfuscate)
        )

    async def follow_events(
        self, owner: str, response_id: str, after_number: int = -1
    ) -> AsyncGenerator[EncodedEvent, None]:
        """The events of a background stream as they arrive, and the final event."""
        ended = None
        try:
            while True:
                async for events in self.store.follow_events(owner, response_id, after_number):
                    for data in events.events:
                        yield EncodedEvent(wire_format.KIND.decode(data).type, data)
                    after_number = events.first_number + len(events.events) - 1
                if ended and not ended.is_running:
                    break
                ended = await retry_while_unavailable(partial(self.store.get, owner, response_id))
                # A run that only seemed to be lost has more events before its answer, and so has
                # one that runs again.
                if ended is None or not (ended.is_running or ended.status in wire_format.ANSWERED):
                    break
        except StoreUnavailable as error:
            yield wire_format.make_error_event(after_number + 1, error.message)
            return
        except (*BROKEN, ValueError) as error:
            yield wire_format.make_error_event(
                after_number + 1, f"The stored events are damaged: {error}"
            )
            return
        if ended is None:
            yield wire_format.make_error_event(
                after_number + 1, f"Response with id '{response_id}' was deleted."
            )
        else:
            yield wire_format.make_final_event(
                ended.status, after_number + 1, encode_response(ended)
            )

    async def cancel(self, owner: str, response_id: str) -> bytes:
        """Cancel a run, in whatever process it runs; a second call does no harm.

        Raises:
            ApiError: there is none, or it has finished.
            StoreUnavailable: the store is down.
        """
        swap = await self.store.set_status(owner, response_id, "cancelled")
        if swap.response is None:
            raise wire_format.make_not_found_error(response_id)
        if swap.changed:
            self.stop(response_id)
            await self.conversations.release_run(swap.response)
        elif swap.response.status != "cancelled":
            if not wire_format.is_background_response(swap.response):
                raise ApiError(400, "Cannot cancel a synchronous response.", "response_id")
            message = f"Cannot cancel a response that is {swap.response.status}."
            raise ApiError(400, message, "response_id")
        return encode_response(swap.response)

    async def delete(self, owner: str, response_id: str) -> bytes:
        """Delete a response, and stop it if it still runs.

        Raises:
            ApiError: there is none.
            StoreUnavailable: the store is down.
        """
        if not await self.store.delete(owner, response_id):
            raise wire_format.make_not_found_error(response_id)
        self.stop(response_id)
        return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})

    async def list_responses(self, owner: str, query: ResponseQuery) -> bytes:
        """A page of the list of responses.

        Raises:
            CursorUnknown: ``after_id`` or ``before_id`` is not the id of a response.
            StoreUnavailable: the store is down.
        """
        page = await self.store.list_responses(owner, query)
        ids = [response.id for response in page.responses]
        return wire_format.encode_list_page(
            list(map(encode_response, page.responses)), ids, has_more=page.has_more
        )

    async def find_items(
        self, owner: str, item_ids: Collection[str]
    ) -> dict[str, tuple[str, dict[str, Any]]]:
        """Items of stored responses by their ids, each after the id of its response.

        The first that is not found ends the search, so that one request costs little.

        Raises:
            ApiError: what is stored of one is damaged.
            StoreUnavailable: the store is down.
        """
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        read: dict[str, dict[str, dict[str, Any]]] = {}
        for item_id in item_ids:
            for response_id in wire_format.list_response_ids(item_id):
                if response_id not in read:
                    response = await self.store.get(owner, response_id)
                    read[response_id] = wire_format.list_items_by_id(response) if response else {}
                if item := read[response_id].get(item_id):
                    found[item_id] = response_id, item
                    break
            else:
                break
        return found

    async def list_input_items(
        self, owner: str, response_id: str, *, after_id: str | None, limit: int, descending: bool
    ) -> bytes:
        """A page of the items that a turn added to its conversation.

        Raises:
            ApiError: there is no such response, or no such item.
            StoreUnavailable: the store is down.
        """
        response = await self.store.get(owner, response_id)
        if response is None:
            raise wire_format.make_not_found_error(response_id)
        return wire_format.encode_input_items(
            response, after_id=after_id, limit=limit, descending=descending
        )
