"""Stored responses, for whoever serves them: what the API server builds on.

**Take** ``store = ResponseStore(opening.make_backend(url, limits))``, ``await store.open()`` once,
and ``await store.close()`` at the end. A backend that is down does not keep a server from starting:
each call tries to open it again, and `open` raises only what time does not heal (a newer schema).
Nothing here imports vllm, and nothing blocks the event loop.

**Bodies** are JSON bytes. ``body`` is the response object with its ``output``, ``input`` an array
of the items that this turn added, not those before it: so each item is stored once.
`encode_response` is the object to answer with, its status and error as of now. Tools lose their
credentials on the way in.

**Owners.** Each call takes the hash of the caller's API key, ``""`` without keys. Somebody else's
response is None, 404, and not in a list, but its id is taken: `create` says False, which is a 409
where the client has set ``request_id``. `EVERYBODY` is for who runs the server.

**A response in the foreground** is created once it has finished, and one in the background at once,
as ``queued``::

    run = Response(id=…, owner=…, model=…, status="queued", body=…, input=…, previous_id=…)
    if not await store.create(run): …409
    store.attend(run, task.cancel)      # renews its lease; cancels when somebody wants it stopped
    …
    await store.put(replace(run, status="completed", body=…))   # False: cancelled, deleted, evicted
    store.leave(run)

`put` writes only what still runs or was taken for lost, so what was cancelled is never completed,
and what was deleted never comes back, on whichever replica that happened. Keep `run`: its
``created_at`` tells it from a later one under the same id.

**Cancelling** is ``set_status(owner, id, "cancelled")``, on any replica: ``changed`` or already
``cancelled`` is success, another finished status is a 400, None a 404. Whoever attends the run has
`BEAT_S` to notice. Deleting and evicting stop a run likewise. A run whose server dies becomes
``failed`` with `GONE` from `Limits.lease_s` after; so is one whose store was out of its reach for
so long, until it puts how it ended.

**A conversation** is the turn that ``previous_response_id`` names after all before it, in one
query, packed as they are kept. ConversationBroken where an earlier one is gone (404), an empty list
where the turn itself is.

**A background stream** is written by `append_events` in batches (some 50 ms of events each: a round
trip costs more than an event), each event as JSON with consecutive sequence numbers, and read by
`follow_events` from any replica, from any number on. A log is bounded, so `follow_events` may begin
later than asked, and it ends with the run, whether or not its last event tells so: whoever serves
it then sends the terminal event that `get` implies.

**An outage** raises one StoreUnavailable within `DEADLINE_S`, with ``retry_after_s``: 503. A write
that ended so may have been done or not. It is acknowledged only after it was done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from vllmops.support.background import ErrorReporter, repeat_forever
from vllmops.support.errors import VllmopsError

from . import credential_redaction
from .backend import (
    BROKEN,
    FINISHED,
    RUNNING,
    STATUSES,
    Backend,
    ConversationBroken,
    CursorUnknown,
    EventChunk,
    EventLog,
    Response,
    ResponsePage,
    ResponseQuery,
    StatusChange,
    StoreStats,
    StoreUnavailable,
    SweepResult,
)
from .compression import SOON_UNPACKED, deflate_async, inflate, inflate_async
from .conversation_store import ConversationStore
from .ids import is_storable, is_valid_id
from .response_defaults import fill_defaults

DEADLINE_S = 2.0
# Sweeping and counting go through many rows.
SLOW_DEADLINE_S = 30.0
# A timer that is late by so much tells of an event loop that was blocked.
BLOCKED_S = 0.5
# After a failure nobody waits for the backend for so long.
PAUSE_S = 1.0
BEAT_S = 0.25
SWEEP_S = 10.0
# Looking after runs, and sweeping, rest so long after what nobody foresaw.
AFTER_S = 1.0
# How often another replica's log is looked at.
FOLLOW_S = 0.2

# Below "vllm", so that vLLM's own handlers print it.
log = logging.getLogger("vllm.vllmops")


class EventBatch(msgspec.Struct, frozen=True):
    """Part of a stream.

    Args:
        first_number: sequence number of the first; greater than asked where the log has lost some.
        events: each as JSON.
    """

    first_number: int = msgspec.field(name="first")
    events: list[bytes]


class ResponseStore:
    """A backend with all that each of them needs around it.

    Credentials are taken out, bodies packed, calls bounded in time, leases renewed, and what is
    too old or too much is swept away.

    Args:
        backend: which this store opens and closes.
        deadline_s: seconds that a call may take.
        outages: gets a line when the backend goes away, and one when it is back.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        deadline_s: float = DEADLINE_S,
        outages: Callable[[str], object] = str,
    ) -> None:
        self.outages = outages
        self.backend = backend
        self.deadline_s = deadline_s
        self.is_open = False
        self.opening = asyncio.Lock()
        self.paused_until = 0.0
        # When the last call that writes succeeded, and the last one that reads: where a disk or a
        # lock stands, reads may go on.
        self.answered_at = {False: -math.inf, True: -math.inf}
        self.problem = ""
        self.refuses = False  # its last call failed
        self.tracked_runs: dict[str, tuple[Response, Callable[[], object]]] = {}
        self.wakeup_by_id: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self.renewed_at = 0.0
        self.background: list[asyncio.Task[None]] = []
        self.stopping = ErrorReporter("a cancelled run may continue", log.error)
        self.conversations = ConversationStore(self)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Begin; a backend that is down is opened later.

        Raises:
            VllmopsError: ``store.schema``, or the backend was configured in a way that can't be.
        """
        for work, pause_s, hindered in (
            (
                self.maintain_leases,
                BEAT_S,
                "the leases of background runs can't be renewed: after a lease expires, its run "
                "is reported as failed until it ends",
            ),
            (self.try_sweep, SWEEP_S, "the store is not swept, and may grow"),
        ):
            doing = repeat_forever(
                work, ErrorReporter(hindered, log.error), pause_s, after_s=AFTER_S
            )
            self.background.append(asyncio.create_task(doing, name="responses-store"))
        try:
            async with self.backend_call():
                pass
        except StoreUnavailable:
            pass
        except Exception:
            await self.close()
            raise

    async def close(self) -> None:
        """End; what runs here is left to whoever ends it."""
        tasks = [*self.background, *self.conversations.retries]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.background.clear()
        with contextlib.suppress(TimeoutError, *self.backend.unavailable):
            async with asyncio.timeout(self.deadline_s):
                await self.backend.close()
        self.is_open = False

    async def create(self, response: Response) -> bool:
        """Store a response that was not there; False where the id is taken, by whomever.

        Raises:
            VllmopsError: ``store.id``, the id can't be one.
        """
        if not is_valid_id(response.id):
            raise VllmopsError("store.id", f"{response.id!r} is not a valid response id")
        packed = await self.pack_response(response)
        async with self.backend_call():
            return await self.backend.create(packed)

    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        """Replace a run's body, status and error; False where it is gone or has such a status."""
        packed = await self.pack_response(response)
        async with self.backend_call():
            done = await self.backend.put(packed, unless_status=unless_status)
        if not response.is_running:
            self.wake_followers(response.id)
        return done

    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed_statuses: Collection[str] = RUNNING,
        error: str = "",
    ) -> StatusChange:
        """Change the status alone, where it is one of `allowed_statuses`, and only then."""
        if not is_valid_id(response_id):
            return StatusChange(False, None)
        async with self.backend_call():
            swap = await self.backend.set_status(
                owner,
                response_id,
                status,
                allowed_statuses=allowed_statuses,
                error=sanitize_text(error),
            )
        return StatusChange(
            swap.changed, swap.response and await try_unpack_response(swap.response)
        )

    async def get(self, owner: str, response_id: str) -> Response | None:
        """A response, or None; counts as use."""
        if not is_valid_id(response_id):
            return None
        async with self.backend_call(reads=True):
            found = await self.backend.get(owner, response_id)
        return found and await try_unpack_response(found)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response with its events; False where there is none."""
        if not is_valid_id(response_id):
            return False
        async with self.backend_call():
            return await self.backend.delete(owner, response_id)

    async def list_responses(self, owner: str, query: ResponseQuery) -> ResponsePage:
        """Part of the owner's responses, by creation.

        Raises:
            CursorUnknown: ``after_id`` or ``before_id`` is no response of this owner's.
        """
        for cursor in (query.after_id, query.before_id):
            if cursor is not None and not is_valid_id(cursor):
                raise CursorUnknown(cursor)
        if (query.status not in {None, *STATUSES}) or not is_storable(query.model or ""):
            return ResponsePage([], False)
        async with self.backend_call(reads=True):
            page = await self.backend.list_responses(owner, query)
        return ResponsePage(
            [await try_unpack_response(response) for response in page.responses], page.has_more
        )

    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        """A turn after all before it, the oldest first; empty where there is no such turn.

        They are as the store keeps them, for `unpack_response` to read: most were read a turn ago.

        Raises:
            ConversationBroken: one of the turns before is gone.
        """
        if not is_valid_id(response_id):
            return []
        async with self.backend_call(reads=True):
            turns = await self.backend.list_turns(owner, response_id)
        if turns and turns[0].previous_id is not None:
            raise ConversationBroken(turns[0].previous_id)
        return turns

    async def touch(self, owner: str, ids: Collection[str]) -> None:
        """Count as use of these responses."""
        async with self.backend_call():
            await self.backend.touch(
                owner, [response_id for response_id in ids if is_valid_id(response_id)]
            )

    async def append_events(
        self, response: Response, first_number: int, events: Sequence[bytes]
    ) -> bool:
        """Add to the log of a run; False where that run is gone.

        Args:
            response: the run.
            first_number: sequence number of the first event; the others follow it.
            events: each as JSON.
        """
        if not events:
            return True
        joined = (
            b"[" + b",".join(credential_redaction.redact_event(event) for event in events) + b"]"
        )
        chunk = EventChunk(
            first_number, first_number + len(events) - 1, await deflate_async(joined)
        )
        async with self.backend_call():
            done = await self.backend.append_events(response, chunk)
        self.wake_followers(response.id)
        return done

    async def follow_events(
        self, owner: str, response_id: str, after_number: int = -1
    ) -> AsyncIterator[EventBatch]:
        """The events behind a sequence number as they come, until the run is over.

        Ends at once where there is no such response, or once it was deleted. Once it has begun, it
        waits for a backend that goes down.
        """
        news = self.wakeup_by_id.setdefault(response_id, asyncio.Event())
        log = await self.read_events(owner, response_id, after_number)
        while log is not None:
            for chunk in log.chunks:
                fresh = (await unpack_events(chunk)).events[
                    max(0, after_number + 1 - chunk.first_number) :
                ]
                first, after_number = chunk.last_number + 1 - len(fresh), chunk.last_number
                if fresh:
                    yield EventBatch(first, fresh)
            if not log.chunks:
                if not log.running:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), FOLLOW_S)
            news.clear()
            try:
                log = await self.read_events(owner, response_id, after_number)
            except StoreUnavailable as error:
                await asyncio.sleep(error.retry_after_s)
                log = EventLog([], True)

    async def read_events(self, owner: str, response_id: str, after_number: int) -> EventLog | None:
        if not is_valid_id(response_id):
            return None
        async with self.backend_call(reads=True):
            return await self.backend.read_events(owner, response_id, after_number)

    def track_run(self, response: Response, stop: Callable[[], object]) -> None:
        """Keep a run's lease, and call `stop`, once, when it was cancelled, deleted or evicted."""
        self.tracked_runs[response.id] = response, stop

    def untrack_run(self, response: Response) -> None:
        """Attend a run no more."""
        if (held := self.tracked_runs.get(response.id)) and held[
            0
        ].created_at == response.created_at:
            del self.tracked_runs[response.id]

    async def sweep(self) -> SweepResult:
        """Tidy up; done every `SWEEP_S` by itself."""
        async with self.backend_call(SLOW_DEADLINE_S):
            return await self.backend.sweep()

    async def collect_stats(self, owner: str) -> StoreStats:
        """What there is; may take some seconds where there is much."""
        async with self.backend_call(SLOW_DEADLINE_S, reads=True):
            return await self.backend.collect_stats(owner)

    async def maintain_leases(self) -> None:
        """Look after what runs and what is held here; done every `BEAT_S` by itself."""
        if not (self.tracked_runs or self.conversations.holds):
            return
        now = time.monotonic()
        renew = now - self.renewed_at >= min(self.backend.limits.lease_s / 3, SWEEP_S)
        with contextlib.suppress(StoreUnavailable):
            if self.tracked_runs:
                await self.check_tracked_runs(renew=renew)
            if renew:
                await self.conversations.renew_holds()
                self.renewed_at = now

    async def try_sweep(self) -> None:
        """Sweep, unless the store is unavailable, which the caller gets as an error."""
        with contextlib.suppress(StoreUnavailable):
            await self.sweep()

    async def check_tracked_runs(self, *, renew: bool) -> None:
        held = dict(self.tracked_runs)
        async with self.backend_call():
            running = await self.backend.select_running(held.keys(), renew=renew)
        for response_id in held.keys() - running:
            response, stop = held[response_id]
            self.untrack_run(response)
            self.wake_followers(response_id)
            try:
                stop()
            except Exception as error:
                self.stopping.report(error)

    def wake_followers(self, response_id: str) -> None:
        """Wake whoever follows a response here."""
        if news := self.wakeup_by_id.get(response_id):
            news.set()

    async def pack_response(self, response: Response) -> Response:
        return replace(
            response,
            error=sanitize_text(response.error),
            body=await deflate_async(credential_redaction.redact_body(response.body)),
            input=await deflate_async(response.input),
        )

    def backend_call(self, deadline_s: float | None = None, *, reads: bool = False) -> BackendCall:
        """What a call to the backend stands in."""
        return BackendCall(self, deadline_s or self.deadline_s, reads=reads)


