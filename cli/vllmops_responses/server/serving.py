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
    Collection,
    Iterator,
    Sequence,
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

from vllmops.agent.hooks.request_gate import gate
from vllmops.agent.log import log
from vllmops.model.environment import CarrierFormat
from vllmops.model.owners import derive_owner

from ..keys.keyring import KeyRing
from ..store.backend import EVERYBODY, ConversationBroken, Response, StoreUnavailable
from ..store.ids import is_valid_id
from ..store.response_store import ResponseStore, encode_response
from ..store.settings import CarrierSettings, WebSocketLimits
from . import request_parameters, response_fields, tracing, vllm_interface, wire_format
from .background.background_runs import BackgroundRuns
from .background.event_writer import EventWriter
from .carriers import carrier_merge, carrier_sealing, compaction
from .carriers.carrier_merge import Item, RequestCarrier
from .conversations import token_count, truncation
from .conversations.conversation_turns import (
    ConversationTurns,
    parse_conversation_parameter,
    set_response_conversation,
)
from .conversations.socket_request import (
    clear_unwanted_output,
    find_remembered_history,
    is_websocket_request,
    remember_history,
)
from .conversations.turn import Turn, current, has_encrypted_items, set_current_turn
from .conversations.turn_history import HistoryReader, extract_readable_parts
from .item_conversion import convert_items_to_messages, parse_items
from .item_rendering import TRIGGER, is_reference
from .response_fields import encode_model
from .stored_responses import StoredResponsesApi
from .vllm_interface import ErrorResponse, GenerationError, ResponsesResponse
from .wire_format import AbortError, ApiError, EncodedEvent, encode_sse

FAILED, CUT_OFF = "The generation failed.", "The server was stopped."
# In a copy of a request whose input has the turns before it already, and is counted as it is. Where
# it is too long, nobody is to free the blocks that another server has filled for the request.
ALONE = {"previous_response_id": None, "truncation": "disabled", "kv_transfer_params": None}


class DiscardingDict(dict[str, Any]):
    """Replaces a dict of vLLM's and keeps nothing."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Drop it."""


class PreviousResponseDict(DiscardingDict):
    """The dict in which vLLM looks up the previous response, and stores the new one."""

    def get(self, key: str, default: Any = None) -> Any:
        """The history of the current turn; the default for any other key."""
        turn = current.get()
        if turn and turn.history is not None and key == turn.request.previous_response_id:
            return turn.history
        return default

    def __setitem__(self, key: str, value: Any) -> None:
        if turn := current.get():
            turn.latest_response = value


