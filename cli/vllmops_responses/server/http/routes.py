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

from vllmops.agent.log import log
from vllmops.support.errors import VllmopsError

from ...keys.keyring import KeyRing
from ...store.backend import Backend, CursorUnknown, StoreUnavailable
from ...store.backend import ResponseQuery as StoreQuery
from ...store.response_store import ResponseStore
from ...store.settings import CarrierSettings, WebSocketLimits
from .. import tracing, vllm_interface
from ..carriers.compaction import load_summary_prompt
from ..conversations.token_count import CompactRequest, CountRequest
from ..instrumentation import count_store_operations
from ..serving import StoreBackedServing, find_owner
from ..vllm_interface import (
    ErrorResponse,
    ResponsesRequest,
    listen_for_disconnect,
    load_aware_call,
    validate_json_request,
)
from ..wire_format import INCLUDABLE, ApiError, EncodedEvent, encode_sse, validate_include
from . import websocket
from .fast_routes import (
    DirectRoute,
    Handler,
    cancel_on_disconnect,
    describe_validation_errors,
    make_error_response,
)
from .route_index import group_routes

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
# The header that names the parameters which had no effect.
IGNORED = "vllmops-ignored"
router = APIRouter(route_class=DirectRoute, responses={"4XX": ERROR, "5XX": ERROR})


# A browser asks before it sends JSON from a page of another origin.
ONLY_JSON = [Depends(validate_json_request)]
until_gone = cancel_on_disconnect(listen_for_disconnect)
# vLLM's decorator, with a type.
counted: Callable[[Handler], Handler] = load_aware_call


def install_routes(
    module: ModuleType,
    backend: Backend,
    carriers: CarrierSettings,
    get_keyring: Callable[[], KeyRing | None],
    sockets: WebSocketLimits,
) -> None:
    """Replace vLLM's routes and serving class, before vLLM makes its instance.

    Args:
        module: vLLM's routes.
        backend: what keeps the responses.
        carriers: how carriers are written.
        get_keyring: gives the keys that seal and open carriers, None if there are none.
        sockets: limits of WebSockets.

    Raises:
        Exception: this vLLM has an unknown shape; nothing is changed.
    """
    vllm_interface.require_known_shape()
    if ("POST", "/v1/responses") not in map(make_route_key, module.router.routes):
        raise TypeError("its router has no POST /v1/responses")
    count_store_operations(backend)
    websocket.report_missing_library()
    StoreBackedServing.open_store = staticmethod(
        lambda: ResponseStore(backend, outages=log.warning)
    )
    StoreBackedServing.carriers = carriers
    StoreBackedServing.get_keyring = staticmethod(get_keyring)
    StoreBackedServing.sockets = sockets
    StoreBackedServing.compaction_prompt = load_summary_prompt()
    ours = {make_route_key(route) for route in router.routes}
    module.router.routes[:] = [
        *router.routes,
        *(route for route in module.router.routes if make_route_key(route) not in ours),
    ]
    module.router.lifespan_context = functools.partial(lifespan, module.router)
    vllm_interface.serving.OpenAIServingResponses = StoreBackedServing


def make_route_key(route: Any) -> tuple[str, str]:
    return min(getattr(route, "methods", None) or [""]), route.path


@asynccontextmanager
async def lifespan(router: APIRouter, app: FastAPI) -> AsyncIterator[None]:
    """Open the store when the server starts, and close it when the server stops."""
    serving = app.state.openai_serving_responses
    if not isinstance(serving, StoreBackedServing):
        yield
        return
    group_routes(app, router.routes)
    if getattr(app.state.args, "otlp_traces_endpoint", None):
        tracing.start_tracing(serving.store.backend)
    await serving.store.open()
    await serving.runs.rerun_interrupted()
    try:
        yield
    finally:
        await serving.close()


def answer_errors(handler: Handler) -> Handler:
    """A handler whose errors become error objects like OpenAI's."""

    @functools.wraps(handler)
    async def wrapper(*args: Any, **kwargs: Any) -> Response:
        try:
            return await handler(*args, **kwargs)
        except ApiError as error:
            return make_error_response(error.status, error.message, error.param, error.code)
        except StoreUnavailable as error:
            response = make_error_response(503, error.message)
            response.headers["Retry-After"] = str(math.ceil(error.retry_after_s) or 1)
            return response
        except CursorUnknown as error:
            param = "before" if error.cursor == kwargs.get("before") else "after"
            return make_error_response(400, error.message, param)
        except VllmopsError as error:
            if error.code == "store.no-conversations":
                return make_error_response(501, error.message, code=error.code)
            log.error("vllmops: %s", error.message)
            return make_error_response(500, error.message)

    return wrapper


def make_http_response(
    answer: bytes | AsyncIterator[EncodedEvent] | ErrorResponse, raw_request: Request
) -> Response:
    """Make an HTTP answer of a JSON body, a stream, or vLLM's error.

    The header `IGNORED` names the parameters that had no effect.
    """
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(mode="json", by_alias=True), answer.error.code)
    response = (
        make_json_response(answer) if isinstance(answer, bytes) else make_stream_response(answer)
    )
    if raw_request.state.ignored:
        response.headers[IGNORED] = ", ".join(raw_request.state.ignored)
    return response


def make_json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def make_stream_response(frames: AsyncIterator[EncodedEvent]) -> Response:
    events = (encode_sse(frame) async for frame in frames)
    return StreamingResponse(events, media_type="text/event-stream")


