"""vLLM's serving of the Responses API, with the store instead of vLLM's three dicts.

vLLM makes the answers. The dicts that vLLM writes to keep nothing here; what vLLM reads from them
comes from the store. A client gets a response only after the store has it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
)
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request
from msgspec.structs import replace
from openai.types.responses import (
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseReasoningItem,
)
from starlette.requests import HTTPConnection

from ...keys.ring import Ring
from ...store.backend import (
    EVERYBODY,
    ConversationBroken,
    Response,
    StoreUnavailable,
    owner_of,
)
from ...store.ids import valid
from ...store.settings import Carriers, Format, Sockets
from ...store.store import ResponseStore, document
from .. import tracing
from ..adapters import responses as adapter
from ..adapters.responses import ErrorResponse, GenerationError, ResponsesResponse
from ..gate import gate
from ..log import log
from . import (
    carried,
    compaction,
    fields,
    parameters,
    sealing,
    tokens,
    truncation,
    websocket,
    wire,
)
from .background import Runs
from .carried import Brought, Item
from .conversations import ConversationTurns, named, named_in
from .fields import dump
from .history import History, legible
from .parsing import messages, parsed
from .stored import Stored
from .turn import Turn, current, hides_any, working
from .wire import Frame, Refused
from .writer import Writer

FAILED = "The generation failed."
# In a copy of a request whose input has the turns before it already, and is counted as it is. Where
# it is too long, nobody is to free the blocks that another server has filled for the request.
ALONE = {"previous_response_id": None, "truncation": "disabled", "kv_transfer_params": None}
# The parameters that vLLM may not know.
KNOWN = parameters.PARAMETERS.keys() | {carried.PREVIOUS}


class Nothing(dict[str, Any]):
    """Replaces a dict of vLLM's and keeps nothing."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Drop it."""


class Previous(Nothing):
    """The dict in which vLLM looks up the previous response, and stores the new one."""

    def get(self, key: str, default: Any = None) -> Any:
        """The history of the current turn; the default for any other key."""
        turn = current.get()
        if turn and turn.history is not None and key == turn.request.previous_response_id:
            return turn.history
        return default

    def __setitem__(self, key: str, value: Any) -> None:
        if turn := current.get():
            turn.latest = value