class BackendCall:
    """Bounds a call's time, opens the backend where it is not, and reports problems in one way.

    Args:
        store: whose call it is.
        deadline_s: seconds in all.
        reads: whether it changes nothing.
    """

    def __init__(self, store: ResponseStore, deadline_s: float, *, reads: bool) -> None:
        self.reads = reads
        self.store = store
        self.timeout = asyncio.timeout(None)
        self.deadline_s = deadline_s

    async def __aenter__(self) -> Backend:
        self.began = time.monotonic()
        wait = self.store.paused_until - self.began
        if wait > 0:
            raise StoreUnavailable(self.store.problem, wait, self.store.backend.hint)
        await self.timeout.__aenter__()
        self.start_timer()
        if not self.store.is_open:
            try:
                async with self.store.opening:
                    if not self.store.is_open:
                        await self.store.backend.open()
                        self.store.is_open = True
            except BaseException as error:
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
        return self.store.backend

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.timer.cancel()
        try:
            await self.timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            # While others are answered, that call alone is stuck: on a row, or on a connection.
            alone = self.store.answered_at[self.reads] > self.began
            raise self.build_unavailable_error("it took too long", pauses=not alone) from late
        if isinstance(error, self.store.backend.unavailable):
            pauses = not self.store.backend.is_call_error(error)
            raise self.build_unavailable_error(
                self.store.backend.describe_error(error), pauses=pauses
            ) from error
        if error is None:
            self.store.answered_at[self.reads] = time.monotonic()
            if self.store.refuses:
                self.store.refuses = False
                self.store.outages("vllmops: the store is available again")

    def start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self.deadline_s
        self.timer = loop.call_at(due, self.handle_deadline, due)

    def handle_deadline(self, due: float) -> None:
        """End the call, unless the event loop was blocked: then the answer is there, and unread."""
        now = asyncio.get_running_loop().time()
        if now - due > BLOCKED_S:
            self.start_timer()
        else:
            self.timeout.reschedule(now)

    def build_unavailable_error(self, reason: str, *, pauses: bool = True) -> StoreUnavailable:
        problem = f"the store is unavailable: {reason}"
        if pauses:
            if not self.store.refuses:
                self.store.outages(f"vllmops: {problem}; what must be stored gets 503")
            self.store.refuses = True
            self.store.paused_until = time.monotonic() + PAUSE_S
            self.store.problem = problem
        return StoreUnavailable(problem, PAUSE_S, self.store.backend.hint)


