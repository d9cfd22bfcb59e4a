"""Where responses are read: a server or a store; all of them page by page."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vllmops.support.errors import VllmopsError, make_usage_error

from ...store.backend import CursorUnknown, Response, ResponseQuery, StoreUnavailable

if TYPE_CHECKING:
    from ...store.response_source import ResponseSource

T = TypeVar("T")
PAGE = 100
# Pages of a server's list, which is endless after that; whose list is longer opens its store.
PAGES = 10_000
# Concurrent requests.
AT_ONCE = 16
# Retries while a store or server is unavailable, each after the delay that it names, up to a limit.
TRIES = 5
LONGEST_PAUSE_S = 1.5


def open_source(target: str | None, store: str | None, *, create: bool = False) -> ResponseSource:
    """The source of responses: a server, or a store opened directly.

    Raises:
        VllmopsError: ``usage``, or as `resolve_endpoint` and `DirectStore` do.
    """
    if store is None:
        from vllmops.servers.target_endpoint import resolve_endpoint  # noqa: PLC0415

        from ...client import HttpResponseSource  # noqa: PLC0415 - brings httpx

        return HttpResponseSource(resolve_endpoint(target))
    require_single_source(target)
    from ...store.store_source import DirectStore  # noqa: PLC0415

    return DirectStore(store, create=create)


def require_single_source(target: str | None) -> None:
    """Refuse a target together with a store, unless the target is from the environment.

    Raises:
        VllmopsError: ``usage``.
    """
    if target and target != os.environ.get("VLLMOPS_TARGET"):
        raise make_usage_error("--target and --store cannot be combined", "give one of them")


def make_unknown_cursor_error(source_name: str, kind: str, cursor: str | None) -> VllmopsError:
    """The error of a list that is to go on after what is not there."""
    problem = f"--after: {source_name} has no {kind} {cursor!r}"
    return make_usage_error(problem, "leave --after out to begin with the newest")


async def iterate_pages(
    source: ResponseSource, query: ResponseQuery
) -> AsyncIterator[list[Response]]:
    """All responses, page by page, even if some are deleted meanwhile.

    Args:
        source: where the responses are.
        query: which responses; its ``limit`` is the page size.

    Raises:
        CursorUnknown: ``query.after_id`` names no response.
        VllmopsError: ``responses.refused``, the list has no end.
    """
    trail = [query.after_id] if query.after_id else []
    listed: set[str] = set()
    asked: set[str | None] = set()
    for number in itertools.count(1):
        at = msgspec.structs.replace(query, after_id=trail[-1] if trail else None)
        try:
            page = await retry_while_unavailable(partial(source.list_responses, at))
        except CursorUnknown:
            if not listed:
                raise
            trail.pop()  # it was deleted; the response before it may still exist
            continue
        yield [
            response for response in page.responses if not response.id or response.id not in listed
        ]
        ids = [response.id for response in page.responses if response.id]
        new = set(ids) - listed
        listed |= new
        trail += ids
        if not page.has_more or not ids:
            return
        if (not new and at.after_id in asked) or (number >= PAGES and not source.has_all_owners):
            raise VllmopsError("responses.refused", f"{source.name} lists responses endlessly")
        asked.add(at.after_id)


async def retry_while_unavailable(call: Callable[[], Awaitable[T]]) -> T:
    """Call again, a few times, while the store is unavailable.

    Raises:
        StoreUnavailable: it still is.
    """
    for _ in range(TRIES):
        try:
            return await call()
        except StoreUnavailable as error:
            await asyncio.sleep(min(error.retry_after_s, LONGEST_PAUSE_S))
    return await call()


async def run_concurrently(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Apply an action to all items, several at once.

    Raises:
        VllmopsError: of the first action that fails; no further ones start.
    """
    left = iter(items)

    async def run_worker() -> None:
        for one in left:
            await work(one)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(run_worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
