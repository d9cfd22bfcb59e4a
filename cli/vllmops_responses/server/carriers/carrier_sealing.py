"""Opens the carriers of requests, and seals the carriers of answers.

A large one is processed in a thread, so that it does not block the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from vllmops.agent.log import log
from vllmops.model.environment import CarrierFormat

from ...keys import carrier
from ...keys.carrier import Carrier, CarrierError, CarrierProblem
from ...keys.keyring import KeyRing
from ...store.settings import CarrierSettings
from .. import tracing
from ..instrumentation import count_carrier
from ..wire_format import ApiError
from .carrier_merge import Item, RequestCarrier, convert_messages_to_items

T = TypeVar("T")

# A carrier is usually this many times shorter than the JSON in it.
COMPRESSION = 4


def can_seal(keyring: KeyRing | None) -> bool:
    """Whether there is a key that seals; where there is none, the log says so once."""
    if keyring and keyring.primary:
        return True
    if not _warned:
        what, hint = (
            ("the keyring has no primary key", "create one with: vllmops keys rotate")
            if keyring is not None
            else ("there is no keyring", "vllmops serve creates one, unless --keyring is none")
        )
        log.warning(
            "vllmops: a client requests encrypted content and gets none: %s; hint: %s",
            what,
            hint,
        )
        _warned.append(True)
    return False


_warned: list[bool] = []


async def open_carrier(
    request_carrier: RequestCarrier, keyring: KeyRing | None, *, model: str, owner: str
) -> list[Item]:
    """The items that a carrier holds.

    Args:
        request_carrier: the carrier.
        keyring: the keys of this server.
        model: the model that this server serves.
        owner: who sends the carrier.

    Raises:
        ApiError: the carrier is not accepted.
    """

    def unseal() -> Carrier:
        return carrier.unseal_carrier(
            request_carrier.text, keyring or KeyRing(), model=model, owner=owner
        )

    try:
        with tracing.start_span("carrier.open", {}) as add:
            add(len(request_carrier.text))
            found = extract_carrier_items(
                await run_off_loop(len(request_carrier.text) * COMPRESSION, unseal)
            )
        count_carrier("opened")
        return found
    except CarrierError as error:
        count_carrier("opened", error)
        raise translate_carrier_error(
            error, request_carrier.param, request_carrier.carrier_name
        ) from error


def extract_carrier_items(opened_carrier: Carrier) -> list[Item]:
    """The history of a carrier as items.

    Raises:
        CarrierError: it is no conversation.
    """
    try:
        made = (
            convert_messages_to_items(opened_carrier.history)
            if opened_carrier.format == 1
            else opened_carrier.history
        )
    except (AttributeError, LookupError, TypeError):
        made = [None]
    if not all(isinstance(item, dict) for item in made):
        message = "the carrier can't be read: it does not hold a conversation"
        raise CarrierError(CarrierProblem.MALFORMED, message)
    return made


async def validate_carrier_size(history: list[Item], size: int) -> int:
    """Check that a carrier can hold a conversation, before the model adds its answer.

    Args:
        history: the items.
        size: roughly, in bytes.

    Returns:
        Their exact size in bytes.

    Raises:
        ApiError: they are too large.
    """
    try:
        return await run_off_loop(size, lambda: carrier.measure_history(history))
    except CarrierError as error:
        raise translate_carrier_error(error, "input") from error


async def seal_carrier(
    history: list[Any],
    size: int,
    carriers: CarrierSettings,
    keyring: KeyRing | None,
    *,
    model: str,
    owner: str,
) -> str | None:
    """A carrier, None if there is no key that seals any more.

    Args:
        history: the items, or messages for format 1.
        size: roughly, in bytes.
        carriers: how this server writes carriers.
        keyring: the keys of this server.
        model: the model that made the answer.
        owner: whose conversation it is.

    Raises:
        ApiError: no carrier can hold them.
    """
    if not (keyring and keyring.primary):
        return None

    def seal() -> str:
        if carriers.format is CarrierFormat.SIGNED_V1:
            return carrier.sign_history(history, keyring)
        return carrier.seal_history(
            history, keyring, model=model, owner=owner, ttl_s=carriers.ttl_s
        )

    try:
        with tracing.start_span("carrier.seal", {}) as add:
            text = await run_off_loop(size, seal)
            add(len(text))
        count_carrier("sealed")
        return text
    except CarrierError as error:
        count_carrier("sealed", error)
        raise translate_carrier_error(error, "include") from error


async def run_off_loop(size: int, call: Callable[[], T]) -> T:
    """What a call returns; made in a thread where it processes more bytes than `carrier.LARGE`."""
    return await asyncio.to_thread(call) if size > carrier.LARGE else call()


def translate_carrier_error(error: CarrierError, param: str, carrier_name: str = "") -> ApiError:
    """The refusal that a client gets for an error.

    Args:
        error: what is wrong with a carrier.
        param: the request parameter that contains it.
        carrier_name: what to call it, where the error does not tell.
    """
    if carrier_name or error.message.startswith("it "):
        message = f"The {carrier_name or 'carrier'} can't be opened: {error.message}."
    else:
        message = f"{error.message}."
    return ApiError(400, message[0].upper() + message[1:], param, error.code)


def require_sealing_key(keyring: KeyRing | None) -> None:
    """Check that there is a key that seals a compaction.

    Raises:
        ApiError: there is none.
    """
    if not (keyring and keyring.primary):
        hint = (
            "create a primary key with: vllmops keys rotate"
            if keyring is not None
            else "create one with `vllmops keygen --out FILE` and start the server with: "
            "vllmops serve --keyring FILE"
        )
        what = "its keyring has no primary key" if keyring is not None else "it has no keyring"
        raise ApiError(400, f"This server can't seal a compaction, because {what}; {hint}")
