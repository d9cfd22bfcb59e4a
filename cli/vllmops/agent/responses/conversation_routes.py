"""The routes of OpenAI's Conversations API; `routes.install` adds them with the others."""

from __future__ import annotations

from fastapi import Request, Response

from .conversations import ConversationObjects
from .routes import Limit, Order, answered, counted, json, router, serving
from .serving import owner

ONE = "/v1/conversations/{conversation_id}"


def objects(raw_request: Request) -> ConversationObjects:
    """What answers these requests.

    Raises:
        Refused: this model does not generate text.
    """
    return ConversationObjects(serving(raw_request).store)


def include(raw_request: Request) -> list[str]:
    """The values of ``include``, which OpenAI's client sends as ``include[]``."""
    query = raw_request.query_params
    return [*query.getlist("include"), *query.getlist("include[]")]


@router.post("/v1/conversations")
@counted
@answered
async def create_conversation(raw_request: Request) -> Response:
    """Create a conversation."""
    body = await raw_request.body()
    return json(await objects(raw_request).create(owner(raw_request), body))


@router.get(ONE)
@counted
@answered
async def retrieve_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Retrieve a conversation."""
    return json(await objects(raw_request).retrieve(owner(raw_request), conversation_id))


@router.post(ONE)
@counted
@answered
async def update_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Replace the metadata of a conversation."""
    body = await raw_request.body()
    return json(await objects(raw_request).update(owner(raw_request), conversation_id, body))


@router.delete(ONE)
@counted
@answered
async def delete_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Delete a conversation with its items."""
    return json(await objects(raw_request).delete(owner(raw_request), conversation_id))


@router.post(f"{ONE}/items")
@counted
@answered
async def create_items(conversation_id: str, raw_request: Request) -> Response:
    """Add items to a conversation."""
    who, body = owner(raw_request), await raw_request.body()
    wanted = include(raw_request)
    return json(await objects(raw_request).add(who, conversation_id, body, wanted))


@router.get(f"{ONE}/items")
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
    body = await objects(raw_request).page(
        owner(raw_request),
        conversation_id,
        include(raw_request),
        after=after,
        limit=limit,
        descending=order == "desc",
    )
    return json(body)


@router.get(f"{ONE}/items/{{item_id}}")
@counted
@answered
async def retrieve_item(conversation_id: str, item_id: str, raw_request: Request) -> Response:
    """Retrieve an item of a conversation."""
    who, wanted = owner(raw_request), include(raw_request)
    return json(await objects(raw_request).item(who, conversation_id, item_id, wanted))


@router.delete(f"{ONE}/items/{{item_id}}")
@counted
@answered
async def delete_item(conversation_id: str, item_id: str, raw_request: Request) -> Response:
    """Delete an item of a conversation."""
    return json(
        await objects(raw_request).delete_item(owner(raw_request), conversation_id, item_id)
    )
