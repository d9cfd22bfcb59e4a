"""The base class of whatever keeps responses, and the types at its seam.

A backend sees bytes that it need not understand: `response_store.ResponseStore` has taken
credentials out, packed them, and bounds the time of each call. What a backend answers for is that
each of its methods is atomic, also between processes, and that what it has acknowledged is kept.
`conformance` says the same in tests: ``vllmops responses check-store URL``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import ClassVar, Final

import msgspec

from vllmops.support.errors import VllmopsError
from vllmops.support.urls import redact_url, remove_url_secrets

from .conversation_backend import ConversationBackend
from .stored_response import FINISHED, RUNNING, STATUSES, Response

__all__ = ["FINISHED", "RUNNING", "STATUSES", "Response"]

# What a run's response says that nobody renews any more.
GONE = "The server that ran this response is gone."
# A call that was given up after so long has met silence: other connections may be as dead.
SILENT_S = 0.5
# What makes text no JSON of a type; msgspec raises the last for what is nested deeply.
BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
CHECK_SERVER = "check the store's URL, and that its server is running"
# Uses of responses that are noted before they are written.
NOTED = 1000
# To how many seconds the use of the turns before a turn is known.
GRAIN_S = 10.0
# An owner is a hash or empty, so this is nobody's: it stands for whoever runs the server.
EVERYBODY = "*"
# Methods of a backend that a request, or looking after what runs, waits for, and what metrics and
# spans call them.
OPERATIONS: Final = {
    "create": "create",
    "put": "put",
    "set_status": "set_status",
    "get": "get",
    "delete": "delete",
    "list_responses": "page",
    "list_turns": "conversation",
    "touch": "touch",
    "select_running": "running",
    "append_events": "append",
    "read_events": "log",
    "sweep": "sweep",
    "collect_stats": "stats",
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much is kept, and for how long.

    Args:
        max_size: responses of all owners. Beyond it the owner who has most gives up what he used
            longest ago, and what runs only in need; of owners who have as many, the one who has
            stored nothing for longest. Backends that count rarely exceed it by up to a hundredth
            for each process.
        max_per_key: responses of one owner, who gives up his own beyond it; None for `max_size`.
        ttl_s: seconds that a finished response is kept after its last use.
        lease_s: seconds after which a run that nobody renews counts as gone.
        max_items: of one conversation; no more can be added to it. There are `max_size`
            conversations at most, and `max_per_key` of one owner, beside the responses.
        max_events: of one stream's log, the newest.
        events_kept_s: seconds that a log is kept after its response has finished.
    """

    max_size: int = 10_000
    max_per_key: int | None = None
    ttl_s: float = 30 * 24 * 3600
    lease_s: float = 30
    max_items: int = 20_000
    max_events: int = 10_000
    events_kept_s: float = 600

    @property
    def owner_limit(self) -> int:
        """Responses that one owner may have."""
        return self.max_size if self.max_per_key is None else min(self.max_per_key, self.max_size)


class StatusChange(msgspec.Struct, frozen=True):
    """What became of a change of status.

    Args:
        changed: whether this call changed it.
        response: the response after the call, None where the owner has none by that id.
    """

    changed: bool
    response: Response | None = msgspec.field(name="now")


class ResponseQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to list.

    Args:
        after_id: id of the response that the page begins behind.
        before_id: id of the response that the page ends before.
        limit: responses, from 1.
        descending: the newest first.
        model: those of this model alone.
        status: those with this status alone.
    """

    after_id: str | None = msgspec.field(default=None, name="after")
    before_id: str | None = msgspec.field(default=None, name="before")
    limit: int = 20
    descending: bool = True
    model: str | None = None
    status: str | None = None

    @property
    def is_backward(self) -> bool:
        """Whether the page is found by going from its end to its beginning."""
        return self.before_id is not None and self.after_id is None


class ResponsePage(msgspec.Struct, frozen=True):
    """Part of a list.

    Args:
        responses: in the order that was asked for.
        has_more: whether there are others in the direction that was asked for.
    """

    responses: list[Response]
    has_more: bool = msgspec.field(name="more")


class EventChunk(msgspec.Struct, frozen=True):
    """Consecutive events of a stream.

    Args:
        first_number: sequence number of the first.
        last_number: of the last.
        events: all of them, packed.
    """

    first_number: int = msgspec.field(name="first")
    last_number: int = msgspec.field(name="last")
    events: bytes


class EventLog(msgspec.Struct, frozen=True):
    """What is left of a stream from some sequence number on.

    Args:
        chunks: in order; the first may begin earlier than asked.
        running: whether the response ran when they were read.
    """

    chunks: list[EventChunk]
    running: bool


class SweepResult(msgspec.Struct, frozen=True):
    """What tidying up has done, in responses."""

    expired_count: int = msgspec.field(default=0, name="expired")
    evicted_count: int = msgspec.field(default=0, name="evicted")
    failed_count: int = msgspec.field(default=0, name="failed")


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the store.

    Args:
        statuses: responses by status.
        models: responses by model.
        bytes: of responses, as they are kept.
        event_bytes: of logs; None where one owner was asked for.
        oldest: when the oldest response was made, seconds since the epoch.
        evictions: responses that had to make room, ever.
        owners: responses by owner, the fullest first.
    """

    statuses: dict[str, int]
    models: dict[str, int]
    bytes: int
    event_bytes: int | None
    oldest: float | None
    evictions: int
    owners: dict[str, int] = {}

    @property
    def response_count(self) -> int:
        return sum(self.statuses.values())


