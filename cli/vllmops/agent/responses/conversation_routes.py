"""The routes of OpenAI's Conversations API; `routes.install` adds them with the others."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from .conversations import Added, ConversationObjects, Created, Updated
from .routes import (
    INCLUDE,
    ONLY_JSON,
    Limit,
    Order,
    answered,
    counted,
    included,
    json,
    router,
    serving,
)
from .serving import owner

ONE = "/v1/conversations/{conversation_id}"


def body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The body of a request, for the description of the API."""
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def objects(raw_request: Request) -> ConversationObjects:
    """What answers these requests.

    Raises:
        Refused: this model does not generate text.
    """
    return ConversationObjects(serving(raw_request).store)


@router.post("/v1/conversations", dependencies=ONLY_JSON, openapi_extra=body(Created))
@counted
@answered
async def create_conversation(raw_request: Request) -> Response:
    """Create a conversation."""
    given = await raw_request.body()
    return json(await objects(raw_request).create(owner(raw_request), given))


@router.get(ONE)
@counted
@answered
async def retrieve_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Retrieve a conversation."""
    return json(await objects(raw_request).retrieve(owner(raw_request), conversation_id))


@router.post(ONE, dependencies=ONLY_JSON, openapi_extra=body(Updated))
@counted
@answered
async def update_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Replace the metadata of a conversation."""
    given = await raw_request.body()
    return json(await objects(raw_request).update(owner(raw_request), conversation_id, given))


@router.delete(ONE)
@counted
@answered
async def delete_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Delete a conversation with its items."""
    return json(await objects(raw_request).delete(owner(raw_request), conversation_id))


@router.post(f"{ONE}/items", dependencies=ONLY_JSON, openapi_extra={**body(Added), **INCLUDE})
@counted
@answered
async def create_items(conversation_id: str, raw_request: Request) -> Response:
    """Add items to a conversation."""
    who, given = owner(raw_request), await raw_request.body()
    wanted = included(raw_request)
    return json(await objects(raw_request).add(who, conversation_id, given, wanted))


@router.get(f"{ONE}/items", openapi_extra=INCLUDE)
@counted
@answered
async def list_items(
    conversation_id: str,
    raw_request: Request,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """List the items of a conversation."""
    page = await objects(raw_request).page(
        owner(raw_request),
        conversation_id,
        included(raw_request),
        after=after,
        limit=limit,
        descending=order == "desc",
    )
    return json(page)


@router.get(f"{ONE}/items/{{item_id}}", openapi_extra=INCLUDE)
@counted
@answered
async def retrieve_item(conversation_id: str, item_id: str, raw_request: Request) -> Response:
    """Retrieve an item of a conversation."""
    who, wanted = owner(raw_request), included(raw_request)
    return json(await objects(raw_request).item(who, conversation_id, item_id, wanted))


@router.delete(f"{ONE}/items/{{item_id}}")
@counted
@answered
async def delete_item(conversation_id: str, item_id: str, raw_request: Request) -> Response:
    """Delete an item of a conversation."""
    return json(
        await objects(raw_request).delete_item(owner(raw_request), conversation_id, item_id)
    )