class StoreBackedServing(vllm_interface.Serving):  # type: ignore[misc]
    """vLLM's serving class, with a store."""

    # `routes.install_routes` sets these on the class, because vLLM makes the instance.
    open_store: Callable[[], ResponseStore]
    get_keyring: Callable[[], KeyRing | None]
    carriers = CarrierSettings()
    sockets = WebSocketLimits()
    compaction_prompt = compaction.PROMPT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store = type(self).open_store()
        self.enable_store = True
        self.response_store = PreviousResponseDict()
        self.msg_store = DiscardingDict()
        self.event_store = DiscardingDict()
        self.history = HistoryReader(parse_items, harmony=self.use_harmony)
        self.counts = False
        if renderer := vllm_interface.find_renderer(self):
            renderer.preprocess_chat = token_count.skip_cache_while_counting(
                renderer.preprocess_chat
            )
            self.counts = True
        self.conversations = ConversationTurns(self.store)
        self.runs = BackgroundRuns(self)
        self.stored_responses = StoredResponsesApi(
            self.store, self.conversations, self.runs.stop_run
        )

    async def close(self) -> None:
        """End what runs, and close the store."""
        gate.ending = None  # it would keep vLLM's engine client until the interpreter has ended
        await self.runs.shut_down()
        await self.store.close()

    # Making a response

    async def answer_create_request(
        self, request: Any, raw_request: Request
    ) -> bytes | AsyncIterator[EncodedEvent] | ErrorResponse:
        """Answer a request, and store the answer if the request asks for it.

        Args:
            request: vLLM's ResponsesRequest.
            raw_request: the HTTP request.

        Returns:
            A response as JSON, a stream, or vLLM's error.

        Raises:
            ApiError: the request is invalid.
            StoreUnavailable: the store is down, and the response is not stored.
        """
        turn = await self._with_kv_transfer_rejection_cleanup(
            self.prepare_turn(request, raw_request), request, raw_request
        )
        try:
            return await self.answer_turn(turn, request, raw_request)
        except vllm_interface.INVALID as error:
            if name := vllm_interface.PARAMETERS.get(getattr(error, "parameter", None) or ""):
                raise ApiError(400, f"{name} is invalid: {error}", name) from error
            raise
        finally:
            if turn and not turn.goes_on:
                await self.conversations.release_turn(turn)

    async def prepare_turn(self, request: Any, raw_request: Request) -> Turn | None:
        """Check a request, collect what it needs; as `answer_create_request`, `build_turn`."""
        await self.validate_request(request, raw_request)
        if request_parameters.is_prewarm_request(request):
            request.max_output_tokens = 1  # vLLM's least
        if get_previous_response(request) is not None:
            if request.background:
                message = (
                    "background can't be used with previous_response, because nothing is stored"
                )
                raise ApiError(400, message, "background")
            request.store = False
        if compaction.is_triggered(request):
            return await self.prepare_compaction(request, raw_request)
        threshold = self.find_compact_threshold(request)
        if threshold is None and request_parameters.get_parameter(request, compaction.FIELD):
            raw_request.state.ignored.append(compaction.FIELD)
        if request.background and not request.store:
            raise ApiError(400, "background can only be used when store is true", "background")
        turn = await self.build_turn(request, raw_request, compacts=threshold is not None)
        if turn:
            turn.threshold = threshold
        return turn

    async def answer_turn(
        self, turn: Turn | None, request: Any, raw_request: Request
    ) -> bytes | AsyncIterator[EncodedEvent] | ErrorResponse:
        """Answer a request whose needs are collected; else as `answer_create_request`."""
        if turn and turn.is_compaction:
            return await self.answer_with_compaction(turn, request)
        with set_current_turn(turn):
            answer = await self.create_responses(request, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if turn and request.background:
            run = await self.runs.accept_run(turn, self.store.create, await raw_request.body())
            return (
                self.stored_responses.follow_events(run.owner, run.id)
                if request.stream
                else encode_response(run)
            )
        if not isinstance(answer, ResponsesResponse):
            if turn:
                turn.goes_on = True
            return self.stream_response(turn, request, answer)
        if request_parameters.is_prewarm_request(request):
            response_fields.clear_output(answer)
        if item := await self.build_carrier_item(turn, answer):
            answer.output.append(item)
        return await self.store_response(turn, response_fields.fill_response(answer, request))

    async def validate_request(
        self, request: Any, raw_request: Request, without_effect: Collection[str] = ()
    ) -> None:
        """Check a request's parameters, and note for its answer those that have no effect.

        Args:
            request: vLLM's ResponsesRequest.
            raw_request: the HTTP request, which gets the names.
            without_effect: names that are known to be among them.

        Raises:
            ApiError: one can't do what the request asks for; or the request has what is no text.
        """
        wire_format.validate_utf8(await raw_request.body())
        request_parameters.validate_parameters(
            request, tool_parser=vllm_interface.can_parse_tool_calls(self)
        )
        raw_request.state.ignored = request_parameters.list_ignored_parameters(
            request, without_effect, tool_server=self.use_harmony and self.tool_server is not None
        )

    async def answer_count_request(
        self, request: Any, raw_request: Request
    ) -> bytes | ErrorResponse:
        """Count the tokens of what a request adds to its conversation and of all before it.

        Args:
            request: a `token_count.CountRequest`.
            raw_request: the HTTP request.

        Returns:
            The count as JSON, or vLLM's error.

        Raises:
            ApiError: the request is invalid, or this vLLM can't render without an answer.
            StoreUnavailable: the store is down.
        """
        await self.validate_request(request, raw_request)
        token_count.reduce_to_input(request)
        turn = await self.build_turn(request, raw_request, adds=False)
        with set_current_turn(turn):
            counted = await self.count_input_tokens(request)
        return (
            counted
            if isinstance(counted, ErrorResponse)
            else token_count.encode_token_count(counted)
        )

    async def count_input_tokens(self, request: Any) -> token_count.TokenCount | ErrorResponse:
        """The tokens of a request's input, or vLLM's error where it would answer with one.

        Raises:
            ApiError: this vLLM can't render without an answer.
        """
        if not self.counts:
            raise ApiError(501, "This version of vLLM can't count the tokens of an input.")
        with token_count.count_only():
            answer: token_count.TokenCount | ErrorResponse = await self.create_responses(
                request, None
            )
        return answer

    def _validate_generator_input(self, engine_input: Any, *args: Any, **options: Any) -> Any:
        """What vLLM does last before the engine gets a request."""
        error = super()._validate_generator_input(engine_input, *args, **options)
        if error is None and token_count.is_count_only():
            return token_count.TokenCount(self._extract_prompt_len(engine_input))
        return error

    # Compaction

    def find_compact_threshold(self, request: Any) -> int | None:
        """From how many tokens on a request gets its conversation compacted; None if never."""
        wanted = compaction.parse_compact_threshold(request, self.model_config.max_model_len)
        return wanted if wanted and carrier_sealing.can_seal(self.get_keyring()) else None

    async def answer_compact_request(
        self, request: Any, raw_request: Request
    ) -> bytes | ErrorResponse:
        """Compact a conversation.

        Args:
            request: a `token_count.CompactRequest`.
            raw_request: the HTTP request.

        Returns:
            The user's messages and a compaction item as JSON, or vLLM's error.

        Raises:
            ApiError: the request is invalid, or this server can't seal a compaction.
            StoreUnavailable: the store is down.
        """
        without_effect = compaction.validate_compact_body(await raw_request.body())
        await self.validate_request(request, raw_request, without_effect)
        request_parameters.drop_tools(request)
        carrier_sealing.require_sealing_key(self.get_keyring())
        token_count.reduce_to_input(request)
        turn = await self.build_turn(request, raw_request, compacts=True)
        assert turn
        with set_current_turn(turn):
            error: ErrorResponse | None = await self._check_model(request)
        if error is not None:
            return error
        if not turn.conversation:
            raise ApiError(400, "There is no conversation to compact.", "input")
        before = turn.conversation
        usage = await self.compact_turn(turn)
        return compaction.encode_compaction(before, turn.compaction, usage, turn.began)

    async def prepare_compaction(self, request: Any, raw_request: Request) -> Turn:
        """Do what `prepare_turn` does, for a request that a `compaction_trigger` ends."""
        if request.background:
            message = "background can't be used with a compaction_trigger"
            raise ApiError(400, message, "background")
        carrier_sealing.require_sealing_key(self.get_keyring())
        request_parameters.drop_tools(request)
        turn = await self.build_turn(request, raw_request, compacts=True)
        assert turn
        turn.is_compaction, turn.needs_carrier = True, False  # the compaction has it all
        return turn

    async def answer_with_compaction(
        self, turn: Turn, request: Any
    ) -> bytes | AsyncIterator[EncodedEvent] | ErrorResponse:
        """Answer a request with a compaction of its conversation; as `answer_create_request`."""
        with set_current_turn(turn):
            error: ErrorResponse | None = await self._check_model(request)
        if error is not None:
            return error
        turn.conversation = [item for item in turn.conversation if item.get("type") != TRIGGER]

        async def compact() -> tuple[Any, compaction.SummaryUsage]:
            usage = await self.compact_turn(turn)
            return turn.compaction, usage

        model = self.models.model_name(self._maybe_get_adapters(request))
        events = compaction.generate_events(
            compact, partial(compaction.make_response, request, model, turn.began)
        )
        if request.stream:
            turn.goes_on = True
            return self.stream_response(turn, request, events)
        last = [event async for event in events][-1]
        return await self.store_response(
            turn, response_fields.fill_response(last.response, request)
        )

    async def compact_turn(self, turn: Turn) -> compaction.SummaryUsage:
        """Compact the conversation of a turn; returns what the summary took.

        Raises:
            ApiError: it can't be summarized or sealed.
        """
        same = compaction.build_summary_parameters(turn.request, self.model_config.max_model_len)

        def make_request(input_items: list[Item]) -> Any:
            given = {**same, "input": list(map(vllm_interface.adapt_item, input_items))}
            return vllm_interface.ResponsesRequest.model_validate(given)

        async def generate_answer(input_items: list[Item]) -> Any:
            made = await self.create_responses(make_request(input_items), None)
            if isinstance(made, ErrorResponse):
                raise ApiError(made.error.code, made.error.message, made.error.param)
            return made

        async def can_accept_items(input_items: list[Item]) -> bool:
            return await self.can_accept_request(make_request(input_items))

        with set_current_turn(None):
            items, usage = await compaction.compact_conversation(
                generate_answer, can_accept_items, turn.conversation, self.compaction_prompt
            )
        text = await carrier_sealing.seal_carrier(
            items,
            sum(len(carrier_merge.extract_text(item.get("content") or "")) for item in items),
            self.carriers._replace(format=CarrierFormat.V2),
            self.get_keyring(),
            model=self.models.model_name(self._maybe_get_adapters(turn.request)),
            owner=turn.owner,
        )
        if text is None:
            carrier_sealing.require_sealing_key(None)
        turn.conversation = items
        turn.compaction = compaction.make_compaction_item(text or "")
        return usage

    async def can_accept_request(self, request: Any) -> bool:
        """Whether vLLM would accept a request."""
        try:
            return isinstance(await self.count_input_tokens(request), token_count.TokenCount)
        except (ApiError, *vllm_interface.INVALID):
            return False

    async def compact_above_threshold(self, turn: Turn, threshold: int) -> None:
        """Compact the conversation of a turn if it has more tokens than a threshold.

        Raises:
            ApiError: it can't be summarized or sealed.
        """
        request = turn.request.model_copy(update=ALONE)
        with set_current_turn(None):
            try:
                found = await self.count_input_tokens(request)
                many = found.tokens if isinstance(found, token_count.TokenCount) else None
            except vllm_interface.INVALID:
                many = None  # too long for the model
            if many is not None and many <= threshold:
                return
            before = turn.conversation
            await self.compact_turn(turn)
            request.input = parse_items(compaction.join_summary_messages(turn.conversation))
            if many is not None and not await self.can_accept_request(request):
                turn.conversation, turn.compaction = before, None
                return
        turn.request.input = request.input

    async def truncate_input(self, request: Any) -> None:
        """Drop the oldest items of an input that is too long for the model."""
        whole = request.input
        plain = request.model_copy(update=ALONE)

        async def can_accept_items(items: list[Any]) -> bool:
            return await self.can_accept_request(plain.model_copy(update={"input": items}))

        with set_current_turn(None):
            if isinstance(whole, list) and not await can_accept_items(whole):
                request.input = (
                    await truncation.select_fitting_items(whole, can_accept_items) or whole
                )

    async def build_turn(
        self, request: Any, raw_request: Request, *, compacts: bool = False, adds: bool = True
    ) -> Turn | None:
        """Collect what a request needs before vLLM begins; None if neither store nor carrier is.

        Args:
            request: vLLM's ResponsesRequest.
            raw_request: the HTTP request.
            compacts: whether its conversation may be compacted.
            adds: whether its turn is added to the conversation that it names.

        Raises:
            ApiError: the id is not available, the turn before this one can't be continued, or a
                carrier is missing, or one too many.
            StoreUnavailable: the store is down.
        """
        response = get_previous_response(request)
        previous = request.previous_response_id
        if request.store and previous is not None and find_remembered_history(previous):
            message = "store must be false: the previous response is not stored"
            raise ApiError(400, message, "store")
        hidden = has_encrypted_items(request)
        conversation = parse_conversation_parameter(request)
        sealed = conversation is None and self.should_seal_carrier(request)
        before = (previous, response, conversation)
        continues = any(given is not None for given in before)
        if conversation is not None and compacts:
            message = "conversation can't be used with a compaction: its items stay as they are"
            raise ApiError(400, message, "conversation")
        refers = isinstance(request.input, list) and any(map(is_reference, request.input))
        wanted = request.store or hidden or sealed or compacts or is_websocket_request() or refers
        if not (wanted or continues):
            return None
        items = wire_format.extract_input_items(await raw_request.body())
        brought = None
        if hidden or response is not None:
            brought = carrier_merge.find_carrier(wire_format.ITEMS.decode(items), response)
        validate_single_history(request, brought, conversation, needs_carrier=sealed)
        await self.validate_response_id(request, conversation)
        if request.store and self.store.refuses:  # rather than generate for nothing
            await self.store.get(EVERYBODY, request.request_id)
        who = find_owner(raw_request)
        history = await self.read_earlier_turns(who, previous)
        if refers:
            items = await self.resolve_references(request, items, who, history, conversation)
            if brought:  # whose place may be another one
                brought = carrier_merge.find_carrier(wire_format.ITEMS.decode(items), response)
        turn = Turn(
            request,
            who,
            items,
            history=history,
            has_encrypted_input=hidden,
            request_carrier=brought,
            needs_carrier=sealed,
            compacts=compacts,
        )
        if conversation is not None:
            await self.conversations.begin_turn(turn, conversation, adds=adds)
        return turn

    async def resolve_references(
        self,
        request: Any,
        items: bytes,
        owner: str,
        history: Sequence[Response] | None,
        conversation: str | None,
    ) -> bytes:
        """Put what the references in a request's input stand for in their place.

        What the turns before the request have already is left out.

        Args:
            request: vLLM's ResponsesRequest, whose input is changed.
            items: of its input, a JSON array.
            owner: whose it is.
            history: the turns before it.
            conversation: the one that it names.

        Returns:
            The items, without references.

        Raises:
            ApiError: one stands for nothing that is stored.
            StoreUnavailable: the store is down.
        """
        given = wire_format.ITEMS.decode(items)
        names = {at: one["id"] for at, one in enumerate(request.input) if is_reference(one)}
        known = (
            set[str]()
            if conversation is None
            else await self.conversations.list_item_ids(owner, conversation)
        )
        turns = {turn.id for turn in history or ()}
        wanted = [name for name in dict.fromkeys(names.values()) if name not in known]
        found = await self.stored_responses.find_items(owner, wanted)
        resolved, parsed = list[Item](), list[Any]()
        for at, item in enumerate(given):
            if at not in names:
                resolved.append(item)
                parsed.append(request.input[at])
                continue
            if (name := names[at]) in known:
                continue
            if name not in found:
                raise ApiError(400, f"Item with id '{name}' not found.", f"input[{at}]")
            response_id, stored = found[name]
            if response_id not in turns:
                resolved.append(carrier_merge.drop_unneeded_fields(stored))
                parsed += parse_items(resolved[-1:])
        request.input = parsed
        return wire_format.ENCODE(resolved)

    def should_seal_carrier(self, request: Any) -> bool:
        """Whether a request asks for a carrier and this server can seal one."""
        asks = not request.store and carrier_merge.INCLUDE in (request.include or ())
        return asks and carrier_sealing.can_seal(self.get_keyring())

    async def validate_response_id(self, request: Any, conversation: str | None) -> None:
        """Check the id that a request chooses for its response, where it chooses one.

        Args:
            request: vLLM's ResponsesRequest.
            conversation: the one that it names, which is held in the name of that id.

        Raises:
            ApiError: it is malformed, or another response has it.
            StoreUnavailable: the store is down.
        """
        reaches_the_store = request.store or conversation is not None
        if not reaches_the_store or "request_id" not in request.model_fields_set:
            return
        if not is_valid_id(request.request_id) or "/" in request.request_id:
            raise ApiError(400, "request_id can't be the id of a response", "request_id")
        if request.store and await self.store.get(EVERYBODY, request.request_id):
            raise wire_format.make_id_taken_error(request.request_id)

    async def read_earlier_turns(
        self, owner: str, response_id: str | None
    ) -> list[Response] | None:
        """The turns up to a response, oldest first; None if no response is named.

        Raises:
            ApiError: there is no such response, part of its conversation is missing, or it is still
                running.
            StoreUnavailable: the store is down.
        """
        if response_id is None:
            return None
        if history := find_remembered_history(response_id):
            return history
        try:
            history = await self.store.list_turns(owner, response_id)
        except ConversationBroken as error:
            raise ApiError(404, f"{error.message}.", "previous_response_id") from error
        if not history:
            raise wire_format.make_not_found_error(response_id, "previous_response_id")
        if history[-1].is_running:
            message = f"Response with id '{response_id}' is still {history[-1].status}."
            raise ApiError(400, message, "previous_response_id")
        return history

    def responses_stream_generator(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        """VLLM's events, in every version with the same ids from the first to the last."""
        turn = current.get()
        events = vllm_interface.normalize_stream_events(
            super().responses_stream_generator(*args, **options),
            stored=bool(turn and turn.request.store),
        )
        if turn and turn.compaction:
            return compaction.prepend_item(events, turn.compaction)
        return events

    async def responses_full_generator(self, *args: Any, **options: Any) -> Any:
        """VLLM's answer, after the item of a compaction; a stream's gets it with its events.

        Raises:
            AbortError: vLLM has ended it before it was complete.
        """
        answer = await super().responses_full_generator(*args, **options)
        context = vllm_interface.find_context(*args, **options)
        if vllm_interface.was_aborted(context):
            raise AbortError
        if not isinstance(answer, ResponsesResponse):
            return answer
        turn = current.get()
        if turn and turn.request.store and not turn.request.stream:
            vllm_interface.name_items(answer, {}, stored=True)
        if answer.usage:
            details = answer.usage.output_tokens_details
            details.reasoning_tokens = (
                details.reasoning_tokens or vllm_interface.count_reasoning_tokens(context, answer)
            )
        item = turn and not turn.request.stream and turn.compaction
        if item:
            answer.output.insert(0, item)
        return answer

    async def _check_model(self, request: Any, *args: Any, **options: Any) -> Any:
        """What vLLM does first with a request, and the only step that every version awaits."""
        error = await super()._check_model(request, *args, **options)
        if error is None:
            if self.use_harmony:
                request_parameters.drop_unused_tools(
                    request, tool_server=self.tool_server is not None
                )
            with translate_rendering_errors():
                if (turn := current.get()) and turn.needs_rehydration:
                    with tracing.start_span("rehydrate", {"turns": len(turn.history or ())}) as add:
                        await self.rehydrate_turn(turn)
                        add(tracing.count_response_bytes(turn.history))
                if isinstance(request.input, list):
                    request.input = [
                        item for item in request.input if not wire_format.is_empty_answer(item)
                    ]
            if not (request.input or request.input == "" or request.instructions):
                raise ApiError(400, "The input is empty.", "input")
            if turn and turn.threshold is not None:
                await self.compact_above_threshold(turn, turn.threshold)
            if request.truncation == "auto" and self.counts:
                await self.truncate_input(request)
        return error

    async def _get_trace_headers(self, headers: Any) -> Any:
        """Put vLLM's span of a request below ours."""
        return tracing.make_trace_headers() or await super()._get_trace_headers(headers)

    async def rehydrate_turn(self, turn: Turn) -> None:
        """Put the turns before this one into the input of its request.

        As the items that they were, so vLLM needs no earlier messages: it renders tool calls and
        reasoning as if the client had sent them again.

        Raises:
            ApiError: the carrier is not accepted, or the conversation is too large for the
                answer's carrier.
        """
        size = len(turn.items)
        items = wire_format.ITEMS.decode(turn.items)
        if turn.hold:
            before = await self.history.read_conversation_items(turn.hold.entries)
            turn.hold.entries = ()
        else:
            before = await self.history.read_turns(
                turn.history or (), partial(self.open_compaction, turn)
            )
        history, kept = await self.merge_carrier(turn, items)
        added = [(n, item) for n in kept if (item := carrier_merge.extract_readable_part(items[n]))]
        if history or turn.has_encrypted_input:
            turn.items = wire_format.ENCODE([*history, *(item for _, item in added)])
        readable = extract_readable_parts(history)
        if before.items or readable or turn.has_encrypted_input:
            later = parse_new_items(turn.request.input, items, added)
            turn.request.input = [*before.parsed_items, *parse_items(readable), *later]
        turn.conversation = [*before.items, *readable, *(item for _, item in added)]
        wire_format.validate_tool_outputs([item for _, item in added], turn.conversation)
        if any(map(compaction.is_summary, turn.conversation)):
            turn.request.input = parse_items(compaction.join_summary_messages(turn.conversation))
        if turn.needs_carrier:
            size += before.size
            if turn.request_carrier:
                size += carrier_sealing.COMPRESSION * len(turn.request_carrier.text)
            turn.size = await carrier_sealing.validate_carrier_size(turn.conversation, size)

    async def open_compaction(self, turn: Turn, text: str) -> list[Item] | None:
        """What a stored compaction item holds; None if it can't be opened any more."""
        try:
            return await self.open_carrier(turn, RequestCarrier(text, -1, "previous_response_id"))
        except ApiError as error:
            log.warning("vllmops: the turns before a compaction are read again: %s", error)
            return None

    async def merge_carrier(self, turn: Turn, items: list[Item]) -> tuple[list[Item], list[int]]:
        """What the carrier of a turn holds, and the indices of the items that are not in it.

        Args:
            turn: which may have no carrier.
            items: of the request's input.

        Raises:
            ApiError: the carrier is not accepted.
        """
        if not turn.request_carrier:
            return [], list(range(len(items)))
        history = await self.open_carrier(turn, turn.request_carrier)
        return carrier_merge.merge_history(history, items, turn.request_carrier.item_index)

    async def open_carrier(self, turn: Turn, request_carrier: RequestCarrier) -> list[Item]:
        """What a carrier holds; raises `ApiError` where it is not one for this turn."""
        model = self.models.model_name(self._maybe_get_adapters(turn.request))
        return await carrier_sealing.open_carrier(
            request_carrier, self.get_keyring(), model=model, owner=turn.owner
        )

    async def build_carrier_item(self, turn: Turn | None, response: Any) -> Any:
        """The item with the carrier of a conversation and its answer; None if none is wanted.

        Raises:
            ApiError: the conversation is too large.
        """
        if not (turn and turn.needs_carrier):
            return None
        output = [item.model_dump(mode="json", by_alias=True) for item in response.output]
        answer = map(
            carrier_merge.drop_unneeded_fields,
            wire_format.select_history_items(output, harmony=self.use_harmony),
        )
        history: list[Any] = [*turn.conversation, *answer]
        if self.carriers.format is CarrierFormat.SIGNED_V1:
            history = convert_items_to_messages(history)
        text = await carrier_sealing.seal_carrier(
            history,
            turn.size,
            self.carriers,
            self.get_keyring(),
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

    async def store_response(self, turn: Turn | None, response: Any) -> bytes:
        """A finished response as JSON, after it is stored where the request asks for that.

        Raises:
            ApiError: another response has taken its id meanwhile.
            StoreUnavailable: it could not be stored.
        """
        body = encode_model(set_response_conversation(response, turn))
        stored = turn.make_stored_response(response, body) if turn and turn.request.store else None
        done = True
        if turn and turn.hold:
            done = await self.conversations.finish_turn(turn, stored, body, is_new=True)
        elif stored:
            done = await self.store.create(stored)
        elif turn and is_websocket_request():
            packed = await self.store.pack_response(turn.make_stored_response(response, body))
            remember_history([*(turn.history or ()), packed])
        if not done:
            raise wire_format.make_id_taken_error(response.id)
        return body

    async def stream_response(
        self, turn: Turn | None, request: Any, events: AsyncGenerator[Any, None]
    ) -> AsyncIterator[EncodedEvent]:
        """A foreground stream, with a final event in every case."""
        response, number, failed = None, 0, None  # the number is that of the next event

        def make_cut_event() -> bytes:
            return encode_sse(make_failure_event(response, number, CUT_OFF))

        gate.set_last_event(make_cut_event)
        try:
            async for event in events:
                if event.type in vllm_interface.ENDS:
                    clear_unwanted_output(event.response)
                response_fields.fill_event(event, request)
                number = event.sequence_number
                if event.type in vllm_interface.ENDS:
                    if item := await self.build_carrier_item(turn, event.response):
                        for frame in append_item(item, event.response.output, number):
                            number += 1
                            yield frame
                    body = await self.store_response(turn, event.response)
                    gate.set_last_event(lambda: b"")  # it follows
                    yield wire_format.make_final_event(event.response.status, number, body)
                    return
                if event.type in wire_format.BEGINNINGS:
                    response = set_response_conversation(event.response, turn)
                number += 1  # before it is sent: the send may be cut off
                yield EncodedEvent(event.type, encode_model(event))
        except ApiError as error:
            failed = make_failure_event(response, number, error.message)
        except StoreUnavailable as error:
            failed = make_failure_event(
                response, number, f"The response is not stored: {error.message}"
            )
        except Exception as error:
            log.exception("vllmops: a stream failed: %r", error)
            failed = make_failure_event(response, number, self.explain_error(error))
        finally:
            await self.conversations.release_turn(turn)
        if failed:
            yield failed

    def explain_error(self, error: Exception) -> str:
        """The message that vLLM would send for an error that occurs after the stream began."""
        cause = error.__context__ if isinstance(error.__context__, GenerationError) else error
        message: str = self.create_error_response(cause).error.message
        return message or FAILED

    async def _run_background_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        async def generate_response(run: Response) -> Response:
            answer = await self.responses_full_generator(request, *args, **kwargs)
            if isinstance(answer, ErrorResponse):
                return replace(run, status="failed", error=answer.error.message)
            body = encode_model(
                set_response_conversation(
                    response_fields.fill_response(answer, request), current.get()
                )
            )
            return replace(run, status=answer.status, body=body)

        await self.runs.execute_run(generate_response)

    async def _run_background_request_stream(self, request: Any, *args: Any, **kwargs: Any) -> None:
        turn = current.get()
        first = turn.first_event_number if turn else 0

        async def stream_to_store(run: Response) -> Response:
            async with EventWriter(self.store, run) as writer:
                async for event in self.responses_stream_generator(request, *args, **kwargs):
                    response_fields.fill_event(event, request)
                    if event.type in vllm_interface.ENDS:
                        # Followers read the final event from the stored response.
                        body = encode_model(set_response_conversation(event.response, turn))
                        return replace(run, status=event.response.status, body=body)
                    if event.type in wire_format.BEGINNINGS:
                        set_response_conversation(event.response, turn)
                    event.sequence_number += first
                    writer.queue_event(event.sequence_number, encode_model(event))
            return replace(run, status="failed", error=FAILED)

        await self.runs.execute_run(stream_to_store)


@contextmanager
def translate_rendering_errors() -> Iterator[None]:
    """Refuse an input that can't be rendered: a valid but empty item, for which vLLM answers 500.

    Raises:
        ApiError: instead of the errors that vLLM raises then.
    """
    try:
        yield
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
        log.warning("vllmops: an input can't be rendered: %r", error)
        raise ApiError(400, "The input can't be rendered.", "input") from error


def drop_previous_response(render: Callable[..., Any]) -> Callable[..., Any]:
    """One of `vllm_interface.RENDERERS` without a previous response: the input has all turns."""

    @functools.wraps(render)
    def render_all(self: Any, request: Any, _: Any, *args: Any, **options: Any) -> Any:
        with translate_rendering_errors():
            return render(self, request, None, *args, **options)

    @functools.wraps(render)
    async def render_all_async(self: Any, request: Any, _: Any, *args: Any, **options: Any) -> Any:
        with translate_rendering_errors():
            return await render(self, request, None, *args, **options)

    return render_all_async if inspect.iscoroutinefunction(render) else render_all


for _name in vllm_interface.RENDERERS:
    setattr(
        StoreBackedServing, _name, drop_previous_response(getattr(vllm_interface.Serving, _name))
    )


def find_owner(raw_request: HTTPConnection) -> str:
    """A hash of the API key of a request, empty if the server requires none."""
    keys = raw_request.app.state.args.api_key or [vllm_interface.read_env_api_key()]
    if not any(keys):
        return ""
    key = raw_request.headers.get("Authorization", "").partition(" ")[2]
    return derive_owner(key)


def get_previous_response(request: Any) -> Any:
    """The ``previous_response`` of a request, which vLLM does not know; None if it has none."""
    return (request.model_extra or {}).get(carrier_merge.PREVIOUS)


def parse_new_items(
    parsed_input: Any, items: list[Item], new_items: list[tuple[int, Item]]
) -> list[Any]:
    """The new items of a request as vLLM reads them.

    Args:
        parsed_input: the input as vLLM has read it.
        items: of the input.
        new_items: the index and the readable part of each new one.
    """
    if isinstance(parsed_input, str):
        parsed_input = [{"role": "user", "content": parsed_input}]
    return [
        parsed_input[n] if item is items[n] else parse_items([item])[0] for n, item in new_items
    ]


def validate_single_history(
    request: Any,
    request_carrier: RequestCarrier | None,
    conversation: str | None,
    *,
    needs_carrier: bool,
) -> None:
    """Check that a request gives its conversation in one way only.

    Raises:
        ApiError: it gives it in two.
    """
    if request_carrier and conversation is not None:
        message = "conversation can't be used with a carrier: send only one of them"
        raise ApiError(400, message, "conversation")
    both = (request.previous_response_id, get_previous_response(request))
    if all(given is not None for given in both):
        message = "previous_response_id can't be used with previous_response: send only one of them"
        raise ApiError(400, message, "previous_response_id")
    if (request_carrier or needs_carrier) and request.previous_input_messages:
        message = "previous_input_messages can't be in a carrier: send them as items of the input"
        raise ApiError(400, message, "previous_input_messages")


def append_item(item: Any, output: list[Any], number: int) -> list[EncodedEvent]:
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
    return [EncodedEvent(event.type, encode_model(event)) for event in events]


def make_failure_event(response: Any, number: int, message: str) -> EncodedEvent:
    """The event that ends a stream that failed.

    Args:
        response: as it was when the stream began, None if it never began.
        number: the sequence number.
        message: what went wrong.
    """
    if response is None:
        return wire_format.make_error_event(number, message)
    body = response.model_dump(mode="json", by_alias=True)
    return wire_format.make_final_event(
        "failed", number, wire_format.encode_failed_response(body, message)
    )
