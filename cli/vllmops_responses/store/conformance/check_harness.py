"""What the checks of backends stand on: stores to check, and how a check tells what is wrong."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from .. import backend_factory
from ..backend import Limits, Response
from ..response_store import ResponseStore

ANN, BOB, CID = "a" * 64, "b" * 64, "c" * 64
SHORT_S = 0.6


class CheckFailed(Exception):  # noqa: N818
    """A promise that was not kept, in words."""


class StoreBench:
    """Opens stores on one backend, several at once as several servers do.

    Args:
        url: of a backend that holds nothing else.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.stores: list[ResponseStore] = []

    async def open_store(self, **limits: float) -> ResponseStore:
        """A store on the backend; all of one process's memory share theirs."""
        given = msgspec.convert(limits, Limits)
        store = ResponseStore(backend_factory.make_backend(self.url, given), deadline_s=10)
        if self.stores and self.url.startswith("memory:"):
            store.backend = self.stores[0].backend
        self.stores.append(store)
        await store.open()
        return store

    async def close(self) -> None:
        """Delete everything and close all, also where Ctrl-C comes in between."""
        try:
            await self.delete_and_close()
        except asyncio.CancelledError:
            await self.delete_and_close()
            raise

    async def delete_and_close(self) -> None:
        for number, store in enumerate(self.stores):
            if number == 0:
                async with store.backend_call():
                    await store.backend.delete_store()
            await store.close()
        self.stores.clear()


Check = Callable[[StoreBench], Awaitable[None]]
CHECKS: dict[str, Check] = {}
OF_CONVERSATIONS: set[str] = set()


def register_check(name: str, *, conversations: bool = False) -> Callable[[Check], Check]:
    """Add a check.

    Args:
        name: what it checks, after "a store".
        conversations: whether a backend without conversations is spared it.
    """

    def register(function: Check) -> Check:
        CHECKS[name] = function
        if conversations:
            OF_CONVERSATIONS.add(name)
        return function

    return register


def expect_equal(actual_value: object, expected_value: object, subject: str) -> None:
    if actual_value != expected_value:
        raise CheckFailed(f"{subject}: {actual_value!r}, not {expected_value!r}"[:500])


def make_response(
    name: str = "", *, owner: str = ANN, status: str = "completed", **rest: object
) -> Response:
    """A response as a server makes them."""
    made = {"id": name or f"resp_{secrets.token_hex(8)}", "owner": owner, "status": status, **rest}
    body = {"id": made["id"], "object": "response", "status": status, "output": [], "tools": []}
    return msgspec.convert({"model": "m", "body": msgspec.json.encode(body), **made}, Response)