class BackgroundRequest(msgspec.Struct):
    """The request of a background run, without its input, and the start of a server that runs it.

    It stands in the body of what runs, and no client sees it.
    """

    run: str
    request: dict[str, Any]


class BodyStatus(msgspec.Struct):
    """As much of a body as tells whether it is up to date."""

    status: str = ""
    vllmops: msgspec.Raw = msgspec.Raw(b"")
    completed_at: float | msgspec.UnsetType | None = msgspec.UNSET


ASKED = "vllmops"  # the field of a body that is an `BackgroundRequest`
STATUS = msgspec.json.Decoder(BodyStatus)
PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode_response(response: Response) -> bytes:
    """The response object as JSON, its status and error as of now, with every field.

    Where its body is no object there is one in its place that says so.
    """
    try:
        head = STATUS.decode(response.body)
        changed = response.error or head.vllmops or head.status != response.status
        if not changed and head.completed_at is not msgspec.UNSET:
            return response.body
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        found: dict[str, Any] = dict(PARTS.decode(response.body))
    except BROKEN:
        found = {
            "id": response.id,
            "object": "response",
            "created_at": int(response.created_at),
            "model": response.model,
            "output": [],
            "error": {"code": "server_error", "message": "The stored response is damaged."},
        }
    found.pop(ASKED, None)
    found["status"] = response.status
    if response.error:
        found["error"] = {"code": "server_error", "message": response.error}
    return msgspec.json.encode(fill_defaults(found))