class StoredResponses(adapter.Serving):  # type: ignore[misc]
    """vLLM's serving class, with a store."""

    # `routes.install` sets these on the class, because vLLM makes the instance.
    open_store: Callable[[], ResponseStore]
    ring: Callable[[], Ring | None]
    carriers = Carriers()
    sockets = Sockets()
    compaction_prompt = compaction.PROMPT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store = type(self).open_store()
        self.enable_store = True
        self.response_store = Previous()
        self.msg_store = Nothing()
        self.event_store = Nothing()
        self.history = History(parsed, harmony=self.use_harmony)
        self.counts = False
        if renderer := adapter.renderer(self):
            renderer.preprocess_chat = tokens.unsent(renderer.preprocess_chat)
            self.counts = True
        self.conversations = ConversationTurns(self.store)
        self.runs = Runs(self)
        self.stored = Stored(self.store, self.conversations, self.runs.stop)

    async def close(self) -> None:
        """End what runs, and close the store."""
        gate.ending = None  # it would keep vLLM's engine client until the interpreter has ended
        await self.runs.end()
        await self.store.close()

    # Making a response

    async def create(
        self, request: Any, raw_request: Request
    ) -> bytes | AsyncIterator[Frame] | ErrorResponse:
        """Answer a request, and store the answer if the request asks for it.

        Args:
            request: vLLM's ResponsesRequest.
            raw_request: the HTTP request.

        Returns:
            A response as JSON, a stream, or vLLM's error.

        Raises:
            Refused: the request is invalid.
            StoreUnavailable: the store is down, and the response is not stored.
        """
        turn = await self._with_kv_transfer_rejection_cleanup(
            self.accept(request, raw_request), request, raw_request
        )
        try:
            return await self.answer(turn, request, raw_request)
        except adapter.INVALID as error:
            if name := adapter.PARAMETERS.get(getattr(error, "parameter", None) or ""):
                raise Refused(400, f"{name} is invalid: {error}", name) from error
            raise
        finally:
            if turn and not turn.goes_on:
                await self.conversations.release(turn)

    async def accept(self, request: Any, raw_request: Request) -> Turn | None:
        """Check a request, and collect what it needs; else as `create` and `turn`."""
        await self.check_parameters(request, raw_request)
        if parameters.prewarms(request):
            request.max_output_tokens = 1  # vLLM's least
        if response_before(request) is not None:
            if request.background:
                message = (
                    "background can't be used with previous_response, because nothing is stored"
                )
                raise Refused(400, message, "background")
            request.store = False
        threshold = self.threshold(request)
        if request.background and not request.store:
            raise Refused(400, "background can only be used when store is true", "background")
        turn = await self.turn(request, raw_request, compacts=threshold is not None)
        if turn:
            turn.threshold = threshold
        return turn

    async def answer(
        self, turn: Turn | None, request: Any, raw_request: Request
    ) -> bytes | AsyncIterator[Frame] | ErrorResponse:
        """Answer a request, once all that it needs is collected; else as `create`."""
        with working(turn):
            answer = await self.create_responses(request, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if turn and request.background:
            run = await self.runs.accept(turn, self.store.create, await raw_request.body())
            return self.stored.follow(run.owner, run.id) if request.stream else document(run)
        if not isinstance(answer, ResponsesResponse):
            if turn:
                turn.goes_on = True
            return self.streamed(turn, request, answer)
        if parameters.prewarms(request):
            fields.silence(answer)
        if item := await self.seal(turn, answer):
            answer.output.append(item)
        return await self.kept(turn, fields.fill(answer, request))

    async def check_parameters(self, request: Any, raw_request: Request) -> None:
        """Check that each parameter of a request works.

        Raises:
            Refused: there is no such parameter, or it can't do what the request asks for; or the
                request has what is no text.
        """
        wire.check_text(await raw_request.body())
        if request.model_extra and (unknown := request.model_extra.keys() - KNOWN):
            raise Refused(400, f"Unknown parameter: {min(unknown)!r}.", min(unknown))
        parameters.check(
            request,
            tool_server=self.tool_server is not None,
            tool_parser=adapter.calls_tools(self),
        )

    async def count(self, request: Any, raw_request: Request) -> bytes | ErrorResponse:
        """Count the tokens of what a request adds to its conversation and of all before it.

        Args:
            request: a `tokens.CountRequest`.
            raw_request: the HTTP request.

        Returns:
            The count as JSON, or vLLM's error.

        Raises:
            Refused: the request is invalid, or this vLLM can't render without an answer.
            StoreUnavailable: the store is down.
        """
        await self.check_parameters(request, raw_request)
        tokens.only_input(request)
        turn = await self.turn(request, raw_request, adds=False)
        with working(turn):
            counted = await self.counted(request)
        return counted if isinstance(counted, ErrorResponse) else tokens.document(counted)

    async def counted(self, request: Any) -> tokens.Counted | ErrorResponse:
        """The tokens of a request's input, or vLLM's error where it would answer with one.

        Raises:
            Refused: this vLLM can't render without an answer.
        """
        if not self.counts:
            raise Refused(501, "This version of vLLM can't count the tokens of an input.")
        with tokens.counting():
            answer: tokens.Counted | ErrorResponse = await self.create_responses(request, None)
        return answer

    def _validate_generator_input(self, engine_input: Any, *args: Any, **options: Any) -> Any:
        """What vLLM does last before the engine gets a request."""
        error = super()._validate_generator_input(engine_input, *args, **options)
        if error is None and tokens.counts():
            return tokens.Counted(self._extract_prompt_len(engine_input))
        return error

    # Compaction

    def threshold(self, request: Any) -> int | None:
        """From how many tokens on a request wants its conversation compacted; None if it does not.

        Raises:
            Refused: it asks for it in a wrong way, or this server can't seal a compaction.
        """
        tokens_ = compaction.threshold(request, self.model_config.max_model_len)
        if tokens_ is not None:
            sealing.check_can_seal(self.ring())
        return tokens_

    async def compact(self, request: Any, raw_request: Request) -> bytes | ErrorResponse:
        """Compact a conversation.

        Args:
            request: a `tokens.CompactRequest`.
            raw_request: the HTTP request.

        Returns:
            The user's messages and a compaction item as JSON, or vLLM's error.

        Raises:
            Refused: the request is invalid, or this server can't seal a compaction.
            StoreUnavailable: the store is down.
        """
        await self.check_parameters(request, raw_request)
        compaction.check_parameters(await raw_request.body())
        sealing.check_can_seal(self.ring())
        tokens.only_input(request)
        turn = await self.turn(request, raw_request, compacts=True)
        assert turn
        with working(turn):
            error: ErrorResponse | None = await self._check_model(request)
        if error is not None:
            return error
        if not turn.conversation:
            raise Refused(400, "There is no conversation to compact.", "input")
        before = turn.conversation
        usage = await self.shorten(turn)
        return compaction.document(before, turn.compaction, usage, turn.began)

    async def shorten(self, turn: Turn) -> compaction.Usage:
        """Compact the conversation of a turn; returns what the summary took.

        Raises:
            Refused: it can't be summarized or sealed.
        """
        same = compaction.asked(turn.request, self.model_config.max_model_len)

        def request(words: list[Item]) -> Any:
            given = {**same, "input": list(map(adapter.detailed, words))}
            return adapter.ResponsesRequest.model_validate(given)

        async def answer(words: list[Item]) -> Any:
            made = await self.create_responses(request(words), None)
            if isinstance(made, ErrorResponse):
                raise Refused(made.error.code, made.error.message, made.error.param)
            return made

        async def fits(words: list[Item]) -> bool:
            return await self.fits(request(words))

        with working(None):
            items, usage = await compaction.compacted(
                answer, fits, turn.conversation, self.compaction_prompt
            )
        text = await sealing.sealed(
            items,
            sum(len(carried.text_of(item.get("content") or "")) for item in items),
            self.carriers._replace(format=Format.V2),
            self.ring(),
            model=self.models.model_name(self._maybe_get_adapters(turn.request)),
            owner=turn.owner,
        )
        if text is None:
            sealing.check_can_seal(None)
        turn.conversation = items
        turn.compaction = compaction.sealed_item(text or "")
        return usage

    async def fits(self, request: Any) -> bool:
        """Whether vLLM would accept a request."""
        try:
            return isinstance(await self.counted(request), tokens.Counted)
        except (Refused, *adapter.INVALID):
            return False

    async def compact_beyond(self, turn: Turn, threshold: int) -> None:
        """Compact the conversation of a turn if it has more tokens than a threshold.

        Raises:
            Refused: it can't be summarized or sealed.
        """
        request = turn.request.model_copy(update=ALONE)
        with working(None):
            try:
                found = await self.counted(request)
                many = found.tokens if isinstance(found, tokens.Counted) else None
            except adapter.INVALID:
                many = None  # too long for the model
            if many is not None and many <= threshold:
                return
            before = turn.conversation
            await self.shorten(turn)
            request.input = parsed(compaction.joined(turn.conversation))
            if many is not None and not await self.fits(request):
                turn.conversation, turn.compaction = before, None
                return
        turn.request.input = request.input

    async def truncate(self, request: Any) -> None:
        """Drop the oldest items of an input that is too long for the model."""
        whole = request.input
        plain = request.model_copy(update=ALONE)

        async def fits(items: list[Any]) -> bool:
            return await self.fits(plain.model_copy(update={"input": items}))

        with working(None):
            if isinstance(whole, list) and not await fits(whole):
                request.input = await truncation.fitting(whole, fits) or whole

    async def turn(
        self, request: Any, raw_request: Request, *, compacts: bool = False, adds: bool = True
    ) -> Turn | None:
        """Collect what a request needs before vLLM begins; None if neither store nor carrier is.

        Args:
            request: vLLM's ResponsesRequest.
            raw_request: the HTTP request.
            compacts: whether its conversation may be compacted.
            adds: whether its turn is added to the conversation that it names.

        Raises:
            Refused: the id is not available, the turn before this one can't be continued, or a
                carrier is missing, or one too many.
            StoreUnavailable: the store is down.
        """
        response = response_before(request)
        previous = request.previous_response_id
        if request.store and previous is not None and websocket.remembered(previous):
            message = "store must be false: the previous response is not stored"
            raise Refused(400, message, "store")
        hidden = hides_any(request)
        conversation = named(request)
        sealed = conversation is None and self.asks_for_carrier(request)
        before = (previous, response, conversation)
        continues = any(given is not None for given in before)
        if conversation is not None and compacts:
            message = "context_management can't be used with conversation"
            raise Refused(400, message, "context_management")
        wanted = request.store or hidden or sealed or compacts or websocket.on_socket()
        if not (wanted or continues):
            return None
        items = wire.added(await raw_request.body())
        brought = None
        if hidden or response is not None:
            brought = carried.brought(wire.ITEMS.decode(items), response)
        check_one(request, brought, conversation, sealed=sealed)
        who = owner(raw_request)
        await self.check_id(request, conversation)
        if request.store and self.store.refuses:  # rather than generate for nothing
            await self.store.get(EVERYBODY, request.request_id)
        turn = Turn(
            request,
            who,
            items,
            history=await self.earlier(who, request.previous_response_id),
            hidden=hidden,
            brought=brought,
            sealed=sealed,
            compacts=compacts,
        )
        if conversation is not None:
            await self.conversations.begin(turn, conversation, adds=adds)
        return turn

    def asks_for_carrier(self, request: Any) -> bool:
        """Whether a request asks for a carrier and this server can seal one."""
        asks = not request.store and carried.INCLUDE in (request.include or ())
        return asks and sealing.can_seal(self.ring())

    async def check_id(self, request: Any, conversation: str | None) -> None:
        """Check the id that a request chooses for its response, where it chooses one.

        Args:
            request: vLLM's ResponsesRequest.
            conversation: the one that it names, which is held in the name of that id.

        Raises:
            Refused: it is malformed, or another response has it.
            StoreUnavailable: the store is down.
        """
        reaches_the_store = request.store or conversation is not None
        if not reaches_the_store or "request_id" not in request.model_fields_set:
            return
        if not valid(request.request_id) or "/" in request.request_id:
            raise Refused(400, "request_id can't be the id of a response", "request_id")
        if request.store and await self.store.get(EVERYBODY, request.request_id):
            raise wire.taken(request.request_id)

    async def earlier(self, who: str, response_id: str | None) -> list[Response] | None:
        """The turns up to a response, oldest first; None if no response is named.

        Raises:
            Refused: there is no such response, part of its conversation is missing, or it is still
                running.
            StoreUnavailable: the store is down.
        """
        if response_id is None:
            return None
        if history := websocket.remembered(response_id):
            return history
        try:
            history = await self.store.conversation(who, response_id)
        except ConversationBroken as error:
            raise Refused(404, f"{error.message}.", "previous_response_id") from error
        if not history:
            raise wire.not_found(response_id, "previous_response_id")
        if history[-1].running:
            message = f"Response with id '{response_id}' is still {history[-1].status}."
            raise Refused(400, message, "previous_response_id")
        return history

    def responses_stream_generator(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        """VLLM's events, in every version with the same ids from the first to the last."""
        events = adapter.agreeing(super().responses_stream_generator(*args, **options))
        turn = current.get()
        if turn and turn.compaction:
            return compaction.announced(events, turn.compaction)
        return events

    async def responses_full_generator(self, *args: Any, **options: Any) -> Any:
        """VLLM's answer, after the item of a compaction; a stream's gets it with its events."""
        answer = await super().responses_full_generator(*args, **options)
        turn = current.get()
        item = turn and not turn.request.stream and turn.compaction
        if item and isinstance(answer, ResponsesResponse):
            answer.output.insert(0, item)
        return answer

    async def _check_model(self, request: Any, *args: Any, **options: Any) -> Any:
        """What vLLM does first with a request, and the only step that every version awaits."""
        error = await super()._check_model(request, *args, **options)
        if error is None:
            with rendering():
                if (turn := current.get()) and turn.rehydrates:
                    with tracing.span("rehydrate", {"turns": len(turn.history or ())}) as add:
                        await self.resolve(turn)
                        add(tracing.size(turn.history))
                if isinstance(request.input, list):
                    request.input = [item for item in request.input if not wire.silent(item)]
            if not (request.input or request.input == "" or request.instructions):
                raise Refused(400, "The input is empty.", "input")
            if turn and turn.threshold is not None:
                await self.compact_beyond(turn, turn.threshold)
            if request.truncation == "auto" and self.counts:
                await self.truncate(request)
        return error

    async def _get_trace_headers(self, headers: Any) -> Any:
        """Put vLLM's span of a request below ours."""
        return tracing.headers() or await super()._get_trace_headers(headers)

    async def resolve(self, turn: Turn) -> None:
        """Put the turns before this one into the input of its request.

        As the items that they were, so vLLM needs no earlier messages: it renders tool calls and
        reasoning as if the client had sent them again.

        Raises:
            Refused: the carrier is not accepted, or the conversation is too large for the
                answer's carrier.
        """
        size = len(turn.items)
        items = wire.ITEMS.decode(turn.items)
        if turn.held:
            before = await self.history.of_entries(turn.held.entries)
            turn.held.entries = ()
        else:
            before = await self.history.of(turn.history or (), partial(self.reopened, turn))
        history, kept = await self.merged(turn, items)
        added = [(n, item) for n in kept if (item := carried.readable(items[n]))]
        if history or turn.hidden:
            turn.items = wire.ENCODE([*history, *(item for _, item in added)])
        readable = legible(history)
        if before.items or readable or turn.hidden:
            later = as_parsed(turn.request.input, items, added)
            turn.request.input = [*before.parsed, *parsed(readable), *later]
        turn.conversation = [*before.items, *readable, *(item for _, item in added)]
        wire.check_outputs([item for _, item in added], turn.conversation)
        if any(map(compaction.summarizes, turn.conversation)):
            turn.request.input = parsed(compaction.joined(turn.conversation))
        if turn.sealed:
            size += before.size
            if turn.brought:
                size += sealing.COMPRESSION * len(turn.brought.text)
            turn.size = await sealing.checked(turn.conversation, size)

    async def reopened(self, turn: Turn, text: str) -> list[Item] | None:
        """What a stored compaction item holds; None if it can't be opened any more."""
        try:
            return await self.unsealed(turn, Brought(text, -1, "previous_response_id"))
        except Refused as error:
            log.warning("vllmops: the turns before a compaction are read again: %s", error)
            return None

    async def merged(self, turn: Turn, items: list[Item]) -> tuple[list[Item], list[int]]:
        """What the carrier of a turn holds, and the indices of the items that are not in it.

        Args:
            turn: which may have no carrier.
            items: of the request's input.

        Raises:
            Refused: the carrier is not accepted.
        """
        if not turn.brought:
            return [], list(range(len(items)))
        history = await self.unsealed(turn, turn.brought)
        return carried.merge(history, items, turn.brought.at)

    async def unsealed(self, turn: Turn, brought: Brought) -> list[Item]:
        """What a carrier holds; raises `Refused` where it is not one for this turn."""
        model = self.models.model_name(self._maybe_get_adapters(turn.request))
        return await sealing.opened(brought, self.ring(), model=model, owner=turn.owner)

    async def seal(self, turn: Turn | None, response: Any) -> Any:
        """The item with the carrier of a conversation and its answer; None if none is wanted.

        Raises:
            Refused: the conversation is too large.
        """
        if not (turn and turn.sealed):
            return None
        output = [item.model_dump(mode="json", by_alias=True) for item in response.output]
        answer = map(carried.lean, wire.spoken(output, harmony=self.use_harmony))
        history: list[Any] = [*turn.conversation, *answer]
        if self.carriers.format is Format.SIGNED_V1:
            history = messages(history)
        text = await sealing.sealed(
            history,
            turn.size,
            self.carriers,
            self.ring(),
            model=response.model,
            owner=turn.owner,
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
        """A finished response as JSON, after it is stored where the request asks for that.

        Raises:
            Refused: another response has taken its id meanwhile.
            StoreUnavailable: it could not be stored.
        """
        body = dump(named_in(response, turn))
        stored = turn.stored(response, body) if turn and turn.request.store else None
        done = True
        if turn and turn.held:
            done = await self.conversations.finish(turn, stored, body, new=True)
        elif stored:
            done = await self.store.create(stored)
        elif turn and websocket.on_socket():
            packed = await self.store.packed(turn.stored(response, body))
            websocket.remember([*(turn.history or ()), packed])
        if not done:
            raise wire.taken(response.id)
        return body

    async def streamed(
        self, turn: Turn | None, request: Any, events: AsyncGenerator[Any, None]
    ) -> AsyncIterator[Frame]:
        """A foreground stream, with a final event in every case."""
        response, number, failed = None, -1, None
        try:
            async for event in events:
                if event.type in adapter.ENDS:
                    websocket.prepared(event.response)
                fields.fill_event(event, request)
                number = event.sequence_number
                if event.type in adapter.ENDS:
                    if item := await self.seal(turn, event.response):
                        for frame in appended(item, event.response.output, number):
                            yield frame
                            number += 1
                    body = await self.kept(turn, event.response)
                    yield wire.terminal(event.response.status, number, body)
                    return
                if event.type in wire.BEGINNINGS:
                    response = named_in(event.response, turn)
                yield Frame(event.type, dump(event))
        except Refused as error:
            failed = failure(response, number, error.message)
        except StoreUnavailable as error:
            failed = failure(response, number, f"The response is not stored: {error.message}")
        except Exception as error:
            log.exception("vllmops: a stream failed: %r", error)
            failed = failure(response, number + 1, self.why(error))
        finally:
            await self.conversations.release(turn)
        if failed:
            yield failed

    def why(self, error: Exception) -> str:
        """The message that vLLM would send for an error that occurs after the stream began."""
        cause = error.__context__ if isinstance(error.__context__, GenerationError) else error
        message: str = self.create_error_response(cause).error.message
        return message or FAILED

    async def _run_background_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        async def work(run: Response) -> Response:
            answer = await self.responses_full_generator(request, *args, **kwargs)
            if isinstance(answer, ErrorResponse):
                return replace(run, status="failed", error=answer.error.message)
            body = dump(named_in(fields.fill(answer, request), current.get()))
            return replace(run, status=answer.status, body=body)

        await self.runs.carry_out(work)

    async def _run_background_request_stream(self, request: Any, *args: Any, **kwargs: Any) -> None:
        turn = current.get()
        first = turn.first if turn else 0

        async def work(run: Response) -> Response:
            async with Writer(self.store, run) as writer:
                async for event in self.responses_stream_generator(request, *args, **kwargs):
                    fields.fill_event(event, request)
                    if event.type in adapter.ENDS:
                        # Followers read the final event from the stored response.
                        body = dump(named_in(event.response, turn))
                        return replace(run, status=event.response.status, body=body)
                    if event.type in wire.BEGINNINGS:
                        named_in(event.response, turn)
                    event.sequence_number += first
                    writer.add(event.sequence_number, dump(event))
            return replace(run, status="failed", error=FAILED)

        await self.runs.carry_out(work)


@contextmanager
def rendering() -> Iterator[None]:
    """Refuse an input that can't be rendered: a valid but empty item, for which vLLM answers 500.

    Raises:
        Refused: instead of the errors that vLLM raises then.
    """
    try:
        yield
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
        log.warning("vllmops: an input can't be rendered: %r", error)
        raise Refused(400, "The input can't be rendered.", "input") from error


def without_previous(render: Callable[..., Any]) -> Callable[..., Any]:
    """One of vLLM's `adapter.RENDERERS`, without a previous response: the input has all turns."""

    @functools.wraps(render)
    def render_all(self: Any, request: Any, _: Any, *args: Any, **options: Any) -> Any:
        with rendering():
            return render(self, request, None, *args, **options)

    @functools.wraps(render)
    async def await_all(self: Any, request: Any, _: Any, *args: Any, **options: Any) -> Any:
        with rendering():
            return await render(self, request, None, *args, **options)

    return await_all if inspect.iscoroutinefunction(render) else render_all


for _name in adapter.RENDERERS:
    setattr(StoredResponses, _name, without_previous(getattr(adapter.Serving, _name)))


def owner(raw_request: HTTPConnection) -> str:
    """A hash of the API key of a request, empty if the server requires none."""
    keys = raw_request.app.state.args.api_key or [adapter.api_key()]
    if not any(keys):
        return ""
    key = raw_request.headers.get("Authorization", "").partition(" ")[2]
    return owner_of(key)


def response_before(request: Any) -> Any:
    """The ``previous_response`` of a request, which vLLM does not know; None if it has none."""
    return (request.model_extra or {}).get(carried.PREVIOUS)


def as_parsed(given: Any, items: list[Item], added: list[tuple[int, Item]]) -> list[Any]:
    """The new items of a request as vLLM reads them.

    Args:
        given: the input as vLLM has read it.
        items: of the input.
        added: the index and the readable part of each new one.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [given[n] if item is items[n] else parsed([item])[0] for n, item in added]


def check_one(
    request: Any, brought: Brought | None, conversation: str | None, *, sealed: bool
) -> None:
    """Check that a request gives its conversation in one way only.

    Raises:
        Refused: it gives it in two.
    """
    if brought and conversation is not None:
        message = "conversation can't be used with a carrier: send only one of them"
        raise Refused(400, message, "conversation")
    if brought and request.previous_response_id is not None:
        other = (
            "previous_response"
            if response_before(request) is not None
            else "a carrier in the input"
        )
        message = f"previous_response_id can't be used with {other}: send only one of them"
        raise Refused(400, message, "previous_response_id")
    if (brought or sealed) and request.previous_input_messages:
        message = "previous_input_messages can't be in a carrier: send them as items of the input"
        raise Refused(400, message, "previous_input_messages")


def appended(item: Any, output: list[Any], number: int) -> list[Frame]:
    """Append an item to an answer; the events that announce it.

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


def failure(response: Any, number: int, message: str) -> Frame:
    """The event that ends a stream that failed.

    Args:
        response: as it was when the stream began, None if it never began.
        number: the sequence number.
        message: what went wrong.
    """
    if response is None:
        return wire.error_event(number, message)
    body = response.model_dump(mode="json", by_alias=True)
    return wire.terminal("failed", number, wire.failed(body, message))