def parse_include(raw_request: Request) -> list[str]:
    """The values of ``include``, which OpenAI's client sends as ``include[]``."""
    if not raw_request.scope["query_string"]:
        return []
    asked = raw_request.query_params
    return [*asked.getlist("include"), *asked.getlist("include[]")]


def require_handler(raw_request: Request) -> Any:
    """The instance that serves the Responses API.

    Raises:
        ApiError: this model does not generate text.
    """
    handler = raw_request.app.state.openai_serving_responses
    if handler is None:
        raise ApiError(501, "The model does not support Responses API")
    return handler


# The first, because it is read most: each of these routes that stands before it costs time.
@router.get("/v1/responses/{response_id}", responses=STREAM, openapi_extra=INCLUDE)
@counted
@answer_errors
async def retrieve_responses(
    response_id: str,
    raw_request: Request,
    starting_after: Number = None,
    stream: bool | None = False,
    include_obfuscation: bool | None = None,
) -> Response:
    """Retrieve a response, or the rest of its stream."""
    who, handler = find_owner(raw_request), require_handler(raw_request)
    include = parse_include(raw_request)
    if stream:
        if include:
            await handler.stored_responses.retrieve(who, response_id, include)
        events = await handler.stored_responses.resume_stream(
            who, response_id, starting_after, obfuscate=include_obfuscation
        )
        return make_stream_response(events)
    return make_json_response(await handler.stored_responses.retrieve(who, response_id, include))


@router.post("/v1/responses", dependencies=ONLY_JSON, responses=STREAM)
@until_gone
@counted
@answer_errors
async def create_responses(request: ResponsesRequest, raw_request: Request) -> Response:
    """Make a response."""
    return make_http_response(
        await require_handler(raw_request).answer_create_request(request, raw_request), raw_request
    )


@router.post("/v1/responses/input_tokens", dependencies=ONLY_JSON)
@until_gone
@counted
@answer_errors
async def count_input_tokens(request: CountRequest, raw_request: Request) -> Response:
    """Count the tokens that a response to the same request would have as its input."""
    return make_http_response(
        await require_handler(raw_request).answer_count_request(request, raw_request), raw_request
    )


@router.post("/v1/responses/compact", dependencies=ONLY_JSON)
@until_gone
@counted
@answer_errors
async def compact_responses(request: CompactRequest, raw_request: Request) -> Response:
    """Replace a conversation by its user's messages and a sealed summary."""
    return make_http_response(
        await require_handler(raw_request).answer_compact_request(request, raw_request), raw_request
    )


@router.websocket("/v1/responses")
async def serve_websocket(socket: WebSocket) -> None:
    """Make responses on a WebSocket."""
    handler = socket.app.state.openai_serving_responses
    given = socket.app.state.args.api_key or [vllm_interface.read_env_api_key()]
    limits = StoreBackedServing.sockets
    if why := websocket.find_handshake_error(socket, [key for key in given if key], limits):
        await websocket.deny_handshake(socket, *why)
        return

    async def create_stream(
        request_fields: dict[str, Any], raw_request: Request
    ) -> AsyncIterator[EncodedEvent]:
        return await create_response_stream(handler, request_fields, raw_request)

    await websocket.WebSocketConnection(
        socket, handler, find_owner(socket), create_stream, limits
    ).serve()


async def create_response_stream(
    handler: StoreBackedServing, request_fields: dict[str, Any], raw_request: Request
) -> AsyncIterator[EncodedEvent]:
    """The events of a response to a request with ``stream``.

    Raises:
        ApiError: the request is invalid.
        StoreUnavailable: the store is down.
    """
    try:
        request = ResponsesRequest.model_validate(request_fields)
    except ValidationError as error:
        raise ApiError(400, *describe_validation_errors(error.errors(include_url=False))) from error
    answer = await handler.answer_create_request(request, raw_request)
    if isinstance(answer, ErrorResponse):
        why = answer.error
        raise ApiError(why.code, why.message, why.param)
    assert not isinstance(answer, bytes)
    return answer


@router.get("/v1/responses")
@counted
@answer_errors
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
        after_id=after,
        before_id=before,
        limit=limit,
        descending=order == "desc",
        model=model,
        status=status,
    )
    return make_json_response(
        await require_handler(raw_request).stored_responses.list_responses(
            find_owner(raw_request), query
        )
    )


@router.delete("/v1/responses/{response_id}")
@counted
@answer_errors
async def delete_responses(response_id: str, raw_request: Request) -> Response:
    """Delete a response."""
    return make_json_response(
        await require_handler(raw_request).stored_responses.delete(
            find_owner(raw_request), response_id
        )
    )


@router.post("/v1/responses/{response_id}/cancel")
@counted
@answer_errors
async def cancel_responses(response_id: str, raw_request: Request) -> Response:
    """Cancel a response in the background."""
    return make_json_response(
        await require_handler(raw_request).stored_responses.cancel(
            find_owner(raw_request), response_id
        )
    )


@router.get("/v1/responses/{response_id}/input_items", openapi_extra=INCLUDE)
@counted
@answer_errors
async def list_input_items(
    response_id: str,
    raw_request: Request,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """List what a response's turn added to its conversation."""
    validate_include(parse_include(raw_request))
    body = await require_handler(raw_request).stored_responses.list_input_items(
        find_owner(raw_request),
        response_id,
        after_id=after,
        limit=limit,
        descending=order == "desc",
    )
    return make_json_response(body)
