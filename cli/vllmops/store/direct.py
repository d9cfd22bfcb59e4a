"""Stored responses in the store itself, whether or not a server runs: everybody's."""

from __future__ import annotations

import asyncio
from typing import Self

from ..errors import VllmopsError, usage
from . import opening
from .backend import EVERYBODY, Limits, Page, Query, Response, Stats, StoreUnavailable
from .source import ChangeResult, failed, refused, unknown
from .store import Events, ResponseStore, logged
from .urls import shown

DEADLINE_S = 10.0
# A store opened here is looked after by its servers: nothing is too much or too old for us.
LIMITS = Limits(max_size=2**53, ttl_s=1e12)


class Storage:
    """A store, opened beside the servers that use it.

    Args:
        url: of the store.
        create: make one where there is none.

    Raises:
        VllmopsError: as `opening.backend`, and ``usage`` for a store of one process's own.
    """

    whole = True

    def __init__(self, url: str, *, create: bool = False) -> None:
        if url.partition(":")[0] == "memory":
            raise usage(
                "a memory:// store is inside its server, and no other process can open it",
                "ask the server: -t TARGET",
            )
        self.name = shown(url)
        self.create = create
        self.store = ResponseStore(opening.backend(url, LIMITS), deadline_s=DEADLINE_S)

    async def __aenter__(self) -> Self:
        """Open it.

        Raises:
            VllmopsError: ``store.none``, or as `ResponseStore.open`.
            StoreUnavailable: it is down.
        """
        if not self.create and not await self.there():
            raise VllmopsError(
                "store.none",
                f"there is no store at {self.name}",
                "give the URL that its server has for --store; vllmops ps --all lists instances",
            )
        await self.store.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()

    async def there(self) -> bool:
        backend = self.store.backend
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await backend.there()
        except TimeoutError as error:
            raise self.unavailable("it took too long") from error
        except backend.unavailable as error:
            raise self.unavailable(backend.why(error)) from error

    def unavailable(self, why: str) -> StoreUnavailable:
        message = f"{self.name} is unavailable: {why}"
        return StoreUnavailable(message, hint=self.store.backend.hint)

    async def page(self, query: Query) -> Page:
        return await self.store.page(EVERYBODY, query)

    async def get(self, response_id: str) -> Response:
        found = await self.store.get(EVERYBODY, response_id)
        if found is None:
            raise unknown(self.name, response_id)
        return found

    async def items(self, response: Response) -> bytes:
        return response.input

    async def events(self, response: Response) -> list[Events]:
        log = await self.store.log(EVERYBODY, response.id, -1)
        try:
            return [await logged(chunk) for chunk in log.chunks] if log else []
        except (ValueError, RecursionError) as error:
            raise VllmopsError(
                "responses.damaged", f"the events of {response.id} are damaged: {error}"
            ) from error

    async def cancel(self, response_id: str) -> ChangeResult:
        """Stop a run: whoever runs it looks at the store a few times each second."""
        swap = await self.store.set_status(EVERYBODY, response_id, "cancelled")
        if swap.now is None:
            return failed(response_id, unknown(self.name, response_id))
        if swap.now.status != "cancelled":
            return refused(response_id, f"it is {swap.now.status}")
        return ChangeResult(
            id=response_id, done=True, result="cancelled" if swap.changed else "cancelled before"
        )

    async def delete(self, response_id: str) -> ChangeResult:
        if not await self.store.delete(EVERYBODY, response_id):
            return failed(response_id, unknown(self.name, response_id))
        return ChangeResult(id=response_id, done=True, result="deleted")

    async def stats(self) -> Stats:
        """What there is, and what had to make room for it."""
        return await self.store.stats(EVERYBODY)
