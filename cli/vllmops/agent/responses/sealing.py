"""Opens the carriers of requests, and seals the carriers of answers.

A large one is processed in a thread, so that it does not block the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ...keys import carrier
from ...keys.carrier import Carrier, CarrierError, Case
from ...keys.ring import Ring
from ...store.settings import Carriers, Format
from .. import tracing
from ..counting import count_carrier
from ..log import log
from .carried import Brought, Item, from_messages
from .wire import Refused

T = TypeVar("T")

# A carrier is usually this many times shorter than the JSON in it.
COMPRESSION = 4


def can_seal(ring: Ring | None) -> bool:
    """Whether there is a key that seals; where there is none, the log says so once."""
    if ring and ring.primary:
        return True
    if not _warned:
        what, hint = (
            ("the keyring has no primary key", "create one with: vllmops keys rotate")
            if ring is not None
            else ("there is no keyring", "vllmops serve creates one, unless --keyring is none")
        )
        log.warning(
            "vllmops: a client requests reasoning.encrypted_content and gets none: %s; hint: %s",
            what,
            hint,
        )
        _warned.append(True)
    return False


_warned: list[bool] = []


async def opened(brought: Brought, ring: Ring | None, *, model: str, owner: str) -> list[Item]:
    """The items that a carrier holds.

    Args:
        brought: the carrier.
        ring: the keys of this server.
        model: the model that this server serves.
        owner: who sends the carrier.

    Raises:
        Refused: the carrier is not accepted.
    """

    def call() -> Carrier:
        return carrier.unseal(brought.text, ring or Ring(), model=model, owner=owner)

    try:
        with tracing.span("carrier.open", {}) as add:
            add(len(brought.text))
            found = items(await off_loop(len(brought.text) * COMPRESSION, call))
        count_carrier("opened")
        return found
    except CarrierError as error:
        count_carrier("opened", error)
        raise refused(error, brought.param, brought.what) from error


def items(opened: Carrier) -> list[Item]:
    """The history of a carrier as items.

    Raises:
        CarrierError: it is no conversation.
    """
    try:
        made = from_messages(opened.history) if opened.format == 1 else opened.history
    except (AttributeError, LookupError, TypeError):
        made = [None]
    if not all(isinstance(item, dict) for item in made):
        message = "the carrier can't be read: it does not hold a conversation"
        raise CarrierError(Case.MALFORMED, message)
    return made


async def checked(history: list[Item], size: int) -> int:
    """Check that a carrier can hold a conversation, before the model adds its answer.

    Args:
        history: the items.
        size: roughly, in bytes.

    Returns:
        Their exact size in bytes.

    Raises:
        Refused: they are too large.
    """
    try:
        return await off_loop(size, lambda: carrier.check(history))
    except CarrierError as error:
        raise refused(error, "input") from error


async def sealed(
    history: list[Any],
    size: int,
    carriers: Carriers,
    ring: Ring | None,
    *,
    model: str,
    owner: str,
) -> str | None:
    """A carrier, None if there is no key that seals any more.

    Args:
        history: the items, or messages for format 1.
        size: roughly, in bytes.
        carriers: how this server writes carriers.
        ring: the keys of this server.
        model: the model that made the answer.
        owner: whose conversation it is.

    Raises:
        Refused: no carrier can hold them.
    """
    if not (ring and ring.primary):
        return None

    def call() -> str:
        if carriers.format is Format.SIGNED_V1:
            return carrier.seal_signed(history, ring)
        return carrier.seal(history, ring, model=model, owner=owner, ttl_s=carriers.ttl_s)

    try:
        with tracing.span("carrier.seal", {}) as add:
            text = await off_loop(size, call)
            add(len(text))
        count_carrier("sealed")
        return text
    except CarrierError as error:
        count_carrier("sealed", error)
        raise refused(error, "include") from error


async def off_loop(size: int, call: Callable[[], T]) -> T:
    """What a call returns; made in a thread where it processes more bytes than `carrier.LARGE`."""
    return await asyncio.to_thread(call) if size > carrier.LARGE else call()


def refused(error: CarrierError, param: str, what: str = "") -> Refused:
    """The refusal that a client gets for an error.

    Args:
        error: what is wrong with a carrier.
        param: the request parameter that contains it.
        what: what to call it, where the error does not tell.
    """
    if what or error.message.startswith("it "):
        message = f"The {what or 'carrier'} can't be opened: {error.message}."
    else:
        message = f"{error.message}."
    return Refused(400, message[0].upper() + message[1:], param, error.code)


def check_can_seal(ring: Ring | None) -> None:
    """Check that there is a key that seals a compaction.

    Raises:
        Refused: there is none.
    """
    if not (ring and ring.primary):
        hint = (
            "create a primary key with: vllmops keys rotate"
            if ring is not None
            else "create one with `vllmops keygen --out FILE` and start the server with: "
            "vllmops serve --keyring FILE"
        )
        what = "its keyring has no primary key" if ring is not None else "it has no keyring"
        raise Refused(400, f"This server can't seal a compaction, because {what}; {hint}")
