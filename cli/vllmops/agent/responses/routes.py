"""The routes of the Responses API with a store: OpenAI's, and one that lists all responses."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response, WebSocket
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError

from ...errors import VllmopsError
from ...keys.ring import Ring
from ...store.backend import Backend, CursorUnknown, StoreUnavailable
from ...store.backend import Query as StoreQuery
from ...store.settings import Carriers, Sockets
from ...store.store import ResponseStore
from .. import tracing
from ..adapters import responses as adapter
from ..adapters.responses import (
    ErrorResponse,
    ResponsesRequest,
    listen_for_disconnect,
    load_aware_call,
    validate_json_request,
)
from ..counting import count_store
from ..log import log
from . import websocket
from .compaction import prompt
from .direct import Direct, Handler, cancelled, invalid, refusal
from .grouping import group
from .serving import StoredResponses, owner
from .tokens import CompactRequest, CountRequest
from .wire import INCLUDABLE, Frame, Refused, check_include

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
# The largest integer that JavaScript clients represent exactly.
Number = Annotated[int | None, Query(ge=0, lt=2**53)]


# What any route may answer with, for the description of the API.
ERROR = {
    "description": "What is wrong, and with which parameter",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
# Of a parameter that is read from the query by hand, because clients spell it in two ways.
INCLUDE = {
    "parameters": [
        {
            "name": "include",
            "in": "query",
            "schema": {"type": "array", "items": {"type": "string", "enum": sorted(INCLUDABLE)}},
        }
    ]
}
router = APIRouter(route_class=Direct, responses={"4XX": ERROR, "5XX": ERROR})


# A browser asks before it sends JSON from a page of another origin.
ONLY_JSON = [Depends(validate_json_request)]
until_gone = cancelled(listen_for_disconnect)
# vLLM's decorator, with a type.
counted: Callable[[Handler], Handler] = load_aware_call


def install(
    module: ModuleType,
    backend: Backend,
    carriers: Carriers,
    ring: Callable[[], Ring | None],
    sockets: Sockets,
) -> None:
    """Replace vLLM's routes and serving class, before vLLM makes its instance.

    Args:
        module: vLLM's routes.
        backend: what keeps the responses.
        carriers: how carriers are written.
        ring: gives the keys that seal and open carriers, None if there are none.
        sockets: limits of WebSockets.

    Raises:
        Exception: this vLLM has an unknown shape; nothing is changed.
    """
    adapter.check()
    if ("POST", "/v1/responses") not in map(key, module.router.routes):
        raise TypeError("its router has no POST /v1/responses")
    count_store(backend)
    websocket.check_library()
    StoredResponses.open_store = staticmethod(lambda: ResponseStore(backend, outages=log.warning))
    StoredResponses.carriers = carriers
    StoredResponses.ring = staticmethod(ring)
    StoredResponses.sockets = sockets
    StoredResponses.compaction_prompt = prompt()
    ours = {key(route) for route in router.routes}
    module.router.routes[:] = [
        *router.routes,
        *(route for route in module.router.routes if key(route) not in ours),
    ]
    module.router.lifespan_context = functools.partial(lifespan, module.router)
    adapter.serving.OpenAIServingResponses = StoredResponses


def key(route: Any) -> tuple[str, str]:
    return min(getattr(route, "methods", None) or [""]), route.path


@asynccontextmanager
async def lifespan(router: APIRouter, app: FastAPI) -> AsyncIterator[None]:
    """Open the store when the server starts, and close it when the server stops."""
    serving = app.state.openai_serving_responses
    if not isinstance(serving, StoredResponses):
        yield
        return
    group(app, router.routes)
    if getattr(app.state.args, "otlp_traces_endpoint", None):
        tracing.begin(serving.store.backend)
    await serving.store.open()
    await serving.runs.take_up()
    try:
        yield
    finally:
        await serving.close()


def answered(handler: Handler) -> Handler:
    """A handler whose errors become error objects like OpenAI's."""

    @functools.wraps(handler)
    async def wrapper(*args: Any, **kwargs: Any) -> Response:
        try:
            return await handler(*args, **kwargs)
        except Refused as error:
            return refusal(error.status, error.message, error.param, error.code)
        except StoreUnavailable as error:
            response = refusal(503, error.message)
            response.headers["Retry-After"] = str(math.ceil(error.retry_after_s) or 1)
            return response
        except CursorUnknown as error:
            param = "before" if error.cursor == kwargs.get("before") else "after"
            return refusal(400, error.message, param)
        except VllmopsError as error:
            if error.code == "store.no-conversations":
                return refusal(501, error.message, code=error.code)
            log.error("vllmops: %s", error.message)
            return refusal(500, error.message)

    return wrapper


def sent(answer: bytes | AsyncIterator[Frame] | ErrorResponse) -> Response:
    """What the serving class made of a request, as an HTTP answer."""
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(mode="json", by_alias=True), answer.error.code)
    return json(answer) if isinstance(answer, bytes) else streaming(answer)


def json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def sse(frames: AsyncIterator[Frame]) -> AsyncIterator[bytes]:
    """A stream as server-sent events."""
    async for frame in frames:
        yield b"event: %b\ndata: %b\n\n" % (frame.type.encode(), frame.data)


