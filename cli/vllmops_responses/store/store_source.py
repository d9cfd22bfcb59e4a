"""Stored responses in the store itself, whether or not a server runs: everybody's."""

from __future__ import annotations

import asyncio
from typing import Self

from vllmops.support.errors import VllmopsError, make_usage_error
from vllmops.support.urls import redact_url

from . import backend_factory
from .backend import (
    EVERYBODY,
    Limits,
    Response,
    ResponsePage,
    ResponseQuery,
    StoreStats,
    StoreUnavailable,
)
from .response_source import (
    ChangeResult,
    make_failed_result,
    make_refused_result,
    make_unknown_error,
)
from .response_store import EventBatch, ResponseStore, unpack_events

DEADLINE_S = 10.0
# A store opened here is looked after by its servers: nothing is too much or too old for us.
LIMITS = Limits(max_size=2**53, ttl_s=1e12)


class DirectStore:
    """A store, opened beside the servers that use it.

    Args:
        url: of the store.
        create: make one where there is none.

    Raises:
        VllmopsError: as `backend_factory.make_backend`, and ``usage`` for a store of one process's
            own.
    """

    has_all_owners = True

    def __init__(self, url: str, *, create: bool = False) -> None:
        if url.partition(":")[0] == "memory":
            raise make_usage_error(
                "a memory:// store is inside its server, and no other process can open it",
                "ask the server: -t TARGET",
            )
        self.name = redact_url(url)
        self.create = create
        self.store = ResponseStore(backend_factory.make_backend(url, LIMITS), deadline_s=DEADLINE_S)

    async def __aenter__(self) -> Self:
        """Open it.

        Raises:
            VllmopsError: ``store.none``, or as `ResponseStore.open`.
            StoreUnavailable: it is down.
        """
        if not self.create and not await self.exists():
            raise VllmopsError(
                "store.none",
                f"there is no store at {self.name}",
                "give the URL that its server has for --store; vllmops ps --all lists instances",
            )
        await self.store.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()

    async def exists(self) -> bool:
        backend = self.store.backend
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await backend.exists()
        except TimeoutError as error:
            raise self.make_unavailable_error("it took too long") from error
        except backend.unavailable as error:
            raise self.make_unavailable_error(backend.describe_error(error)) from error

    def make_unavailable_error(self, reason: str) -> StoreUnavailable:
        message = f"{self.name} is unavailable: {reason}"
        return StoreUnavailable(message, hint=self.store.backend.hint)

    async def list_responses(self, query: ResponseQuery) -> ResponsePage:
        return await self.store.list_responses(EVERYBODY, query)

    async def get(self, response_id: str) -> Response:
        found = await self.store.get(EVERYBODY, response_id)
        if found is None:
            raise make_unknown_error(self.name, response_id)
        return found

    async def list_input_items(self, response: Response) -> bytes:
        return response.input

    async def read_events(self, response: Response) -> list[EventBatch]:
        log = await self.store.read_events(EVERYBODY, response.id, -1)
        try:
            return [await unpack_events(chunk) for chunk in log.chunks] if log else []
        except (ValueError, RecursionError) as error:
            raise VllmopsError(
                "responses.damaged", f"the events of {response.id} are damaged: {error}"
            ) from error

    async def cancel(self, response_id: str) -> ChangeResult:
        """Stop a run: whoever runs it looks at the store a few times each second."""
        swap = await self.store.set_status(EVERYBODY, response_id, "cancelled")
        if swap.response is None:
            return make_failed_result(response_id, make_unknown_error(self.name, response_id))
        if swap.response.status != "cancelled":
            return make_refused_result(response_id, f"it is {swap.response.status}")
        return ChangeResult(
            id=response_id, done=True, result="cancelled" if swap.changed else "cancelled before"
        )

    async def delete(self, response_id: str) -> ChangeResult:
        if not await self.store.delete(EVERYBODY, response_id):
            return make_failed_result(response_id, make_unknown_error(self.name, response_id))
        return ChangeResult(id=response_id, done=True, result="deleted")

    async def collect_stats(self) -> StoreStats:
        """What there is, and what had to make room for it."""
        return await self.store.collect_stats(EVERYBODY)