class StoreUnavailable(VllmopsError):  # noqa: N818 - the state, as messages name it
    """The backend is down, or too slow; whether a write was done is not known.

    Args:
        message: what is wrong.
        retry_after_s: when to try again, in seconds.
        hint: what to do about it.
    """

    def __init__(self, message: str, retry_after_s: float = 1, hint: str = CHECK_SERVER) -> None:
        super().__init__("store.unavailable", message, hint)
        self.retry_after_s = retry_after_s


class CursorUnknown(VllmopsError):  # noqa: N818
    """``after_id`` or ``before_id`` names nothing that the list has."""

    def __init__(self, cursor: str, subject: str = "response") -> None:
        super().__init__("store.cursor", f"no {subject} {cursor!r} to start the list from")
        self.cursor = cursor


class ConversationBroken(VllmopsError):  # noqa: N818
    """A turn before the one that was asked for was deleted, evicted or has expired.

    Args:
        missing: its id.
    """

    def __init__(self, missing: str) -> None:
        super().__init__("store.conversation", f"An earlier turn, {missing!r}, is gone")
        self.missing = missing


class Backend(ConversationBackend, ABC):
    """Keeps responses; a subclass may be a user's own.

    Each method is atomic. ``owner`` scopes it: another owner's response is as none at all, save
    that its id is taken; `EVERYBODY` sees all. A response that runs has a lease: `create`, `put`
    with a status that runs, and `select_running` with ``renew`` extend it to ``limits.lease_s``
    from now. Once it has lapsed, whoever reads the response first makes it ``failed`` with `GONE`.
    That is a conclusion, not an outcome: a run that only could not reach the store still puts its
    own.

    Args:
        url: as the user gave it.
        limits: what is kept.
    """

    # What the driver raises where the backend is down; it becomes StoreUnavailable.
    unavailable: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    # The hint of that error.
    hint: ClassVar[str] = CHECK_SERVER

    def __init__(self, url: str, limits: Limits) -> None:
        self.url = url
        self.limits = limits

    def describe_error(self, error: BaseException) -> str:
        """What the driver says of a failure, without the password that it may repeat."""
        return remove_url_secrets(str(error) or type(error).__name__, self.url)

    def is_call_error(self, error: BaseException) -> bool:  # noqa: ARG002
        """Whether a failure is the server's answer to one call, and others may well succeed."""
        return False

    async def exists(self) -> bool:
        """Whether a store exists there, as far as can be seen; asking makes none."""
        return True

    @abstractmethod
    async def open(self) -> None:
        """Connect, and bring the schema up to date; called again after it has failed.

        Raises:
            VllmopsError: ``store.schema``, where a newer vllmops has made it.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything; also where `open` has failed."""

    @abstractmethod
    async def delete_store(self) -> None:
        """Delete all that is kept, schema included."""

    @abstractmethod
    async def create(self, response: Response) -> bool:
        """Store a response that was not there; False where the id is taken, by whomever.

        Evicts others where that makes too many, of all or of its owner, as `Limits` has it;
        `plan_evictions` says of whom.
        """

    @abstractmethod
    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        """Replace body, status and error of a response that is there; its input stays.

        False, and nothing done, where that run is gone or its status is one of `unless_status`,
        of which ``failed`` with `GONE` is none.
        """

    @abstractmethod
    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed_statuses: Collection[str] = RUNNING,
        error: str = "",
    ) -> StatusChange:
        """Change the status alone, where it is one of `allowed_statuses`."""

    @abstractmethod
    async def get(self, owner: str, response_id: str) -> Response | None:
        """A response, or None; counts as use."""

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response with its events; False where there is none."""

    @abstractmethod
    async def list_responses(self, owner: str, query: ResponseQuery) -> ResponsePage:
        """Part of the owner's responses, by creation.

        Raises:
            CursorUnknown: ``after_id`` or ``before_id`` is no response of this owner's.
        """

    @abstractmethod
    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        """A response after those that it follows, the oldest first; counts as use of each.

        It begins with the first that is there, and has each turn once. Empty where there is no such
        response. However long it is, it takes the same number of round trips.
        """

    @abstractmethod
    async def touch(self, owner: str, ids: Collection[str]) -> None:
        """Count as use of these responses."""

    @abstractmethod
    async def select_running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        """Those of the ids that run or have lapsed; the rest were cancelled, deleted or evicted.

        What has lapsed is not renewed: it stays ``failed`` until its outcome comes.
        """

    @abstractmethod
    async def append_events(self, response: Response, chunk: EventChunk) -> bool:
        """Add to the log of a run; False where that run is gone.

        A chunk whose ``first`` is there already is left out: a writer may try again.
        """

    @abstractmethod
    async def read_events(self, owner: str, response_id: str, after_number: int) -> EventLog | None:
        """The chunks with events behind a sequence number; None where there is no response."""

    @abstractmethod
    async def sweep(self) -> SweepResult:
        """Expire, evict, fail what has lapsed, forget old logs; called now and then."""

    @abstractmethod
    async def collect_stats(self, owner: str) -> StoreStats:
        """What there is; may take its time."""

    async def list_caveats(self) -> list[str]:
        """How this server is set up so that it could lose what it has acknowledged, in words."""
        return []


def plan_evictions(owners: Mapping[str, int], limits: Limits) -> dict[str, int]:
    """How many responses may be left of those owners who have to give some up.

    Args:
        owners: how many each has; of two who have as many, the earlier gives one up first.
        limits: what is kept.
    """
    left = {owner: min(held, limits.owner_limit) for owner, held in owners.items()}
    surplus = sum(left.values()) - limits.max_size
    if surplus > 0:
        # The fullest are brought down to one level: the lowest of those that are low enough.
        top, level = 0, 0
        for number, held in enumerate(sorted(left.values(), reverse=True), 1):
            top += held
            level = max(level, (top - surplus) // number)
        full = [owner for owner, held in left.items() if held > level]
        kept = sum(left[owner] - level for owner in full) - surplus
        # All of them at that level may be too few: who come last keep one more.
        for number, owner in enumerate(reversed(full)):
            left[owner] = level + (number < kept)
    return {owner: target for owner, target in left.items() if target < owners[owner]}


def join_statuses(statuses: Collection[str]) -> str:
    """A set of statuses as one text, in which each stands between spaces."""
    return f" {' '.join(statuses)} "


class LastUseBuffer:
    """When responses were used last, noted until it is written down, all at once.

    A use that is not written is lost with the process, which harms nothing.

    Args:
        write: writes down ids, each with the time of its last use in seconds since the epoch.
    """

    def __init__(self, write: Callable[[list[tuple[str, float]]], Awaitable[None]]) -> None:
        self.write = write
        self.pending_uses: dict[str, float] = {}
        self.marked_ids, self.marked_since = set[str](), 0.0

    async def mark_used(self, ids: Collection[str]) -> None:
        """Count as use, which is written down later."""
        self.pending_uses.update(dict.fromkeys(ids, time.time()))
        if len(self.pending_uses) >= NOTED:
            await self.flush()

    async def mark_turns_used(self, ids: Sequence[str]) -> None:
        """Count as use of a turn, the last one, and of all before it: of these once in `GRAIN_S`.

        Each turn uses all before it, and writing that down takes longer than to store the turn.
        """
        now = time.monotonic()
        if now - self.marked_since > GRAIN_S:
            self.marked_ids, self.marked_since = set(), now
        before = set(ids[:-1]) - self.marked_ids
        self.marked_ids |= before
        await self.mark_used([*before, *ids[-1:]])

    def take_pending(self) -> list[tuple[str, float]]:
        """What is noted, for whoever writes it down."""
        noted, self.pending_uses = self.pending_uses, {}
        # In one order everywhere, or two processes could wait for each other.
        return sorted(noted.items())

    async def flush(self) -> None:
        """Write down what was used."""
        if noted := self.take_pending():
            await self.write(noted)


def make_schema_error(url: str, store_schema: int, supported_schema: int) -> VllmopsError:
    """The refusal of a store that a newer vllmops has made."""
    return VllmopsError(
        "store.schema",
        f"the store at {redact_url(url)} has schema {store_schema}, but this vllmops supports up "
        "to "
        f"{supported_schema}",
        "install the newest vllmops",
    )
