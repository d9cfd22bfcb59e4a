"""The backend ``memory://``: this process alone, gone with it."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection
from itertools import takewhile

from msgspec.structs import replace

from ..backend import (
    EVERYBODY,
    FINISHED,
    GONE,
    RUNNING,
    CursorUnknown,
    EventChunk,
    EventLog,
    Limits,
    Response,
    ResponsePage,
    ResponseQuery,
    StatusChange,
    StoreStats,
    SweepResult,
)
from .memory_conversations import MemoryConversations

# All logs together, in bytes: the one that was written to longest ago goes first.
LOGS_BYTES = 64 << 20


class OwnerResponses:
    """The ids of one owner's responses, the least recently used first."""

    __slots__ = ("finished_ids", "under_way")

    def __init__(self) -> None:
        self.finished_ids: OrderedDict[str, None] = OrderedDict()
        self.under_way: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.finished_ids) + len(self.under_way)

    def remove_id(self, response_id: str) -> None:
        self.finished_ids.pop(response_id, None)
        self.under_way.pop(response_id, None)


class Memory(MemoryConversations):
    """Dictionaries, the least recently used first; one event loop alone may use it."""

    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, limits)
        self.clear()

    def clear(self) -> None:
        self.responses: dict[str, Response] = {}
        self.shares: dict[str, OwnerResponses] = {}
        # Owners by how many they have; of as many the one first who has had so many for longest.
        self.levels: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self.largest_count = 0
        self.last_use_by_id: dict[str, float] = {}
        self.leases: dict[str, float] = {}
        # By creation. What was deleted stays in it until there is too much of that.
        self.order: list[tuple[float, str]] = []
        self.logs: OrderedDict[str, list[EventChunk]] = OrderedDict()
        self.last_write_by_id: dict[str, float] = {}
        self.log_bytes = 0
        self.evictions = 0
        self.stored_conversations = OrderedDict()

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def delete_store(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self.responses)

    async def create(self, response: Response) -> bool:
        if self.peek_response(response.id) is not None:
            return False
        key = response.created_at, response.id
        at = bisect_left(self.order, key)
        if self.order[at : at + 1] != [key]:  # which a deleted one may have left
            self.order.insert(at, key)
        self.store_response(response)
        while len(self.shares[response.owner]) > self.limits.owner_limit:
            self.evict_lru(response.owner, response.id)
        while len(self) > self.limits.max_size:
            self.evict_lru(self.find_largest_owner(response), response.id)
        return True

    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        now = self.find_run(response)
        if now is None or (now.status in unless_status and not has_lapsed(now)):
            return False
        self.store_response(
            replace(now, body=response.body, status=response.status, error=response.error)
        )
        return True

    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed_statuses: Collection[str] = RUNNING,
        error: str = "",
    ) -> StatusChange:
        now = self.find_response(owner, response_id)
        if now is None or now.status not in allowed_statuses:
            return StatusChange(False, now)
        changed = replace(now, status=status, error=error)
        self.store_response(changed)
        return StatusChange(True, changed)

    async def get(self, owner: str, response_id: str) -> Response | None:
        if found := self.find_response(owner, response_id):
            self.mark_used(found)
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        if self.find_response(owner, response_id) is None:
            return False
        self.remove_response(response_id)
        return True

    async def list_responses(self, owner: str, query: ResponseQuery) -> ResponsePage:
        lowest, highest = (
            self.find_cursor(owner, query.after_id),
            self.find_cursor(owner, query.before_id),
        )
        if query.descending:
            lowest, highest = highest, lowest
        low = bisect_right(self.order, lowest) if lowest else 0
        high = bisect_left(self.order, highest) if highest else len(self.order)
        upwards = query.descending == query.is_backward
        found: list[Response] = []
        for at in range(low, high) if upwards else range(high - 1, low - 1, -1):
            created_at, response_id = self.order[at]
            response = self.find_response(owner, response_id)
            if (
                response is not None
                and response.created_at == created_at
                and query.status in {None, response.status}
                and query.model in {None, response.model}
            ):
                found.append(response)
                if len(found) > query.limit:
                    break
        page = found[: query.limit]
        return ResponsePage(page[::-1] if query.is_backward else page, len(found) > query.limit)

    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        found: list[Response] = []
        seen: set[str] = set()
        at: str | None = response_id
        while at is not None and at not in seen and (turn := self.find_response(owner, at)):
            found.append(turn)
            seen.add(at)
            at = turn.previous_id
        for turn in reversed(found):
            self.mark_used(turn)
        return found[::-1]

    async def touch(self, owner: str, ids: Collection[str]) -> None:
        for response_id in ids:
            if found := self.find_response(owner, response_id):
                self.mark_used(found)

    async def select_running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        found = [response for name in ids if (response := self.find_response(EVERYBODY, name))]
        if renew:
            for response in found:
                if response.is_running:
                    self.renew_lease(response.id)
        return {response.id for response in found if response.is_running or has_lapsed(response)}

    async def append_events(self, response: Response, chunk: EventChunk) -> bool:
        if self.find_run(response) is None:
            return False
        chunks = self.logs.setdefault(response.id, [])
        if all(stored.first_number != chunk.first_number for stored in reversed(chunks)):
            chunks.append(chunk)
            self.log_bytes += len(chunk.events)
        self.logs.move_to_end(response.id)
        self.last_write_by_id[response.id] = time.monotonic()
        while chunks[0].last_number <= chunk.last_number - self.limits.max_events:
            self.log_bytes -= len(chunks.pop(0).events)
        while self.log_bytes > LOGS_BYTES and len(self.logs) > 1:
            self.remove_event_log(next(iter(self.logs)))
        return True

    async def read_events(self, owner: str, response_id: str, after_number: int) -> EventLog | None:
        found = self.find_response(owner, response_id)
        if found is None:
            return None
        chunks = self.logs.get(response_id, [])
        return EventLog(
            [chunk for chunk in chunks if chunk.last_number > after_number], found.is_running
        )

    async def sweep(self) -> SweepResult:
        before = self.evictions
        failed = [
            response_id for response_id in list(self.leases) if self.expire_lease(response_id)
        ]
        self.expire_conversations()
        oldest = time.time() - self.limits.ttl_s
        expired = [
            response_id
            for share in self.shares.values()
            for response_id in takewhile(
                lambda response_id: self.last_use_by_id[response_id] < oldest, share.finished_ids
            )
        ]
        for response_id in expired:
            self.remove_response(response_id)
        written = time.monotonic() - self.limits.events_kept_s
        for response_id in [
            i
            for i, at in self.last_write_by_id.items()
            if at < written and not self.responses[i].is_running
        ]:
            self.remove_event_log(response_id)
        return SweepResult(len(expired), self.evictions - before, len(failed))

    async def collect_stats(self, owner: str) -> StoreStats:
        await self.sweep()
        found = [
            response for response in self.responses.values() if owner in {EVERYBODY, response.owner}
        ]
        return StoreStats(
            statuses=dict(Counter(response.status for response in found)),
            models=dict(Counter(response.model for response in found)),
            bytes=sum(len(response.body) + len(response.input) for response in found),
            event_bytes=self.log_bytes if owner == EVERYBODY else None,
            oldest=min((response.created_at for response in found), default=None),
            evictions=self.evictions,
            owners=dict(Counter(response.owner for response in found).most_common()),
        )

    async def list_caveats(self) -> list[str]:
        return ["everything is gone with the process"]

    def peek_response(self, response_id: str) -> Response | None:
        return self.responses.get(response_id)

    def find_response(self, owner: str, response_id: str) -> Response | None:
        """What the owner sees, its lease looked at."""
        found = self.peek_response(response_id)
        if found is None or owner not in {EVERYBODY, found.owner}:
            return None
        return self.peek_response(response_id) if self.expire_lease(response_id) else found

    def find_run(self, response: Response) -> Response | None:
        """What there is of the very run that a response belongs to."""
        found = self.find_response(response.owner, response.id)
        return found if found and found.created_at == response.created_at else None

    def store_response(self, response: Response) -> None:
        """Put it where it belongs by its status, as the last used."""
        share = self.shares.setdefault(response.owner, OwnerResponses())
        before = len(share)
        share.remove_id(response.id)
        (share.under_way if response.is_running else share.finished_ids)[response.id] = None
        self.responses[response.id] = response
        self.update_owner_count(response.owner, before, len(share))
        if response.is_running:
            self.renew_lease(response.id)
        else:
            self.leases.pop(response.id, None)
        self.last_use_by_id[response.id] = time.time()

    def update_owner_count(self, owner: str, old_count: int, new_count: int) -> None:
        """Note how many an owner has."""
        if old_count == new_count:
            return
        self.levels[old_count].pop(owner, None)
        if not self.levels[old_count]:
            del self.levels[old_count]
        if new_count:
            self.levels[new_count][owner] = None
        else:
            del self.shares[owner]
        # One more or one less: who is fullest has no more than one more or less either.
        self.largest_count = max(self.largest_count, new_count)
        if self.largest_count not in self.levels:
            self.largest_count -= 1

    def mark_used(self, response: Response) -> None:
        share = self.shares[response.owner]
        (share.under_way if response.is_running else share.finished_ids).move_to_end(response.id)
        self.last_use_by_id[response.id] = time.time()

    def renew_lease(self, response_id: str) -> None:
        self.leases[response_id] = time.monotonic() + self.limits.lease_s

    def expire_lease(self, response_id: str) -> bool:
        """Fail a run whose lease is over; whether it was."""
        until = self.leases.get(response_id)
        if until is None or until > time.monotonic():
            return False
        self.store_response(replace(self.responses[response_id], status="failed", error=GONE))
        return True

    def find_largest_owner(self, spared_response: Response) -> str:
        """Who has most, but for one response that is to stay."""
        first = next(iter(self.levels[self.largest_count]))
        if self.largest_count > 1 or first != spared_response.owner:
            return first
        return next(owner for owner in self.levels[1] if owner != first)

    def evict_lru(self, owner: str, spared_id: str) -> None:
        """Drop what an owner used longest ago, and something that runs only in need."""
        share = self.shares[owner]
        self.remove_response(
            next(
                i
                for group in (share.finished_ids, share.under_way)
                for i in group
                if i != spared_id
            )
        )
        self.evictions += 1

    def remove_response(self, response_id: str) -> None:
        owner = self.responses.pop(response_id).owner
        share = self.shares[owner]
        before = len(share)
        share.remove_id(response_id)
        self.update_owner_count(owner, before, len(share))
        self.leases.pop(response_id, None)
        del self.last_use_by_id[response_id]
        self.remove_event_log(response_id)
        if len(self.order) > 2 * len(self) + 64:
            self.order = sorted(
                (response.created_at, response.id) for response in self.responses.values()
            )

    def remove_event_log(self, response_id: str) -> None:
        self.log_bytes -= sum(len(chunk.events) for chunk in self.logs.pop(response_id, ()))
        self.last_write_by_id.pop(response_id, None)

    def find_cursor(self, owner: str, response_id: str | None) -> tuple[float, str] | None:
        if response_id is None:
            return None
        found = self.find_response(owner, response_id)
        if found is None:
            raise CursorUnknown(response_id)
        return found.created_at, found.id


def has_lapsed(response: Response) -> bool:
    """Whether it was taken for lost, and its outcome may yet come."""
    return response.status == "failed" and response.error == GONE
