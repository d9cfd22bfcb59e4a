"""Stored responses over a server's HTTP API: those of one API key."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import httpx
import msgspec
from httpx_sse import EventSource

from vllmops.collect.http import vllm_client
from vllmops.collect.http.endpoint import Endpoint
from vllmops.model.environment import STORE
from vllmops.model.owners import derive_owner
from vllmops.model.snapshot_files import DAMAGE
from vllmops.support.errors import VllmopsError
from vllmops.support.urls import redact_url

from .store import response_schema
from .store.backend import (
    BROKEN,
    FINISHED,
    CursorUnknown,
    Response,
    ResponsePage,
    ResponseQuery,
    StoreUnavailable,
)
from .store.response_source import (
    ChangeResult,
    make_failed_result,
    make_refused_result,
    make_unknown_error,
)
from .store.response_store import EventBatch

TIMEOUT_S = 5.0
# Between two events of a run that goes on: all earlier events have arrived by then.
SILENCE_S = 1.0
# What the routes give at once.
LIMIT = 100
# Pages of one response's input, before a list counts as endless.
PAGES = 1000
LETTERS = 300  # of what a server says
TERMINAL = frozenset(f"response.{status}" for status in FINISHED)


class ListPage(msgspec.Struct):
    """A page of a list."""

    object: str
    data: list[msgspec.Raw]
    has_more: bool = False
    last_id: str | None = None


class EventIdentity(msgspec.Struct):
    """As much of an event as is needed to know it."""

    type: str
    sequence_number: int


LISTING = msgspec.json.Decoder(ListPage)
SAID = msgspec.json.Decoder(EventIdentity)
EVENT_STREAM = {"Content-Type": "text/event-stream"}


class HttpResponseSource:
    """A server's routes, as a client with an API key sees them.

    Args:
        endpoint: the server.
        timeout_s: for each answer.
    """

    has_all_owners = False

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self.timeout_s = timeout_s
        headers, self.withheld = vllm_client.build_api_key_headers(endpoint.url)
        # A key is for nobody but the right server.
        self.client = vllm_client.make_client(headers, is_remote=not endpoint.local)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def list_responses(self, query: ResponseQuery) -> ResponsePage:
        wanted = {
            "after": query.after_id,
            "before": query.before_id,
            "limit": min(query.limit, LIMIT),
            "order": "desc" if query.descending else "asc",
            "model": query.model,
            "status": query.status,
        }
        answer = await self.request_route(
            "GET", "", **{k: v for k, v in wanted.items() if v is not None}
        )
        if (
            answer.status_code == httpx.codes.BAD_REQUEST
            and query.after_id
            and is_parameter_error(answer, "after")
        ):
            raise CursorUnknown(query.after_id)
        try:
            listing = LISTING.decode(self.require_success(answer, "list responses").content)
        except BROKEN as error:
            raise self.make_no_route_error("list responses") from error
        return ResponsePage(
            [parse_response(bytes(entry)) for entry in listing.data], listing.has_more
        )

    async def get(self, response_id: str) -> Response:
        if is_unroutable_id(response_id):
            raise make_unknown_error(self.name, response_id)
        answer = await self.request_route("GET", make_response_path(response_id))
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise make_unknown_error(self.name, response_id, is_certain=response_id in answer.text)
        content = self.require_success(answer, "retrieve a response").content
        if parse_response_identity(content).id:
            return parse_response(content)
        raise self.make_no_route_error("retrieve a response")

    async def list_input_items(self, response: Response) -> bytes:
        items: list[msgspec.Raw] = []
        size = 0
        after: dict[str, str] = {}
        for _ in range(PAGES):
            answer = await self.request_route(
                "GET",
                f"{make_response_path(response.id)}/input_items",
                limit=LIMIT,
                order="asc",
                **after,
            )
            await self.require_response(answer, response.id, "list the input of a response")
            try:
                listing = LISTING.decode(
                    self.require_success(answer, "list the input of a response").content
                )
            except BROKEN as error:
                raise self.make_no_route_error("list the input of a response") from error
            items += listing.data
            if not listing.has_more or not listing.last_id or not listing.data:
                return msgspec.json.encode(items)
            size += len(answer.content)
            if size > vllm_client.ANSWER_BYTES or listing.last_id == after.get("after"):
                break
            after = {"after": listing.last_id}
        raise VllmopsError(
            "responses.refused", f"{self.name} lists the input of {response.id} endlessly"
        )

    async def read_events(self, response: Response) -> list[EventBatch]:
        doing = "stream the events of a response"
        content = bytearray()
        silence_s = SILENCE_S if response.is_running else self.timeout_s
        timeout = httpx.Timeout(self.timeout_s, read=silence_s)
        url = f"{self.endpoint.url}/v1/responses{make_response_path(response.id)}"
        try:
            async with (
                asyncio.timeout(self.timeout_s) as end,
                self.client.stream(
                    "GET", url, params={"stream": "true"}, timeout=timeout
                ) as answer,
            ):
                kind = answer.headers.get("Content-Type", "").partition(";")[0]
                if kind != EVENT_STREAM["Content-Type"]:
                    if answer.status_code == httpx.codes.BAD_REQUEST:
                        return []  # it was no background stream, or its events are gone
                    self.require_success(
                        self.require_access(await vllm_client.read_whole_answer(answer, end)), doing
                    )
                    raise self.make_no_route_error(doing)
                async for part in vllm_client.read_answer_parts(answer, end):
                    content += part
        except (httpx.HTTPError, TimeoutError) as error:
            if not (response.is_running and isinstance(error, httpx.ReadTimeout | TimeoutError)):
                raise self.make_unreachable_error(error) from error
        events: list[EventBatch] = []
        # As far as it came: an event that was cut off is none.
        read = httpx.Response(200, headers=EVENT_STREAM, content=bytes(content))
        for event in EventSource(read).iter_sse():
            append_event(event.data.encode(), events)
        return events

    async def cancel(self, response_id: str) -> ChangeResult:
        if is_unroutable_id(response_id):
            return make_failed_result(response_id, make_unknown_error(self.name, response_id))
        answer = await self.request_route("POST", f"{make_response_path(response_id)}/cancel")
        if answer.status_code in {httpx.codes.BAD_REQUEST, httpx.codes.CONFLICT}:
            return make_refused_result(response_id, extract_error_message(answer))
        if failure := await self.find_failure(answer, response_id, "cancel a response"):
            return failure
        head = parse_response_object(self.require_success(answer, "cancel a response").content)
        return ChangeResult(id=response_id, done=True, result=(head and head.status) or "cancelled")

    async def delete(self, response_id: str) -> ChangeResult:
        if is_unroutable_id(response_id):
            return make_failed_result(response_id, make_unknown_error(self.name, response_id))
        answer = await self.request_route("DELETE", make_response_path(response_id))
        if failure := await self.find_failure(answer, response_id, "delete a response"):
            return failure
        self.require_success(answer, "delete a response")
        return ChangeResult(id=response_id, done=True, result="deleted")

    async def fetch_owner(self) -> str:
        """The owner of these responses: a hash of the key, empty if the server needs none.

        Raises:
            VllmopsError: the server does not answer.
        """
        authorization = self.client.headers.get("Authorization", "")
        bare = {"Authorization": ""} if authorization else {}
        answer = await self.send_request("GET", f"{self.endpoint.url}/v1/models", headers=bare)
        if answer.status_code not in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            return ""
        return derive_owner(authorization.partition(" ")[2])

    # What answers mean

    async def request_route(self, method: str, path: str, **params: Any) -> httpx.Response:
        """A route's answer, whatever its status, but where nobody may use it now.

        Raises:
            VllmopsError: ``responses.unreachable`` (5), ``responses.timeout`` (3),
                ``responses.not-authorised`` (4).
            StoreUnavailable: the server says 503.
        """
        answer = await self.send_request(
            method, f"{self.endpoint.url}/v1/responses{path}", params=params
        )
        return self.require_access(answer)

    def require_access(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            why, hint = "missing or rejected (VLLM_API_KEY)", "VLLM_API_KEY=… vllmops responses …"
            if self.withheld:
                why = f"VLLM_API_KEY was not sent: {self.withheld}"
                hint = "run vllmops as the user who started the server"
            raise VllmopsError(
                "responses.not-authorised",
                f"{self.name} needs an API key: {why}",
                f"{hint}{self.endpoint.store_hint}",
            )
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            after = answer.headers.get("Retry-After", "")
            raise StoreUnavailable(
                f"{self.name}: {extract_error_message(answer)}",
                float(after) if after.isascii() and after.isdigit() else 1,
            )
        return answer

    async def send_request(self, method: str, url: str, **options: Any) -> httpx.Response:
        try:
            return await vllm_client.send_request_async(
                self.client, method, url, self.timeout_s, **options
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.make_unreachable_error(error) from error

    def make_unreachable_error(self, error: Exception) -> VllmopsError:
        """The error of a server that can't be reached, or does not answer."""
        if isinstance(error, httpx.TimeoutException | TimeoutError) and not isinstance(
            error, httpx.ConnectTimeout | httpx.PoolTimeout
        ):
            check = f"vllmops doctor -t {self.name}" if self.endpoint.local else "try again later"
            return VllmopsError(
                "responses.timeout",
                f"{self.name} did not answer within {self.timeout_s:g} s",
                f"{check}{self.endpoint.store_hint}",
            )
        bad = isinstance(error, httpx.RemoteProtocolError)
        fault = "gives no valid answer" if bad else "can't be reached"
        return VllmopsError(
            "responses.unreachable",
            f"{redact_url(self.endpoint.url)} {fault}: {str(error) or type(error).__name__}",
            f"vllmops ps{self.endpoint.store_hint}",
        )

    def require_success(self, answer: httpx.Response, doing: str) -> httpx.Response:
        """An answer that is what was asked for.

        Raises:
            VllmopsError: ``responses.no-route`` or ``responses.refused``.
        """
        if is_route_missing(answer):
            raise self.make_no_route_error(doing)
        if not answer.is_success:
            raise VllmopsError(
                "responses.refused",
                f"{self.name} answered {answer.status_code}: {extract_error_message(answer)}",
            )
        return answer

    async def require_response(self, answer: httpx.Response, response_id: str, doing: str) -> None:
        """See that there is the route, and the response.

        Raises:
            VllmopsError: ``responses.unknown`` or ``responses.no-route``.
        """
        if answer.status_code == httpx.codes.METHOD_NOT_ALLOWED:
            raise self.make_no_route_error(doing)
        if answer.status_code == httpx.codes.NOT_FOUND:
            # Of a response, or of the route? Whoever says it of a response names it, mostly.
            if response_id not in answer.text:
                await self.get(response_id)
                raise self.make_no_route_error(doing)
            raise make_unknown_error(self.name, response_id)

    async def find_failure(
        self, answer: httpx.Response, response_id: str, doing: str
    ) -> ChangeResult | None:
        """The outcome where there is no such response, None if there is."""
        try:
            await self.require_response(answer, response_id, doing)
        except VllmopsError as error:
            if error.code != "responses.unknown":
                raise
            return make_failed_result(response_id, error)
        return None

    def make_no_route_error(self, doing: str) -> VllmopsError:
        """The error of a server without a route."""
        with ThreadPoolExecutor(1) as pool:  # an event loop runs on this thread
            version = pool.submit(vllm_client.fetch_version, self.endpoint.url).result()
        if version is None and not self.endpoint.vllm:
            return VllmopsError(
                "responses.no-route",
                f"{self.name} has no route to {doing}: it is a gateway without it, or not vLLM",
                "-t with the URL of the vLLM server behind it, started by vllmops serve",
            )
        who = f"vLLM {version}" if version else "vLLM"
        if self.endpoint.store:
            hint = f"vllmops patches list -t {self.name} may show why{self.endpoint.store_hint}"
        else:
            hint = (
                "start it with vllmops serve; or, with vllmops installed beside vLLM, "
                f"set {STORE}=sqlite:///FILE for it"
            )
        return VllmopsError(
            "responses.no-route",
            f"{self.name} has no route to {doing}: {who} has it only with vllmops",
            hint,
        )


