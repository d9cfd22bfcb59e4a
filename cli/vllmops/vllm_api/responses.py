"""Stored responses over a server's HTTP API: those of one API key."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import httpx
import msgspec
from httpx_sse import EventSource

from ..errors import VllmopsError
from ..protocol.files import DAMAGE
from ..store import shape
from ..store.backend import (
    BROKEN,
    FINISHED,
    CursorUnknown,
    Page,
    Query,
    Response,
    StoreUnavailable,
    owner_of,
)
from ..store.settings import STORE
from ..store.source import ChangeResult, failed, refused, unknown
from ..store.store import Events
from ..store.urls import shown
from . import http
from .endpoint import Endpoint

TIMEOUT_S = 5.0
# Between two events of a run that goes on: all earlier events have arrived by then.
SILENCE_S = 1.0
# What the routes give at once.
LIMIT = 100
# Pages of one response's input, before a list counts as endless.
PAGES = 1000
LETTERS = 300  # of what a server says
TERMINAL = frozenset(f"response.{status}" for status in FINISHED)


class Listing(msgspec.Struct):
    """A page of a list."""

    object: str
    data: list[msgspec.Raw]
    has_more: bool = False
    last_id: str | None = None


class Said(msgspec.Struct):
    """As much of an event as is needed to know it."""

    type: str
    sequence_number: int


LISTING = msgspec.json.Decoder(Listing)
SAID = msgspec.json.Decoder(Said)
EVENT_STREAM = {"Content-Type": "text/event-stream"}


class Http:
    """A server's routes, as a client with an API key sees them.

    Args:
        endpoint: the server.
        timeout_s: for each answer.
    """

    whole = False

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self.timeout_s = timeout_s
        headers, self.withheld = http.key_for(endpoint.url)
        # A key is for nobody but the right server.
        self.client = http.client(headers, outside=not endpoint.local)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def page(self, query: Query) -> Page:
        wanted = {
            "after": query.after,
            "before": query.before,
            "limit": min(query.limit, LIMIT),
            "order": "desc" if query.descending else "asc",
            "model": query.model,
            "status": query.status,
        }
        answer = await self.ask("GET", "", **{k: v for k, v in wanted.items() if v is not None})
        if (
            answer.status_code == httpx.codes.BAD_REQUEST
            and query.after
            and blames(answer, "after")
        ):
            raise CursorUnknown(query.after)
        try:
            listing = LISTING.decode(self.good(answer, "list responses").content)
        except BROKEN as error:
            raise self.lacking("list responses") from error
        return Page([made(bytes(entry)) for entry in listing.data], listing.has_more)

    async def get(self, response_id: str) -> Response:
        if nowhere(response_id):
            raise unknown(self.name, response_id)
        answer = await self.ask("GET", path(response_id))
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise unknown(self.name, response_id, sure=response_id in answer.text)
        content = self.good(answer, "retrieve a response").content
        if head_of(content).id:
            return made(content)
        raise self.lacking("retrieve a response")

    async def items(self, response: Response) -> bytes:
        items: list[msgspec.Raw] = []
        size = 0
        after: dict[str, str] = {}
        for _ in range(PAGES):
            answer = await self.ask(
                "GET", f"{path(response.id)}/input_items", limit=LIMIT, order="asc", **after
            )
            await self.expect(answer, response.id, "list the input of a response")
            try:
                listing = LISTING.decode(self.good(answer, "list the input of a response").content)
            except BROKEN as error:
                raise self.lacking("list the input of a response") from error
            items += listing.data
            if not listing.has_more or not listing.last_id or not listing.data:
                return msgspec.json.encode(items)
            size += len(answer.content)
            if size > http.ANSWER_BYTES or listing.last_id == after.get("after"):
                break
            after = {"after": listing.last_id}
        raise VllmopsError(
            "responses.refused", f"{self.name} lists the input of {response.id} endlessly"
        )

    async def events(self, response: Response) -> list[Events]:
        doing = "stream the events of a response"
        content = bytearray()
        silence_s = SILENCE_S if response.running else self.timeout_s
        timeout = httpx.Timeout(self.timeout_s, read=silence_s)
        url = f"{self.endpoint.url}/v1/responses{path(response.id)}"
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
                    self.good(self.allowed(await http.whole(answer, end)), doing)
                    raise self.lacking(doing)
                async for part in http.parts(answer, end):
                    content += part
        except (httpx.HTTPError, TimeoutError) as error:
            if not (response.running and isinstance(error, httpx.ReadTimeout | TimeoutError)):
                raise self.away(error) from error
        events: list[Events] = []
        # As far as it came: an event that was cut off is none.
        read = httpx.Response(200, headers=EVENT_STREAM, content=bytes(content))
        for event in EventSource(read).iter_sse():
            keep(event.data.encode(), events)
        return events

    async def cancel(self, response_id: str) -> ChangeResult:
        if nowhere(response_id):
            return failed(response_id, unknown(self.name, response_id))
        answer = await self.ask("POST", f"{path(response_id)}/cancel")
        if answer.status_code in {httpx.codes.BAD_REQUEST, httpx.codes.CONFLICT}:
            return refused(response_id, refusal(answer))
        if failure := await self.missing(answer, response_id, "cancel a response"):
            return failure
        head = decoded(self.good(answer, "cancel a response").content)
        return ChangeResult(id=response_id, done=True, result=(head and head.status) or "cancelled")

    async def delete(self, response_id: str) -> ChangeResult:
        if nowhere(response_id):
            return failed(response_id, unknown(self.name, response_id))
        answer = await self.ask("DELETE", path(response_id))
        if failure := await self.missing(answer, response_id, "delete a response"):
            return failure
        self.good(answer, "delete a response")
        return ChangeResult(id=response_id, done=True, result="deleted")

    async def owner(self) -> str:
        """The owner of these responses: a hash of the key, empty if the server needs none.

        Raises:
            VllmopsError: the server does not answer.
        """
        authorization = self.client.headers.get("Authorization", "")
        bare = {"Authorization": ""} if authorization else {}
        answer = await self.send("GET", f"{self.endpoint.url}/v1/models", headers=bare)
        if answer.status_code not in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            return ""
        return owner_of(authorization.partition(" ")[2])

    # What answers mean

    async def ask(self, method: str, path: str, **params: Any) -> httpx.Response:
        """A route's answer, whatever its status, but where nobody may use it now.

        Raises:
            VllmopsError: ``responses.unreachable`` (5), ``responses.timeout`` (3),
                ``responses.not-authorised`` (4).
            StoreUnavailable: the server says 503.
        """
        answer = await self.send(method, f"{self.endpoint.url}/v1/responses{path}", params=params)
        return self.allowed(answer)

    def allowed(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            why, hint = "missing or rejected (VLLM_API_KEY)", "VLLM_API_KEY=… vllmops responses …"
            if self.withheld:
                why = f"VLLM_API_KEY was not sent: {self.withheld}"
                hint = "run vllmops as the user who started the server"
            raise VllmopsError(
                "responses.not-authorised",
                f"{self.name} needs an API key: {why}",
                f"{hint}{self.endpoint.or_store}",
            )
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            after = answer.headers.get("Retry-After", "")
            raise StoreUnavailable(
                f"{self.name}: {refusal(answer)}",
                float(after) if after.isascii() and after.isdigit() else 1,
            )
        return answer

    async def send(self, method: str, url: str, **options: Any) -> httpx.Response:
        try:
            return await http.answered(self.client, method, url, self.timeout_s, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.away(error) from error

    def away(self, error: Exception) -> VllmopsError:
        """The error of a server that can't be reached, or does not answer."""
        if isinstance(error, httpx.TimeoutException | TimeoutError) and not isinstance(
            error, httpx.ConnectTimeout | httpx.PoolTimeout
        ):
            check = f"vllmops doctor -t {self.name}" if self.endpoint.local else "try again later"
            return VllmopsError(
                "responses.timeout",
                f"{self.name} did not answer within {self.timeout_s:g} s",
                f"{check}{self.endpoint.or_store}",
            )
        bad = isinstance(error, httpx.RemoteProtocolError)
        fault = "gives no valid answer" if bad else "can't be reached"
        return VllmopsError(
            "responses.unreachable",
            f"{shown(self.endpoint.url)} {fault}: {str(error) or type(error).__name__}",
            f"vllmops ps{self.endpoint.or_store}",
        )

    def good(self, answer: httpx.Response, doing: str) -> httpx.Response:
        """An answer that is what was asked for.

        Raises:
            VllmopsError: ``responses.no-route`` or ``responses.refused``.
        """
        if routeless(answer):
            raise self.lacking(doing)
        if not answer.is_success:
            raise VllmopsError(
                "responses.refused", f"{self.name} answered {answer.status_code}: {refusal(answer)}"
            )
        return answer

    async def expect(self, answer: httpx.Response, response_id: str, doing: str) -> None:
        """See that there is the route, and the response.

        Raises:
            VllmopsError: ``responses.unknown`` or ``responses.no-route``.
        """
        if answer.status_code == httpx.codes.METHOD_NOT_ALLOWED:
            raise self.lacking(doing)
        if answer.status_code == httpx.codes.NOT_FOUND:
            # Of a response, or of the route? Whoever says it of a response names it, mostly.
            if response_id not in answer.text:
                await self.get(response_id)
                raise self.lacking(doing)
            raise unknown(self.name, response_id)

    async def missing(
        self, answer: httpx.Response, response_id: str, doing: str
    ) -> ChangeResult | None:
        """The outcome where there is no such response, None if there is."""
        try:
            await self.expect(answer, response_id, doing)
        except VllmopsError as error:
            if error.code != "responses.unknown":
                raise
            return failed(response_id, error)
        return None

    def lacking(self, doing: str) -> VllmopsError:
        """The error of a server without a route."""
        with ThreadPoolExecutor(1) as pool:  # an event loop runs on this thread
            version = pool.submit(http.version, self.endpoint.url).result()
        if version is None and not self.endpoint.vllm:
            return VllmopsError(
                "responses.no-route",
                f"{self.name} has no route to {doing}: it is a gateway without it, or not vLLM",
                "-t with the URL of the vLLM server behind it, started by vllmops serve",
            )
        who = f"vLLM {version}" if version else "vLLM"
        if self.endpoint.store:
            hint = f"vllmops patches list -t {self.name} may show why{self.endpoint.or_store}"
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


