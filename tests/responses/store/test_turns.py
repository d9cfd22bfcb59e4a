"""A turn of a conversation takes PostgreSQL two statements, and misses nothing between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Response
from vllmops_responses.store.backends.postgresql import Postgresql
from vllmops_responses.store.conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
    ItemAddition,
)

from ...support.databases import Server
from ...support.extent import programs

pytestmark = programs


def make_item_addition(*names: str, holder: str = "") -> ItemAddition:
    entries = [ConversationItem(name, b"{}") for name in names]
    return ItemAddition(conversation_id="conv", owner="me", entries=entries, holder=holder)


def response(name: str, status: str = "completed") -> Response:
    return Response(id=name, owner="me", model="m", status=status, created_at=1.0, body=b"{}")


def with_conversation(server: Server, work: Callable[[Postgresql], Awaitable[None]]) -> None:
    async def run() -> None:
        backend = backend_factory.make_backend(f"{server.url}?namespace=t{time.time_ns()}")
        assert isinstance(backend, Postgresql)
        await backend.open()
        try:
            await backend.create_conversation(Conversation(id="conv", owner="me"), [])
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(run())


def test_a_turn_takes_two_statements(shared_servers: dict[str, Server]) -> None:
    async def take_turns(backend: Postgresql) -> None:
        sent: list[str] = []
        lend = backend.pool.lend

        @asynccontextmanager
        async def lend_and_log() -> Any:
            async with lend() as connection:
                with connection.query_logger(lambda record: sent.append(record.query)):
                    yield connection

        backend.pool.lend = lend_and_log  # type: ignore[method-assign]
        run = response("r2", "in_progress")
        await backend.create(run)
        for number, (stored, new) in enumerate(
            [(response("r1"), True), (response("r2"), False), (None, True)]
        ):
            sent.clear()
            outcome, entries = await backend.hold_conversation("me", "conv", "h")
            assert (outcome, len(entries)) == (ConversationResult.DONE, 2 * number)
            more = make_item_addition(f"q{number}", f"a{number}", holder="h")
            assert await backend.add_items(more, stored, is_new=new) is ConversationResult.DONE
            # The driver asks for the types of columns, once on each connection.
            assert len([query for query in sent if backend.name in query]) == 2

    with_conversation(shared_servers["postgresql"], take_turns)


def test_waiting_hold_reads_items_added_meanwhile(
    shared_servers: dict[str, Server],
) -> None:
    """A statement that waits sees the database as it was when it began."""

    async def hold_while_adding(backend: Postgresql) -> None:
        async with backend.pool.lend() as connection:
            transaction = connection.transaction()
            await transaction.start()
            given = ("conv", "me", "", 1)
            ((place, _),) = await connection.fetch(backend.text["change entries"], *given)
            columns = [["conv"], [place - 1], ["a"], [False], [b"{}"]]
            await connection.fetch(backend.text["add entries"], *columns)
            holding = asyncio.create_task(backend.hold_conversation("me", "conv", "h"))
            while not await has_waiting_statement(backend):
                pass
            await transaction.commit()
        assert await holding == (ConversationResult.DONE, [ConversationItem("a", b"{}")])

    with_conversation(shared_servers["postgresql"], hold_while_adding)


async def has_waiting_statement(backend: Postgresql) -> bool:
    """Whether a statement waits for a row."""
    text = "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
    return bool(await backend.execute(text))
