"""vLLM's serving of the Responses API with the store in the place of its three dicts.

vLLM makes the answers. What it would remember is caught here: the dicts that it writes to keep
nothing, what it reads from them is what the store has found, and a response is told as stored
once it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import Request
from msgspec.structs import replace
from openai.types.responses import (
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseReasoningItem,
)
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from vllm import envs
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError

from ...store.backend import EVERYBODY, owner_of
from ...store.settings import Carriers, Format
from ...store.store import (
    ConversationBroken,
    Query,
    Response,
    ResponseStore,
    StoreUnavailable,
    document,
    valid,
)
from ..log import log
from . import carried, sealing, wire
from .carried import Brought, Item
from .history import History, legible
from .parsing import messages, parsed
from .wire import Frame, Refused
from .writer import Writer, patiently

FAILED = "The generation failed."
STOPPED = "The server that ran this response was stopped."
# Parameters of OpenAI's that vLLM does not know do no harm when nobody heeds them, but for the one
# that names a conversation, which the answer would be without.
HARMLESS = frozenset(ResponseCreateParamsBase.__annotations__) - {"conversation"}
KNOWN = HARMLESS | {carried.PREVIOUS}


class Turn:
    """A request on its way.

    Args:
        request: as vLLM reads it.
        owner: whose it is.
        items: what it adds to the conversation, a JSON array.
        history: the turns before it, as the store keeps them, the oldest first; None where it
            names none.
        hidden: whether something in the items is encrypted.
        brought: the carrier that it brings.
        sealing: whether its answer is to have one.
    """

    def __init__(
        self,
        request: Any,
        owner: str,
        items: bytes,
        *,
        history: list[Response] | None = None,
        hidden: bool = False,
        brought: Brought | None = None,
        sealing: bool = False,
    ) -> None:
        self.request = request
        self.owner = owner
        self.items = items
        self.history = history
        self.hidden = hidden
        self.brought = brought
        self.sealing = sealing
        # All items so far, and how many bytes they are, where a carrier is to hold them.
        self.whole: list[Item] = []
        self.weight = 0
        self.began = time.time()
        # What vLLM wanted to remember last.
        self.latest: Any = None
        # Set once a run in the background is in the store.
        self.accepted: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def stored(self, response: Any, body: bytes) -> Response:
        """A response of vLLM's, and it as JSON, as the store keeps it."""
        return Response(
            id=response.id,
            owner=self.owner,
            model=response.model,
            status=response.status,
            created_at=self.began,
            previous_id=response.previous_response_id,
            body=body,
            input=self.items,
        )


# The turn that a task of vLLM's works on; tasks that it starts inherit it.
_turn: ContextVar[Turn | None] = ContextVar("vllmops.agent.responses.turn", default=None)


class Nothing(dict[str, Any]):
    """A dict of vLLM's that keeps nothing."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Forget it."""


class Previous(Nothing):
    """Where vLLM looks for the response before, and leaves the one that it makes."""

    def get(self, key: str, default: Any = None) -> Any:
        """The history of the turn that asks, and nothing else."""
        turn = _turn.get()
        if turn and turn.history is not None and key == turn.request.previous_response_id:
            return turn.history
        return default

    def __setitem__(self, key: str, value: Any) -> None:
        if turn := _turn.get():
            turn.latest = value