def streaming(frames: AsyncIterator[Frame]) -> Response:
    return StreamingResponse(sse(frames), media_type="text/event-stream")


def included(raw_request: Request) -> list[str]:
    """The values of ``include``, which OpenAI's client sends as ``include[]``."""
    if not raw_request.scope["query_string"]:
        return []
    asked = raw_request.query_params
    return [*asked.getlist("include"), *asked.getlist("include[]")]


def serving(raw_request: Request) -> Any:
    """The instance that serves the Responses API.

    Raises:
        Refused: this model does not generate text.
    """
    handler = raw_request.app.state.openai_serving_responses
    if handler is None:
        raise Refused(501, "The model does not support Responses API")
    return handler


# The first, because it is read most: each of these routes that stands before it costs time.
@router.get("/v1/responses/{response_id}", responses=STREAM, openapi_extra=INCLUDE)
@counted
@answered
async def retrieve_responses(
    response_id: str,
    raw_request: Request,
    starting_after: Number = None,
    stream: bool | None = False,
    include_obfuscation: bool | None = None,
) -> Response:
    """Retrieve a response, or the rest of its stream."""
    who, handler = owner(raw_request), serving(raw_request)
    include = included(raw_request)
    if stream:
        if include:
            await handler.stored.retrieve(who, response_id, include)
        events = await handler.stored.resume(
            who, response_id, starting_after, obfuscate=include_obfuscation
        )
        return streaming(events)
    return json(await handler.stored.retrieve(who, response_id, include))


@router.post("/v1/responses", dependencies=ONLY_JSON, responses=STREAM)
@until_gone
@counted
@answered
async def create_responses(request: ResponsesRequest, raw_request: Request) -> Response:
    """Make a response."""
    return sent(await serving(raw_request).create(request, raw_request))


@router.post("/v1/responses/input_tokens", dependencies=ONLY_JSON)
@until_gone
@counted
@answered
async def count_input_tokens(request: CountRequest, raw_request: Request) -> Response:
    """Count the tokens that a response to the same request would have as its input."""
    return sent(await serving(raw_request).count(request, raw_request))


@router.post("/v1/responses/compact", dependencies=ONLY_JSON)
@until_gone
@counted
@answered
async def compact_responses(request: CompactRequest, raw_request: Request) -> Response:
    """Replace a conversation by its user's messages and a sealed summary."""
    return sent(await serving(raw_request).compact(request, raw_request))


@router.websocket("/v1/responses")
async def serve_socket(socket: WebSocket) -> None:
    """Make responses on a WebSocket."""
    handler = socket.app.state.openai_serving_responses
    given = socket.app.state.args.api_key or [adapter.api_key()]
    limits = StoredResponses.sockets
    if why := websocket.refusal(socket, [key for key in given if key], limits):
        await websocket.deny(socket, *why)
        return

    async def create(given: dict[str, Any], raw_request: Request) -> AsyncIterator[Frame]:
        return await streamed(handler, given, raw_request)

    await websocket.Connection(socket, handler, owner(socket), create, limits).serve()


async def streamed(
    handler: StoredResponses, given: dict[str, Any], raw_request: Request
) -> AsyncIterator[Frame]:
    """The events of a response to a request with ``stream``.

    Raises:
        Refused: the request is invalid.
        StoreUnavailable: the store is down.
    """
    try:
        request = ResponsesRequest.model_validate(given)
    except ValidationError as error:
        raise Refused(400, *invalid(error.errors(include_url=False))) from error
    answer = await handler.create(request, raw_request)
    if isinstance(answer, ErrorResponse):
        why = answer.error
        raise Refused(why.code, why.message, why.param)
    assert not isinstance(answer, bytes)
    return answer


@router.get("/v1/responses")
@counted
@answered
async def list_responses(
    raw_request: Request,
    after: str | None = None,
    before: str | None = None,
    limit: Limit = 20,
    order: Order = "desc",
    model: str | None = None,
    status: Status | None = None,
) -> Response:
    """List responses."""
    query = StoreQuery(
        after=after,
        before=before,
        limit=limit,
        descending=order == "desc",
        model=model,
        status=status,
    )
    return json(await serving(raw_request).stored.page(owner(raw_request), query))


@router.delete("/v1/responses/{response_id}")
@counted
@answered
async def delete_responses(response_id: str, raw_request: Request) -> Response:
    """Delete a response."""
    return json(await serving(raw_request).stored.delete(owner(raw_request), response_id))


@router.post("/v1/responses/{response_id}/cancel")
@counted
@answered
async def cancel_responses(response_id: str, raw_request: Request) -> Response:
    """Cancel a response in the background."""
    return json(await serving(raw_request).stored.cancel(owner(raw_request), response_id))


@router.get("/v1/responses/{response_id}/input_items", openapi_extra=INCLUDE)
@counted
@answered
async def list_input_items(
    response_id: str,
    raw_request: Request,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """List what a response's turn added to its conversation."""
    check_include(included(raw_request))
    body = await serving(raw_request).stored.input_items(
        owner(raw_request), response_id, after=after, limit=limit, descending=order == "desc"
    )
    return json(body)
