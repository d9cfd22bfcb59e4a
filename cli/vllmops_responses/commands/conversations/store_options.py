"""Where conversations are read: in a store, whether or not a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from vllmops.support.errors import VllmopsError, make_usage_error

from ...store.backend import EVERYBODY, CursorUnknown
from ..responses.response_options import COMPLETION_S
from ..responses.response_rows import format_age
from ..responses.source_options import PAGE, require_single_source, retry_while_unavailable

if TYPE_CHECKING:
    from ...store.conversation_backend import Conversation, ConversationItem
    from ...store.conversation_store import ConversationStore

# Of an export, in bytes: a conversation has as many items as its images leave room for.
LONGEST_LINE = 512 << 20

Store = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="The store itself: sqlite:///FILE, postgresql://, redis://."
    ),
]


def complete_conversation_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest conversations, for completion; none if anything fails."""

    async def load_newest() -> list[Conversation]:
        target, store = ctx.params.get("target"), ctx.params.get("store")
        async with asyncio.timeout(COMPLETION_S), open_conversations(target, store) as (_, kept):
            return await kept.list_conversations(EVERYBODY, None, PAGE)

    with suppress(Exception):
        named = ctx.params.get("ids") or ()
        return [
            (one.id, f"{one.size} items, {format_age(one.created_at)}")
            for one in asyncio.run(load_newest())
            if one.id.startswith(incomplete) and one.id not in named
        ]
    return []


@asynccontextmanager
async def open_conversations(
    target: str | None, store: str | None, *, create: bool = False
) -> AsyncIterator[tuple[str, ConversationStore]]:
    """The name of a store, and its conversations, those of all API keys.

    Args:
        target: a server, whose store is meant.
        store: the URL of one.
        create: make one where there is none.

    Raises:
        VllmopsError: ``usage``, ``store.no-conversations``, or as `resolve_endpoint_with_store` and
            `DirectStore` do.
        StoreUnavailable: it is down.
    """
    from ...store.store_source import DirectStore  # noqa: PLC0415

    async with DirectStore(find_store_url(target, store), create=create) as kept:
        yield kept.name, kept.store.conversations


def find_store_url(target: str | None, store: str | None) -> str:
    """The URL of the store that the options mean.

    Raises:
        VllmopsError: ``usage``, or as `resolve_endpoint_with_store` does.
    """
    if store is not None:
        require_single_source(target)
    else:
        from vllmops.servers.target_endpoint import resolve_endpoint_with_store  # noqa: PLC0415

        server = resolve_endpoint_with_store(target)
        if server.store is None:
            raise make_usage_error(
                f"the URL of {server.name}'s store is not known here", "--store URL"
            )
        store = server.store
    if store.partition(":")[0] == "memory":
        raise make_usage_error(
            "a memory:// store is inside its server, and no other process can open it",
            "vllmops serve --store sqlite:///FILE keeps conversations in a file",
        )
    return store


async def iterate_conversations(
    store: ConversationStore, after_id: str | None = None, page: int = PAGE
) -> AsyncIterator[Conversation]:
    """All conversations, the newest first, even if some are deleted meanwhile.

    Args:
        store: where they are.
        after_id: only those behind this one.
        page: how many are read at once.

    Raises:
        CursorUnknown: ``after_id`` is none.
    """
    trail, seen = [after_id] if after_id else [], set[str]()
    while True:
        last = trail[-1] if trail else None
        try:
            found = await retry_while_unavailable(
                partial(store.list_conversations, EVERYBODY, last, page)
            )
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


async def load_items(
    store: ConversationStore, conversation_id: str
) -> list[ConversationItem] | None:
    """All items of a conversation, in order; None where it is gone.

    Raises:
        ValueError: one of them is damaged.
        CursorUnknown: somebody takes items out of it meanwhile.
    """
    found: list[ConversationItem] = []
    while True:
        page = await retry_while_unavailable(
            partial(
                store.list_items,
                EVERYBODY,
                conversation_id,
                after_id=found[-1].id if found else None,
                limit=PAGE,
                descending=False,
            )
        )
        if page is None:
            return None
        found += page.entries
        if not page.has_more:
            return found


def make_unknown_conversation_error(name: str, *ids: str) -> VllmopsError:
    """The error for conversations that are not in a store."""
    return VllmopsError(
        "conversations.unknown",
        f"{name} has no conversation {', '.join(ids)}",
        "vllmops conversations list",
    )
