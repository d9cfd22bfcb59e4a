"""Where conversations are read: in a store, whether or not a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import VllmopsError, usage
from ...store.backend import EVERYBODY, CursorUnknown
from ..responses.entries import age
from ..responses.selection import COMPLETION_S
from ..responses.sources import PAGE, either, retried

if TYPE_CHECKING:
    from ...store.conversation_store import ConversationStore
    from ...store.conversations import Conversation, Entry

# Of an export, in bytes: a conversation has as many items as its images leave room for.
LONGEST_LINE = 512 << 20

Store = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="The store itself: sqlite:///FILE, postgresql://, redis://."
    ),
]


def every_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest conversations, for completion; none if anything fails."""

    async def newest() -> list[Conversation]:
        target, store = ctx.params.get("target"), ctx.params.get("store")
        async with asyncio.timeout(COMPLETION_S), opened(target, store) as (_, kept):
            return await kept.list(EVERYBODY, None, PAGE)

    with suppress(Exception):
        named = ctx.params.get("ids") or ()
        return [
            (one.id, f"{one.size} items, {age(one.created_at)}")
            for one in asyncio.run(newest())
            if one.id.startswith(incomplete) and one.id not in named
        ]
    return []


@asynccontextmanager
async def opened(
    target: str | None, store: str | None, *, create: bool = False
) -> AsyncIterator[tuple[str, ConversationStore]]:
    """The name of a store, and its conversations, those of all API keys.

    Args:
        target: a server, whose store is meant.
        store: the URL of one.
        create: make one where there is none.

    Raises:
        VllmopsError: ``usage``, ``store.no-conversations``, or as `endpoint` and `Storage` do.
        StoreUnavailable: it is down.
    """
    from ...store.direct import Storage  # noqa: PLC0415

    async with Storage(place(target, store), create=create) as kept:
        yield kept.name, kept.store.conversations


def place(target: str | None, store: str | None) -> str:
    """The URL of the store that the options mean.

    Raises:
        VllmopsError: ``usage``, or as `endpoint` does.
    """
    if store is not None:
        either(target)
    else:
        from ...instances.endpoint import behind  # noqa: PLC0415

        server = behind(target)
        if server.store is None:
            raise usage(f"the URL of {server.name}'s store is not known here", "--store URL")
        store = server.store
    if store.partition(":")[0] == "memory":
        raise usage(
            "a memory:// store is inside its server, and no other process can open it",
            "vllmops serve --store sqlite:///FILE keeps conversations in a file",
        )
    return store


async def walk(
    kept: ConversationStore, after: str | None = None, page: int = PAGE
) -> AsyncIterator[Conversation]:
    """All conversations, the newest first, even if some are deleted meanwhile.

    Args:
        kept: where they are.
        after: only those behind this one.
        page: how many are read at once.

    Raises:
        CursorUnknown: ``after`` is none.
    """
    trail, seen = [after] if after else [], set[str]()
    while True:
        last = trail[-1] if trail else None
        try:
            found = await retried(partial(kept.list, EVERYBODY, last, page))
        except CursorUnknown:
            if not seen:
                raise
            trail.pop()  # it was deleted; the one before it may still be there
            continue
        for one in found:
            if one.id not in seen:
                seen.add(one.id)
                trail.append(one.id)
                yield one
        if len(found) < page or trail[-1:] == [last]:
            return


async def items(kept: ConversationStore, conversation_id: str) -> list[Entry] | None:
    """All items of a conversation, in order; None where it is gone.

    Raises:
        ValueError: one of them is damaged.
        CursorUnknown: somebody takes items out of it meanwhile.
    """
    found: list[Entry] = []
    while True:
        page = await retried(
            partial(
                kept.page,
                EVERYBODY,
                conversation_id,
                after=found[-1].id if found else None,
                limit=PAGE,
                descending=False,
            )
        )
        if page is None:
            return None
        found += page.entries
        if not page.more:
            return found


def unknown(name: str, *ids: str) -> VllmopsError:
    """The error for conversations that are not in a store."""
    return VllmopsError(
        "conversations.unknown",
        f"{name} has no conversation {', '.join(ids)}",
        "vllmops conversations list",
    )