def is_route_missing(answer: httpx.Response) -> bool:
    """Whether there is no such route; the gateway agentic-api has a WebSocket for a list."""
    if answer.status_code == httpx.codes.BAD_REQUEST:
        return not answer.headers.get("content-type", "").startswith("application/json")
    return answer.status_code in {httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED}


def is_unroutable_id(response_id: str) -> bool:
    """Whether an id leads to no response, but elsewhere, as a part of a path."""
    return response_id in {"", ".", ".."}


def make_response_path(response_id: str) -> str:
    return "/" + quote(response_id, safe="")


class ResponseIdentity(NamedTuple):
    """As much of a response object as names it."""

    id: str = ""
    status: str = ""


RESCUED = msgspec.json.Decoder(dict[str, msgspec.Raw])
TEXT = msgspec.json.Decoder(str)


def parse_response_identity(document: bytes) -> ResponseIdentity:
    """What names a response, nothing if it has no name."""
    try:
        parts = RESCUED.decode(document)
    except BROKEN:
        return ResponseIdentity()
    return ResponseIdentity(parse_text(parts.get("id")), parse_text(parts.get("status")))


def parse_text(part: msgspec.Raw | None) -> str:
    """A text from its JSON, empty if it is none."""
    try:
        return TEXT.decode(part) if part is not None else ""
    except BROKEN:
        return ""


