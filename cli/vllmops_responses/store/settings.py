"""A server's settings for its store, carriers and WebSockets, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from vllmops.model.environment import (
    CARRIER,
    CARRIER_TTL,
    LARGEST_MESSAGE,
    MAX_PER_KEY,
    MAX_SIZE,
    OFF,
    SOCKET_CONNECTIONS,
    SOCKET_IDLE,
    SOCKET_MESSAGE,
    SOCKET_REQUESTS,
    STORE,
    STORE_CLASS,
    TTL,
    CarrierFormat,
)
from vllmops.support import urls
from vllmops.support.durations import validate_seconds
from vllmops.support.errors import make_usage_error
from vllmops.support.numbers import CENTURY_S, MOST, parse_number

from ..keys.keyring import CARRIER_TTL_S
from . import backend_factory
from .backend import Backend, Limits

LEAST_S = 0.001


class CarrierSettings(NamedTuple):
    """How a server writes carriers.

    Args:
        format: which each server reads anyhow.
        ttl_s: for how long one is taken back; format 1 does not tell.
    """

    format: CarrierFormat = CarrierFormat.V2
    ttl_s: float = CARRIER_TTL_S


class WebSocketLimits(NamedTuple):
    """Limits of the Responses API on WebSockets.

    Args:
        message: bytes of a message, and of those together that wait on a connection.
        idle_s: a connection on which nothing runs is closed after this time without a message.
        requests: how many run or wait on a connection.
        connections: how many are open in a process.
    """

    message: int = LARGEST_MESSAGE
    idle_s: float = 900.0
    requests: int = 64
    connections: int = 2000


def is_store_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether there is to be a store: a URL, or a class of the user's own, names one."""
    url = environment.get(STORE, "")
    return url != OFF and bool(url or environment.get(STORE_CLASS))


def make_backend_from_env(environment: Mapping[str, str] = os.environ) -> Backend:
    """The backend that the environment asks for; not opened yet.

    Raises:
        VllmopsError: as `backend_factory.make_backend`, or ``usage`` where a number is none.
    """
    limits = parse_limits(environment)
    url = environment.get(STORE, "")
    if named := environment.get(STORE_CLASS):
        return backend_factory.load_backend_class(named)(url, limits)
    return backend_factory.make_backend(url, limits)


def validate_settings(environment: Mapping[str, str]) -> None:
    """Refuse what can't be; whether anything is at the store's URL is not looked at.

    A variable that it looks at is in `vllmops.model.environment.CHECKED`, too.

    Raises:
        VllmopsError: ``usage``.
    """
    parse_carrier_settings(environment)
    parse_websocket_limits(environment)
    if is_store_configured(environment):
        parse_limits(environment)
        if not environment.get(STORE_CLASS):
            urls.parse_store_url(environment[STORE])


def parse_limits(environment: Mapping[str, str]) -> Limits:
    """How much is kept, and for how long."""
    known = Limits()
    return Limits(
        max_size=int(parse_setting(environment, MAX_SIZE, known.max_size, minimum=1)),
        max_per_key=int(parse_setting(environment, MAX_PER_KEY, 1000, minimum=1))
        if environment.get(MAX_PER_KEY)
        else None,
        ttl_s=parse_setting(environment, TTL, known.ttl_s),
    )


def parse_carrier_settings(environment: Mapping[str, str] = os.environ) -> CarrierSettings:
    """How carriers are to be written.

    Raises:
        VllmopsError: ``usage`` where there is no such format, or a number is none.
    """
    name = environment.get(CARRIER) or CarrierFormat.V2
    if name not in set(CarrierFormat):
        raise make_usage_error(f"{CARRIER} is {name!r}", f"{CARRIER}={' or '.join(CarrierFormat)}")
    ttl_s = validate_seconds(CARRIER_TTL, parse_setting(environment, CARRIER_TTL, CARRIER_TTL_S))
    return CarrierSettings(CarrierFormat(name), ttl_s)


def parse_websocket_limits(environment: Mapping[str, str] = os.environ) -> WebSocketLimits:
    """The limits of WebSockets.

    Raises:
        VllmopsError: ``usage`` where a number is none, or out of range.
    """
    known = WebSocketLimits()
    most = LARGEST_MESSAGE
    return WebSocketLimits(
        int(parse_setting(environment, SOCKET_MESSAGE, known.message, minimum=1, maximum=most)),
        parse_setting(environment, SOCKET_IDLE, known.idle_s, maximum=CENTURY_S),
        int(parse_setting(environment, SOCKET_REQUESTS, known.requests, minimum=1)),
        int(parse_setting(environment, SOCKET_CONNECTIONS, known.connections, minimum=1)),
    )


def parse_setting(
    environment: Mapping[str, str],
    name: str,
    default: float,
    *,
    minimum: float = LEAST_S,
    maximum: float = MOST,
) -> float:
    text = environment.get(name, "")
    try:
        return parse_number(text, minimum, maximum) if text else default
    except ValueError as error:
        raise make_usage_error(f"{name}: {error}", f"{name}={default:.10g}") from error
