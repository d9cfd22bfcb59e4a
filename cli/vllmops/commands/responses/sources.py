"""Where responses are read: a server or a store; all of them page by page."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...errors import Exit, VllmopsError
from ...store.backend import CursorUnknown, Query, Response, StoreUnavailable

if TYPE_CHECKING:
    from ...vllm_api.responses import Source

T = TypeVar("T")
PAGE = 100
# Requests that are on their way at once.
AT_ONCE = 16
# A store or a server that says it is unavailable is asked again, each time after what it says.
TRIES = 5


def source(target: str | None, store: str | None, *, create: bool = False) -> Source:
    """Where responses are looked at.

    Raises:
        VllmopsError: ``usage``, or as `place` and `Storage` do.
    """
    if store is None:
        from ...vllm_api.responses import Http, place  # noqa: PLC0415 - brings httpx

        return Http(place(target))
    either(target)
    from ...store.direct import Storage  # noqa: PLC0415

    return Storage(store, create=create)


def either(target: str | None) -> None:
    """Refuse a target beside a store, unless it is the environment's.

    Raises:
        VllmopsError: ``usage``.
    """
    if target and target != os.environ.get("VLLMOPS_TARGET"):
        raise usage("--target names a server, and --store asks none", "one of them")


async def walk(source: Source, query: Query) -> AsyncIterator[list[Response]]:
    """All responses, page by page, though some go meanwhile.

    Args:
        source: where.
        query: which; its ``limit`` is a page's.

    Raises:
        CursorUnknown: there is no response to begin behind.
        VllmopsError: ``responses.refused``, the list has no end.
    """
    trail = [query.after] if query.after else []
    told: set[str] = set()
    asked: set[str | None] = set()
    while True:
        at = msgspec.structs.replace(query, after=trail[-1] if trail else None)
        try:
            page = await patiently(partial(source.page, at))
        except CursorUnknown:
            if not told:
                raise
            trail.pop()  # it is gone; what was before it may still be there
            continue
        yield [each for each in page.responses if not each.id or each.id not in told]
        found = [each.id for each in page.responses if each.id]
        new = set(found) - told
        told |= new
        trail += found
        if not page.more or not found:
            return
        if not new and at.after in asked:
            raise VllmopsError(
                "responses.refused", f"{source.name} gives the same part of its list for ever"
            )
        asked.add(at.after)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call a few times while the store is unavailable.

    Raises:
        StoreUnavailable: it still is.
    """
    for _ in range(TRIES):
        try:
            return await call()
        except StoreUnavailable as error:
            await asyncio.sleep(error.retry_after_s)
    return await call()


async def spread(each: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do something to each, several at once.

    Raises:
        VllmopsError: of the first that raises one; no others are begun then.
    """
    left = iter(each)

    async def some() -> None:
        for one in left:
            await work(one)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def usage(message: str, hint: str) -> VllmopsError:
    return VllmopsError("usage", message, hint, exit_code=Exit.USAGE)
