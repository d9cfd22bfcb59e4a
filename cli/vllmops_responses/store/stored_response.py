"""A response as the store keeps it."""

from __future__ import annotations

import time

import msgspec

RUNNING = frozenset({"queued", "in_progress"})
FINISHED = frozenset({"completed", "incomplete", "failed", "cancelled"})
STATUSES = RUNNING | FINISHED


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response as the store keeps it.

    Args:
        id: as clients know it.
        owner: a hash of the API key that made it, empty where the server has none.
        model: as the client named it.
        status: as of now; the one in `body` may be older.
        created_at: seconds since the epoch. With the id it names one run: a response that was
            deleted and made again under the same id is another one.
        previous_id: the turn before this one.
        error: why it failed, where `body` does not say.
        body: the response object as JSON, with its output.
        input: what this turn added to the conversation, a JSON array; not the turns before.
    """

    id: str
    owner: str
    model: str
    status: str
    created_at: float = msgspec.field(default_factory=time.time)
    previous_id: str | None = None
    error: str = ""
    body: bytes
    input: bytes = b"[]"

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING
