"""Opens what requests bring sealed, and seals what answers are to carry.

What is large is left to a thread, so that the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ...keys import carrier
from ...keys.carrier import Carrier, CarrierError, Case
from ...keys.ring import Ring
from ...store.settings import Carriers, Format
from .. import keys
from ..log import log
from .carried import Brought, Item, from_messages
from .wire import Refused

T = TypeVar("T")

# Sealed text is so many times shorter than the JSON within, most of the time.
SHRINKS = 4


def seals() -> bool:
    """Whether this server has a key that seals; where not, the log says so, once."""
    ring = keys.ring()
    if ring and ring.primary:
        return True
    if not _told:
        what, hint = (
            ("the keyring has no key that seals", "vllmops keys rotate makes one")
            if ring is not None
            else ("there is no keyring", "vllmops serve makes one, unless it has --keyring none")
        )
        log.warning(
            "vllmops: a client asked for reasoning.encrypted_content and is not given any: %s; %s",
            what,
            hint,
        )
        _told.append(True)
    return False


_told: list[bool] = []


async def opened(brought: Brought, *, model: str, owner: str) -> list[Item]:
    """The items that a carrier holds.

    Args:
        brought: the carrier.
        model: what is served here.
        owner: who brings it.

    Raises:
        Refused: it is not to be taken.
    """
    ring = keys.ring() or Ring()

    def call() -> Carrier:
        return carrier.unseal(brought.text, ring, model=model, owner=owner)

    try:
        return items(await beside(len(brought.text) * SHRINKS, call))
    except CarrierError as error:
        raise refused(error, brought.param) from error


def items(found: Carrier) -> list[Item]:
    """What a carrier holds, as items.

    Raises:
        CarrierError: it is no conversation.
    """
    try:
        made = from_messages(found.history) if found.format == 1 else found.history
    except (AttributeError, LookupError, TypeError):
        made = [None]
    if not all(isinstance(item, dict) for item in made):
        message = "the carrier can't be read: what it holds is no conversation"
        raise CarrierError(Case.MALFORMED, message)
    return made


async def checked(history: list[Item], weight: int) -> int:
    """See that an answer's carrier will hold what was before the answer.

    Args:
        history: the items.
        weight: about as many bytes as they are.

    Returns:
        As many bytes as they are.

    Raises:
        Refused: it won't.
    """
    try:
        return await beside(weight, lambda: carrier.check(history))
    except CarrierError as error:
        raise refused(error, "input") from error


async def sealed(
    history: list[Any], weight: int, carriers: Carriers, *, model: str, owner: str
) -> str | None:
    """A carrier, None where the key that sealed has gone meanwhile.

    Args:
        history: the items, or messages for format 1.
        weight: about as many bytes as they are.
        carriers: which format.
        model: what has made the last of them.
        owner: whose they are.

    Raises:
        Refused: there is no carrier for them.
    """
    ring = keys.ring()
    if not (ring and ring.primary):
        return None

    def call() -> str:
        if carriers.format is Format.SIGNED_V1:
            return carrier.seal_signed(history, ring)
        return carrier.seal(history, ring, model=model, owner=owner, ttl_s=carriers.ttl_s)

    try:
        return await beside(weight, call)
    except CarrierError as error:
        raise refused(error, "include") from error


async def beside(weight: int, call: Callable[[], T]) -> T:
    """What a call returns, made beside the event loop where so many bytes are many."""
    return await asyncio.to_thread(call) if weight > carrier.LARGE else call()


def refused(error: CarrierError, param: str) -> Refused:
    """An error as it is told to a client."""
    message = f"{error.message[0].upper()}{error.message[1:]}."
    return Refused(400, message, param, error.code)