def parse_response(document: bytes) -> Response:
    """A response from its object; as much as is there from one that is damaged."""
    head = parse_response_object(document)
    if head is None:
        name = parse_response_identity(document)
        return Response(
            id=name.id, owner="", model="", status=name.status, created_at=0.0, body=document
        )
    return Response(
        id=head.id,
        owner="",
        model=head.model or "",
        status=head.status or "",
        created_at=head.created_at,
        previous_id=head.previous_response_id,
        body=document,
    )


def parse_response_object(document: bytes) -> response_schema.ResponseObject | None:
    """A response object, None if it is none."""
    try:
        return response_schema.DOCUMENT.decode(document)
    except BROKEN:
        return None


def append_event(data: bytes, batches: list[EventBatch]) -> None:
    """Add the data of an event of a stream to those that were found."""
    try:
        event = SAID.decode(data)
    except DAMAGE:
        return  # for example [DONE]
    if event.type in TERMINAL:
        return
    if batches and batches[-1].first_number + len(batches[-1].events) == event.sequence_number:
        batches[-1].events.append(data)
    else:
        batches.append(EventBatch(event.sequence_number, [data]))


def extract_error_message(answer: httpx.Response) -> str:
    """The message in a server's refusal."""
    try:
        body = answer.json()
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        message = None
    return str(message or answer.text or answer.reason_phrase)[:LETTERS]


def is_parameter_error(answer: httpx.Response, param: str) -> bool:
    """Whether a server's refusal blames a parameter."""
    try:
        return bool(answer.json()["error"]["param"] == param)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