def routeless(answer: httpx.Response) -> bool:
    """Whether there is no such route; the gateway agentic-api has a WebSocket for a list."""
    if answer.status_code == httpx.codes.BAD_REQUEST:
        return not answer.headers.get("content-type", "").startswith("application/json")
    return answer.status_code in {httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED}


def nowhere(response_id: str) -> bool:
    """Whether an id leads to no response, but elsewhere, as a part of a path."""
    return response_id in {"", ".", ".."}


def path(response_id: str) -> str:
    return "/" + quote(response_id, safe="")


class Rescued(NamedTuple):
    """As much of a response object as names it."""

    id: str = ""
    status: str = ""


RESCUED = msgspec.json.Decoder(dict[str, msgspec.Raw])
TEXT = msgspec.json.Decoder(str)


def head_of(document: bytes) -> Rescued:
    """What names a response, nothing if it has no name."""
    try:
        parts = RESCUED.decode(document)
    except BROKEN:
        return Rescued()
    return Rescued(text(parts.get("id")), text(parts.get("status")))


def text(part: msgspec.Raw | None) -> str:
    """A text from its JSON, empty if it is none."""
    try:
        return TEXT.decode(part) if part is not None else ""
    except BROKEN:
        return ""


def made(document: bytes) -> Response:
    """A response from its object; as much as is there from one that is damaged."""
    head = decoded(document)
    if head is None:
        name = head_of(document)
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


def decoded(document: bytes) -> shape.Document | None:
    """A response object, None if it is none."""
    try:
        return shape.DOCUMENT.decode(document)
    except BROKEN:
        return None


def keep(data: bytes, kept: list[Events]) -> None:
    """Add the data of an event of a stream to those that were found."""
    try:
        event = SAID.decode(data)
    except DAMAGE:
        return  # for example [DONE]
    if event.type in TERMINAL:
        return
    if kept and kept[-1].first + len(kept[-1].events) == event.sequence_number:
        kept[-1].events.append(data)
    else:
        kept.append(Events(event.sequence_number, [data]))


def refusal(answer: httpx.Response) -> str:
    """The message in a server's refusal."""
    try:
        body = answer.json()
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        message = None
    return str(message or answer.text or answer.reason_phrase)[:LETTERS]


def blames(answer: httpx.Response, param: str) -> bool:
    """Whether a server's refusal blames a parameter."""
    try:
        return bool(answer.json()["error"]["param"] == param)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
