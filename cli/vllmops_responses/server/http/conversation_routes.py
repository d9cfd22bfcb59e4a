"""The routes of OpenAI's Conversations API; `routes.install_routes` adds them with the others."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from ..conversations.conversation_turns import (
    ConversationsApi,
    CreateConversationRequest,
    CreateItemsRequest,
    UpdateConversationRequest,
)
from ..serving import find_owner
from .routes import (
    INCLUDE,
    ONLY_JSON,
    Limit,
    Order,
    answer_errors,
    counted,
    make_json_response,
    parse_include,
    require_handler,
    router,
)

ONE = "/v1/conversations/{conversation_id}"


def build_body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The body of a request, for the description of the API."""
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def make_conversations_api(raw_request: Request) -> ConversationsApi:
    """What answers these requests.

    Raises:
        ApiError: this model does not generate text.
    """
    return ConversationsApi(require_handler(raw_request).store)


@router.post(
    "/v1/conversations",
    dependencies=ONLY_JSON,
    openapi_extra=build_body_schema(CreateConversationRequest),
)
@counted
@answer_errors
async def create_conversation(raw_request: Request) -> Response:
    """Create a conversation."""
    given = await raw_request.body()
    return make_json_response(
        await make_conversations_api(raw_request).create(find_owner(raw_request), given)
    )


@router.get(ONE)
@counted
@answer_errors
async def retrieve_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Retrieve a conversation."""
    return make_json_response(
        await make_conversations_api(raw_request).retrieve(find_owner(raw_request), conversation_id)
    )


@router.post(
    ONE, dependencies=ONLY_JSON, openapi_extra=build_body_schema(UpdateConversationRequest)
)
@counted
@answer_errors
async def update_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Replace the metadata of a conversation."""
    given = await raw_request.body()
    return make_json_response(
        await make_conversations_api(raw_request).update(
            find_owner(raw_request), conversation_id, given
        )
    )


@router.delete(ONE)
@counted
@answer_errors
async def delete_conversation(conversation_id: str, raw_request: Request) -> Response:
    """Delete a conversation with its items."""
    return make_json_response(
        await make_conversations_api(raw_request).delete(find_owner(raw_request), conversation_id)
    )


@router.post(
    f"{ONE}/items",
    dependencies=ONLY_JSON,
    openapi_extra={**build_body_schema(CreateItemsRequest), **INCLUDE},
)
@counted
@answer_errors
async def create_items(conversation_id: str, raw_request: Request) -> Response:
    """Add items to a conversation."""
    who, given = find_owner(raw_request), await raw_request.body()
    wanted = parse_include(raw_request)
    return make_json_response(
        await make_conversations_api(raw_request).add_items(who, conversation_id, given, wanted)
    )


@router.get(f"{ONE}/items", openapi_extra=INCLUDE)
@counted
@answer_errors
async def list_items(
    conversation_id: str,
    raw_request: Request,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """List the items of a conversation."""
    page = await make_conversations_api(raw_request).list_items(
        find_owner(raw_request),
        conversation_id,
        parse_include(raw_request),
        after_id=after,
        limit=limit,
        descending=order == "desc",
    )
    return make_json_response(page)


@router.get(f"{ONE}/items/{{item_id}}", openapi_extra=INCLUDE)
@counted
@answer_errors
async def retrieve_item(conversation_id: str, item_id: str, raw_request: Request) -> Response:
    """Retrieve an item of a conversation."""
    who, wanted = find_owner(raw_request), parse_include(raw_request)
    return make_json_response(
        await make_conversations_api(raw_request).retrieve_item(
            who, conversation_id, item_id, wanted
        )
    )


@router.delete(f"{ONE}/items/{{item_id}}")
@counted
@answer_errors
async def delete_item(conversation_id: str, item_id: str, raw_request: Request) -> Response:
    """Delete an item of a conversation."""
    return make_json_response(
        await make_conversations_api(raw_request).delete_item(
            find_owner(raw_request), conversation_id, item_id
        )
    )