class StoredResponses(OpenAIServingResponses):  # type: ignore[misc]
    """vLLM's own, with a store."""

    # Set by whoever puts this class in vLLM's place: it is vLLM that makes the instance.
    open_store: Callable[[], ResponseStore]
    carriers = Carriers()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store = type(self).open_store()
        self.enable_store = True
        self.response_store = Previous()
        self.msg_store = Nothing()
        self.event_store = Nothing()
        self.runs: dict[str, tuple[Response, asyncio.Task[None]]] = {}
        self.history = History(parsed, harmony=self.use_harmony)

    async def close(self) -> None:
        """Tell what still runs as failed, and let go of the store."""
        runs = list(self.runs.values())
        for run, task in runs:
            task.cancel()
            with suppress(StoreUnavailable):
                await self.store.put(replace(run, status="failed", error=STOPPED))
        await self.store.close()

    # Making a response

    async def create(
        self, request: Any, raw_request: Request
    ) -> bytes | AsyncIterator[Frame] | ErrorResponse:
        """Answer a request, and store the answer where it asks for that.

        Args:
            request: vLLM's ResponsesRequest.
            raw_request: as it came.

        Returns:
            A response as JSON, a stream, or vLLM's refusal.

        Raises:
            Refused: it can't be answered so.
            StoreUnavailable: the store is down, and the response is not stored.
        """
        if request.model_extra and (unknown := request.model_extra.keys() - KNOWN):
            raise Refused(400, f"Unknown parameter: {min(unknown)!r}.", min(unknown))
        if response_before(request) is not None:
            if request.background:
                message = "background can't be used with previous_response, which stores nothing"
                raise Refused(400, message, "background")
            request.store = False
        if request.background and not request.store:
            raise Refused(400, "background can only be used when store is true", "background")
        turn = await self.turn(request, raw_request)
        token = _turn.set(turn)
        try:
            answer = await self.create_responses(request, raw_request)
        finally:
            _turn.reset(token)
        if isinstance(answer, ErrorResponse):
            return answer
        if turn and request.background:
            run = await self.accept(turn, self.background_tasks.pop(request.request_id))
            return self.follow(run.owner, run.id) if request.stream else run.body
        if not isinstance(answer, ResponsesResponse):
            return self.streamed(turn, answer)
        if item := await self.seal(turn, answer):
            answer.output.append(item)
        return await self.kept(turn, answer)

    async def turn(self, request: Any, raw_request: Request) -> Turn | None:
        """What has to be known before vLLM begins; None where the store has no part in it.

        Raises:
            Refused: the id can't be had, the turn before this one can't be followed, or a carrier
                is missing, or one too many.
            StoreUnavailable: the store is down.
        """
        response, given = response_before(request), request.input
        hidden = not isinstance(given, str) and any(map(hides, given))
        wants = not request.store and carried.WANTED in (request.include or ()) and sealing.seals()
        followed = (request.previous_response_id, response) != (None, None)
        if not (request.store or followed or hidden or wants):
            return None
        items = wire.added(await raw_request.body())
        brought = None
        if hidden or response is not None:
            brought = carried.brought(wire.ITEMS.decode(items), response)
        check_one(request, brought, wants=wants)
        who = owner(raw_request)
        if request.store and "request_id" in request.model_fields_set:
            if not valid(request.request_id) or "/" in request.request_id:
                raise Refused(400, "request_id can't be the id of a response", "request_id")
            if await self.store.get(EVERYBODY, request.request_id):
                raise wire.taken(request.request_id)
        history = None
        if (previous := request.previous_response_id) is not None:
            try:
                history = await self.store.conversation(who, previous)
            except ConversationBroken as error:
                raise Refused(404, f"{error.message}.", "previous_response_id") from error
            if not history:
                raise wire.not_found(previous, "previous_response_id")
            if history[-1].running:
                message = f"Response with id '{previous}' is still {history[-1].status}."
                raise Refused(400, message, "previous_response_id")
        return Turn(
            request,
            who,
            items,
            history=history,
            hidden=hidden,
            brought=brought,
            sealing=wants,
        )

    async def _render_resolved_response_inputs(self, request: Any, *_: Any, **options: Any) -> Any:
        try:
            if turn := _turn.get():
                await self.resolve(turn)
            if isinstance(request.input, list):
                request.input = [each for each in request.input if not wire.silent(each)]
            return await super()._render_resolved_response_inputs(request, None, **options)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            # Of an item that is valid and empty, say; vLLM's answer would be a 500.
            log.warning("vllmops: an input can't be rendered: %r", error)
            raise Refused(400, "The input can't be rendered.", "input") from error

    async def resolve(self, turn: Turn) -> None:
        """Put what was before a turn into the input of its request.

        All turns as the items that they were, so vLLM needs no messages of before: tool calls and
        reasoning are rendered as they would be had the client sent them again.

        Raises:
            Refused: the carrier is not to be taken, or the answer's can't hold so much.
        """
        if not (turn.history or turn.hidden or turn.brought or turn.sealing):
            return
        request, given = turn.request, turn.request.input
        own = [{"role": "user", "content": given}] if isinstance(given, str) else given
        items = wire.ITEMS.decode(turn.items)
        kept, weight = list(range(len(items))), len(turn.items)
        before = await self.history.of(turn.history or ())
        weight += before.weight
        brought = list[Item]()
        if turn.brought:
            model = self.models.model_name(self._maybe_get_adapters(request))
            brought = await sealing.opened(turn.brought, model=model, owner=turn.owner)
            brought, kept = carried.whole(brought, items, turn.brought.at)
            weight += sealing.SHRINKS * len(turn.brought.text)
        new = [(n, item) for n in kept if (item := carried.readable(items[n]))]
        if brought or turn.hidden:
            turn.items = wire.ENCODE([*brought, *(item for _, item in new)])
        later = [own[n] if item is items[n] else parsed([item])[0] for n, item in new]
        carrying = legible(brought)
        if before.items or carrying or turn.hidden:
            request.input = [*before.parsed, *parsed(carrying), *later]
        turn.whole = [*before.items, *carrying, *(item for _, item in new)]
        if turn.sealing:
            turn.weight = await sealing.checked(turn.whole, weight)

    async def seal(self, turn: Turn | None, response: Any) -> Any:
        """The item that carries a conversation up to an answer, None where none is wanted.

        Raises:
            Refused: the conversation has become too large.
        """
        if not (turn and turn.sealing):
            return None
        output = [each.model_dump(mode="json", by_alias=True) for each in response.output]
        said = map(carried.lean, wire.spoken(output, harmony=self.use_harmony))
        history: list[Any] = [*turn.whole, *said]
        if self.carriers.format is Format.SIGNED_V1:
            history = messages(history)
        text = await sealing.sealed(
            history, turn.weight, self.carriers, model=response.model, owner=turn.owner
        )
        if text is None:
            return None
        return ResponseReasoningItem(
            id=f"rs_{uuid4().hex}",
            type="reasoning",
            summary=[],
            encrypted_content=text,
            status="completed",
        )

    async def kept(self, turn: Turn | None, response: Any) -> bytes:
        """A finished response as JSON, once it is stored if it is to be.

        Raises:
            Refused: somebody else has got its id meanwhile.
            StoreUnavailable: it could not be stored.
        """
        body = dump(response)
        if turn and turn.request.store:
            made = turn.stored(response, body)
            if not await self.store.create(made):
                raise wire.taken(made.id)
        return body

    async def streamed(
        self, turn: Turn | None, events: AsyncGenerator[Any, None]
    ) -> AsyncIterator[Frame]:
        """A stream in the foreground, to its end in every case."""
        response, number = None, -1
        try:
            async for event in events:
                number = event.sequence_number
                if event.type == "response.completed":
                    if item := await self.seal(turn, event.response):
                        for frame in appended(item, event.response.output, number):
                            yield frame
                            number += 1
                    body = await self.kept(turn, event.response)
                    yield wire.terminal(event.response.status, number, body)
                    return
                if event.type == "response.created":
                    response = event.response
                yield Frame(event.type, dump(event))
        except Refused as error:
            yield failure(response, number, error.message)
        except StoreUnavailable as error:
            yield failure(response, number, f"The response is not stored: {error.message}")
        except Exception as error:
            log.exception("vllmops: a stream has failed: %r", error)
            yield failure(response, number + 1, self.why(error))

    def why(self, error: Exception) -> str:
        """What vLLM would have told a client of an error that it finds too late."""
        cause = error.__context__ if isinstance(error.__context__, GenerationError) else error
        message: str = self.create_error_response(cause).error.message
        return message or FAILED

    # Running one in the background

    async def accept(self, turn: Turn, task: asyncio.Task[None]) -> Response:
        """Store a run that vLLM has begun, and let it go on only then.

        Raises:
            Refused: its id is taken.
            StoreUnavailable: the store is down.
        """
        run = turn.stored(turn.latest, dump(turn.latest))
        try:
            if not await self.store.create(run):
                raise wire.taken(run.id)
        except BaseException:
            task.cancel()
            raise
        self.runs[run.id] = run, task
        self.store.attend(run, task.cancel)
        turn.accepted.set_result(run)
        return run

    async def _run_background_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        async def work(run: Response) -> Response:
            answer = await self.responses_full_generator(request, *args, **kwargs)
            if isinstance(answer, ErrorResponse):
                return replace(run, status="failed", error=answer.error.message)
            return replace(run, status=answer.status, body=dump(answer))

        await self.carry_out(work)

    async def _run_background_request_stream(self, request: Any, *args: Any, **kwargs: Any) -> None:
        async def work(run: Response) -> Response:
            async with Writer(self.store, run) as writer:
                async for event in self.responses_stream_generator(request, *args, **kwargs):
                    if event.type == "response.completed":
                        # Whoever follows is told of the end by the response itself.
                        return replace(run, status=event.response.status, body=dump(event.response))
                    writer.add(event.sequence_number, dump(event))
            return replace(run, status="failed", error=FAILED)

        await self.carry_out(work)

    async def carry_out(self, work: Callable[[Response], Awaitable[Response]]) -> None:
        """Do a run's work once it is in the store, and store how it ends."""
        turn = _turn.get()
        assert turn
        run = await turn.accepted
        try:
            if not await self.begin(run):
                return
            try:
                ended = await work(run)
            except Exception as error:
                log.exception("vllmops: %s has failed: %r", run.id, error)
                ended = replace(run, status="failed", error=self.why(error))
            # vLLM takes a cancellation for an answer.
            if not (task := asyncio.current_task()) or not task.cancelling():
                await self.told(ended)
        finally:
            self.store.leave(run)
            self.runs.pop(run.id, None)

    async def told(self, ended: Response) -> None:
        """Store how a run ended; vLLM waits for nothing that this raises, so it is logged here."""
        try:
            await patiently(partial(self.store.put, ended))
        except Exception as error:
            log.exception(
                "vllmops: how %s ended is not stored, and it is told as failed: %r", ended.id, error
            )

    async def begin(self, run: Response) -> bool:
        """Tell a run as in progress; False where it was stopped before that."""
        try:
            swap = await self.store.set_status(
                run.owner, run.id, "in_progress", allowed=frozenset({"queued"})
            )
        except StoreUnavailable:
            return True
        return swap.changed

    # What became of one

    async def retrieve(self, who: str, response_id: str) -> bytes:
        """A response as it is now.

        Raises:
            Refused: there is none.
            StoreUnavailable: the store is down.
        """
        found = await self.store.get(who, response_id)
        if found is None:
            raise wire.not_found(response_id)
        return document(found)

    async def resume(
        self, who: str, response_id: str, starting_after: int | None
    ) -> AsyncIterator[Frame]:
        """A background stream from behind a sequence number, or from its beginning.

        Raises:
            Refused: there is no such response, it was no such stream, its events are no longer
                kept, or it has not come so far.
            StoreUnavailable: the store is down.
        """
        after = -1 if starting_after is None else starting_after
        found = await self.store.log(who, response_id, after - 2)
        if found is None:
            raise wire.not_found(response_id)
        if not found.chunks:
            whole = await self.store.log(who, response_id, -1)
            if not (whole and whole.chunks):
                message = "was not created with background and stream, or its events are gone"
                raise Refused(400, f"Response '{response_id}' {message}.", "stream")
        end = found.chunks[-1].last + (not found.running) if found.chunks else -1
        if after > end:
            message = f"starting_after is {after}, and no such event has been sent"
            raise Refused(400, message, "starting_after")
        if after == end and not found.running:
            return wire.nothing()
        return self.follow(who, response_id, after)

    async def follow(self, who: str, response_id: str, after: int = -1) -> AsyncIterator[Frame]:
        """The events of a background stream as they come, and how it ended."""
        try:
            async for events in self.store.follow(who, response_id, after):
                for data in events.events:
                    yield Frame(wire.KIND.decode(data).type, data)
                after = events.first + len(events.events) - 1
            ended = await patiently(partial(self.store.get, who, response_id))
        except StoreUnavailable as error:
            yield wire.trouble(after + 1, error.message)
            return
        if ended is None or ended.running:
            yield wire.trouble(after + 1, f"Response with id '{response_id}' was deleted.")
        else:
            yield wire.terminal(ended.status, after + 1, document(ended))

    async def cancel(self, who: str, response_id: str) -> bytes:
        """Cancel a run, wherever it runs; once more does no harm.

        Raises:
            Refused: there is none, or it has finished.
            StoreUnavailable: the store is down.
        """
        swap = await self.store.set_status(who, response_id, "cancelled")
        if swap.now is None:
            raise wire.not_found(response_id)
        if swap.changed:
            self.stop(response_id)
        elif swap.now.status != "cancelled":
            if not wire.in_background(swap.now):
                raise Refused(400, "Cannot cancel a synchronous response.", "response_id")
            message = f"Cannot cancel a response that is {swap.now.status}."
            raise Refused(400, message, "response_id")
        return document(swap.now)

    async def delete(self, who: str, response_id: str) -> bytes:
        """Delete a response, and stop it where it runs.

        Raises:
            Refused: there is none.
            StoreUnavailable: the store is down.
        """
        if not await self.store.delete(who, response_id):
            raise wire.not_found(response_id)
        self.stop(response_id)
        return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})

    def stop(self, response_id: str) -> None:
        """End a run at once if it is this process's; elsewhere it is noticed within a beat."""
        if held := self.runs.get(response_id):
            held[1].cancel()
        self.store.tell(response_id)

    async def page(self, who: str, query: Query) -> bytes:
        """Part of the responses as a list.

        Raises:
            CursorUnknown: ``after`` or ``before`` is none of them.
            StoreUnavailable: the store is down.
        """
        page = await self.store.page(who, query)
        ids = [each.id for each in page.responses]
        return wire.listed([document(each) for each in page.responses], ids, more=page.more)

    async def input_items(
        self, who: str, response_id: str, *, after: str | None, limit: int, descending: bool
    ) -> bytes:
        """Part of what a turn added to its conversation, as a list.

        Raises:
            Refused: there is no such response, or no such item.
            StoreUnavailable: the store is down.
        """
        found = await self.store.get(who, response_id)
        if found is None:
            raise wire.not_found(response_id)
        return wire.items(found, after=after, limit=limit, descending=descending)


