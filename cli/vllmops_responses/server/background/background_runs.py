"""Background responses: they are stored before they run, and run again after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from vllmops.agent.hooks.request_gate import gate
from vllmops.agent.log import log
from vllmops.support.background import start_task

from ...store.backend import Response, StoreUnavailable
from ...store.response_store import ResponseStore, encode_response
from .. import response_fields, vllm_interface, wire_format
from ..carriers import carrier_merge
from ..conversations.conversation_turns import (
    ConversationTurns,
    parse_conversation_parameter,
    set_response_conversation,
)
from ..conversations.turn import Turn, current, has_encrypted_items
from ..response_fields import encode_model
from ..vllm_interface import ErrorResponse
from ..wire_format import AbortError, ApiError
from . import background_rerun
from .event_writer import retry_while_unavailable

STOPPED = "The server that ran this response was stopped."


class BackgroundRuns:
    """The background responses that run in this process.

    Args:
        handler: the `StoreBackedServing` that makes them.
    """

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.store: ResponseStore = handler.store
        self.conversations: ConversationTurns = handler.conversations
        self.running: dict[str, tuple[Response, asyncio.Task[None]]] = {}
        self.reruns: set[asyncio.Task[None]] = set()
        self.releases: set[asyncio.Task[None]] = set()
        self.accepting: set[asyncio.Task[Response]] = set()
        self.ending = False

    async def shut_down(self) -> None:
        """Mark the responses that still run as failed, unless the next start runs them again.

        Before vLLM aborts them, after which they would count as completed.
        """
        self.ending = True
        runs = list(self.running.values())
        for _, task in runs:  # all, before the store may take its time
            task.cancel()
        for run, _ in runs:
            await self.fail_unless_rerun(run)

    async def fail_unless_rerun(self, run: Response) -> None:
        """Mark a run that ends with the server as failed, unless the next start runs it again."""
        if not (gate.rerun and background_rerun.extract_request(run)[0]):
            with suppress(StoreUnavailable):
                await self.store.put(replace(run, status="failed", error=STOPPED))
                await self.conversations.release_run(run)

    def stop_run(self, response_id: str) -> None:
        """End a run at once in this process; another process notices it within a heartbeat."""
        if held := self.running.get(response_id):
            held[1].cancel()
        self.store.wake_followers(response_id)

    async def accept_run(
        self,
        turn: Turn,
        keep: Callable[[Response], Awaitable[bool]],
        request_body: bytes | None = None,
    ) -> Response:
        """Store a run that vLLM has started; the run continues only after that.

        Also where the client leaves meanwhile: what it asked for may be stored already.

        Args:
            turn: its turn.
            keep: stores it; False where its id is taken, or it is gone.
            request_body: its request as JSON; None where it is not to run again.

        Returns:
            The run as it is stored.

        Raises:
            ApiError: its id is taken, or it is gone.
            StoreUnavailable: the store is down.
        """
        task: asyncio.Task[None] = self.handler.background_tasks.pop(turn.latest_response.id)
        turn.goes_on = True
        return await asyncio.shield(
            start_task(self.register_run(turn, task, keep, request_body), self.accepting)
        )

    async def register_run(
        self,
        turn: Turn,
        task: asyncio.Task[None],
        keep: Callable[[Response], Awaitable[bool]],
        request_body: bytes | None,
    ) -> Response:
        """Accept a run, which does its work in a task; its turn is over where that fails."""
        queued = turn.latest_response
        try:
            body = encode_model(
                set_response_conversation(response_fields.fill_response(queued, turn.request), turn)
            )
            run = turn.make_stored_response(
                queued,
                body
                if request_body is None
                else background_rerun.embed_request(body, request_body),
            )
            if not await keep(run):
                raise wire_format.make_id_taken_error(run.id)
        except BaseException:
            task.cancel()
            await self.conversations.release_turn(turn)
            raise
        if self.ending:
            task.cancel()
            await self.fail_unless_rerun(run)
            return run
        self.stop_run(run.id)  # one before, which was deleted on another replica
        self.running[run.id] = run, task
        self.store.track_run(run, task.cancel)
        task.add_done_callback(lambda _: self.finish_run(run, turn))
        turn.accepted_run.set_result(run)
        return run

    async def rerun_interrupted(self) -> None:
        """Put back into the queue what ran when the start before this one ended, and run it."""
        loop = asyncio.get_running_loop()
        gate.ending = lambda: asyncio.run_coroutine_threadsafe(self.shut_down(), loop)
        try:
            async for run, request in background_rerun.requeue_interrupted_runs(self.store):
                self.store.track_run(run, lambda: None)
                task = asyncio.create_task(
                    self.rerun_response(run, request), name=f"again_{run.id}"
                )
                self.reruns.add(task)
                task.add_done_callback(self.reruns.discard)
        except Exception as error:
            log.exception("vllmops: background responses are not run again: %r", error)

    async def rerun_response(self, run: Response, request_fields: dict[str, Any]) -> None:
        """Run a response again; its stream goes on with the next number."""
        turn = None
        try:
            request_fields |= {"input": wire_format.ITEMS.decode(run.input), "request_id": run.id}
            request = vllm_interface.ResponsesRequest.model_validate(request_fields)
            hidden = has_encrypted_items(request)
            # Not what its request names: a carrier in its input may have replaced that.
            before = partial(self.handler.read_earlier_turns, run.owner, run.previous_id)
            history = await retry_while_unavailable(before)
            if history is None and request.previous_response_id is not None:
                history = []
            turn = Turn(
                request,
                run.owner,
                run.input,
                history=history,
                has_encrypted_input=hidden,
                request_carrier=carrier_merge.find_carrier(
                    wire_format.ITEMS.decode(run.input), None
                )
                if hidden
                else None,
                compacts=(threshold := self.handler.find_compact_threshold(request)) is not None,
            )
            turn.threshold = threshold
            turn.began = run.created_at
            kept = partial(self.store.read_events, run.owner, run.id, -1)
            if request.stream and (log_ := await retry_while_unavailable(kept)) and log_.chunks:
                turn.first_event_number = log_.chunks[-1].last_number + 1
            if conversation := parse_conversation_parameter(request):
                await self.conversations.begin_turn(turn, conversation)
            current.set(turn)
            answer = await self.handler.create_responses(request, None)
            if isinstance(answer, ErrorResponse):
                raise ApiError(answer.error.code, answer.error.message)
            await self.accept_run(
                turn, lambda again: retry_while_unavailable(partial(self.store.put, again))
            )
            log.warning("vllmops: %s runs again: it ran when the server was restarted", run.id)
        except Exception as error:
            log.exception("vllmops: %s is not run again: %r", run.id, error)
            why = (
                error.message if isinstance(error, ApiError) else self.handler.explain_error(error)
            )
            await self.store_result(turn, replace(run, status="failed", error=why))
            await self.conversations.release_turn(turn)
            self.store.untrack_run(run)

    async def execute_run(self, work: Callable[[Response], Awaitable[Response]]) -> None:
        """Do a run's work after the store has the run, and store its result."""
        turn = current.get()
        assert turn
        run = await turn.accepted_run
        try:
            if not await self.mark_in_progress(run):
                return
            aborted = False
            try:
                ended = await work(run)
            except AbortError as error:
                log.warning("vllmops: %s failed: %s", run.id, error)
                ended, aborted = replace(run, status="failed", error=error.message), True
            except Exception as error:
                log.exception("vllmops: %s failed: %r", run.id, error)
                ended = replace(run, status="failed", error=self.handler.explain_error(error))
            if ended.status == "failed" and not (aborted or self.handler.engine_client.errored):
                ended = replace(ended, body=encode_response(run))  # it would fail again
            # vLLM turns a cancellation into an answer.
            if not (task := asyncio.current_task()) or not task.cancelling():
                await self.store_result(turn, ended)
        finally:
            if not self.ending:  # else who runs it again takes over the conversation
                await self.conversations.release_turn(turn)

    def finish_run(self, run: Response, turn: Turn) -> None:
        """Forget a run that is over; one that was stopped before it began has let go of nothing."""
        self.unregister_run(run)
        if turn.hold and not self.ending:
            start_task(self.conversations.release_turn(turn), self.releases)

    def unregister_run(self, run: Response) -> None:
        """Attend a run no more."""
        self.store.untrack_run(run)
        if (held := self.running.get(run.id)) and held[0] is run:
            del self.running[run.id]

    async def store_result(self, turn: Turn | None, response: Response) -> None:
        """Store the result of a run, and add its turn to the conversation that it holds.

        Logs errors, because vLLM ignores what this task raises.
        """
        put: Callable[[], Awaitable[bool]] = partial(self.store.put, response)
        if turn and turn.hold and response.status in wire_format.ANSWERED:
            put = partial(
                self.conversations.finish_turn, turn, response, response.body, is_new=False
            )
        else:
            await self.conversations.release_turn(turn)  # first: who sees that it failed goes on
        try:
            try:
                await retry_while_unavailable(put)
            except ApiError as error:  # another request has changed the conversation
                failed = replace(response, status="failed", error=error.message)
                await retry_while_unavailable(partial(self.store.put, failed))
        except Exception as error:
            log.exception(
                "vllmops: the result of %s is not stored, and clients see it as failed: %r",
                response.id,
                error,
            )

    async def mark_in_progress(self, run: Response) -> bool:
        """Mark a run as in progress; False where it was stopped before."""
        try:
            swap = await self.store.set_status(
                run.owner, run.id, "in_progress", allowed_statuses=frozenset({"queued"})
            )
        except StoreUnavailable:
            return True
        return swap.changed