async def unpack_events(chunk: EventChunk) -> EventBatch:
    """The events of a chunk."""
    found = msgspec.json.decode(await inflate_async(chunk.events), type=list[msgspec.Raw])
    return EventBatch(chunk.first_number, [bytes(event) for event in found])


async def unpack_response(response: Response) -> Response:
    """A response that is as a backend keeps it, its body and input as JSON."""
    if len(response.body) + len(response.input) < SOON_UNPACKED:
        return replace(response, body=inflate(response.body), input=inflate(response.input))
    return replace(
        response, body=await inflate_async(response.body), input=await inflate_async(response.input)
    )


async def try_unpack_response(response: Response) -> Response:
    """As `unpack_response`; the body of what is damaged is empty, so that it hides no other."""
    try:
        if (found := fix_field_types(response)) is response:
            return await unpack_response(response)
    except ValueError:
        found = response
    return replace(found, body=b"", input=b"")


TEXTS = ("id", "owner", "model", "status", "error")


def fix_field_types(response: Response) -> Response:
    """A response with no value of another type in it: SQLite keeps any in any column."""
    wrong: dict[str, Any] = {
        name: "" for name in TEXTS if not isinstance(getattr(response, name), str)
    }
    if not isinstance(response.created_at, int | float):
        wrong["created_at"] = 0.0
    if not isinstance(response.previous_id, str | None):
        wrong["previous_id"] = None
    if not (isinstance(response.body, bytes) and isinstance(response.input, bytes)):
        wrong["body"] = b""
    return replace(response, **wrong) if wrong else response


def sanitize_text(text: str) -> str:
    """A text as every backend takes it."""
    return text.encode(errors="replace").decode().replace("\0", "")