def owner(raw_request: Request) -> str:
    """A hash of the API key that a request came with, empty where the server has none."""
    keys = raw_request.app.state.args.api_key or [envs.VLLM_API_KEY]
    if not any(keys):
        return ""
    key = raw_request.headers.get("Authorization", "").partition(" ")[2]
    return owner_of(key)


def response_before(request: Any) -> Any:
    """What a request has as ``previous_response``, of which vLLM knows nothing, or None."""
    return (request.model_extra or {}).get(carried.PREVIOUS)


def hides(item: Any) -> bool:
    """Whether something in an item, as vLLM reads it, is encrypted."""
    if isinstance(item, dict):
        return bool(carried.encrypted(item))
    return bool(getattr(item, "encrypted_content", None))


def check_one(request: Any, brought: Brought | None, *, wants: bool) -> None:
    """See that a conversation comes in one way only.

    Raises:
        Refused: it comes in two.
    """
    if brought and request.previous_response_id is not None:
        other = (
            "previous_response"
            if response_before(request) is not None
            else "a carrier in the input"
        )
        message = f"previous_response_id can't be used with {other}: give one of them"
        raise Refused(400, message, "previous_response_id")
    if (brought or wants) and request.previous_input_messages:
        message = "previous_input_messages can't be carried: give them as items of the input"
        raise Refused(400, message, "previous_input_messages")


def appended(item: Any, output: list[Any], number: int) -> list[Frame]:
    """Put an item behind an answer's, and the events that tell of it.

    Args:
        item: the item.
        output: the answer's items.
        number: the sequence number of the first event.
    """
    index = len(output)
    output.append(item)
    begun = item.model_copy(update={"encrypted_content": None, "status": "in_progress"})
    events = (
        ResponseOutputItemAddedEvent(
            type="response.output_item.added",
            item=begun,
            output_index=index,
            sequence_number=number,
        ),
        ResponseOutputItemDoneEvent(
            type="response.output_item.done",
            item=item,
            output_index=index,
            sequence_number=number + 1,
        ),
    )
    return [Frame(event.type, dump(event)) for event in events]


def dump(model: Any) -> bytes:
    """Something of vLLM's as JSON."""
    text: str = model.model_dump_json(by_alias=True)
    return text.encode()


def failure(response: Any, number: int, message: str) -> Frame:
    """The event that ends a stream whose response, as it began, came to nothing."""
    if response is None:
        return wire.trouble(number, message)
    body = response.model_dump(mode="json", by_alias=True)
    return wire.terminal("failed", number, wire.failed(body, message))
