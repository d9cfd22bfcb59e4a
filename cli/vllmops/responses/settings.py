"""What a server is told of its store and of carriers, by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from ..errors import Exit, VllmopsError
from ..keys.ring import CARRIER_TTL_S, in_seconds
from . import opening
from .backend import Backend, Limits

STORE = "VLLMOPS_RESPONSES_STORE"
MAX_SIZE = "VLLM_RESPONSES_API_STORE_MAX_SIZE"
TTL = "VLLMOPS_RESPONSES_STORE_TTL"
CARRIER = "VLLMOPS_CARRIER"
CARRIER_TTL = "VLLMOPS_CARRIER_TTL"
OFF = "none"


class Format(StrEnum):
    """How a carrier is written."""

    V2 = "v2"  # encrypted, and padded
    SIGNED_V1 = "signed-v1"  # as #35903 has it, for all to read


class Carriers(NamedTuple):
    """How a server writes carriers.

    Args:
        format: which each server reads anyhow.
        ttl_s: for how long one is taken back; format 1 does not tell.
    """

    format: Format = Format.V2
    ttl_s: float = CARRIER_TTL_S


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether there is to be a store: a URL, or a class of the user's own, names one."""
    url = environment.get(STORE, "")
    return url != OFF and bool(url or environment.get(opening.CLASS))


def backend(environment: Mapping[str, str] = os.environ) -> Backend:
    """The backend that the environment asks for; not opened yet.

    Raises:
        VllmopsError: as `opening.backend`, or ``usage`` where a number is none.
    """
    known = Limits()
    limits = Limits(
        max_size=int(number(environment, MAX_SIZE, known.max_size)),
        ttl_s=number(environment, TTL, known.ttl_s),
    )
    url = environment.get(STORE, "")
    if named := environment.get(opening.CLASS):
        return opening.users_own(named)(url, limits)
    return opening.backend(url, limits)


def carriers(environment: Mapping[str, str] = os.environ) -> Carriers:
    """How carriers are to be written.

    Raises:
        VllmopsError: ``usage`` where there is no such format, or a number is none.
    """
    name = environment.get(CARRIER) or Format.V2
    if name not in set(Format):
        raise VllmopsError(
            "usage",
            f"{CARRIER} is {name!r}",
            f"{CARRIER}={' or '.join(Format)}",
            exit_code=Exit.USAGE,
        )
    ttl_s = in_seconds(CARRIER_TTL, number(environment, CARRIER_TTL, CARRIER_TTL_S))
    return Carriers(Format(name), ttl_s)


def number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        found = float(text) if text else default
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise VllmopsError(
            "usage", f"{name} is {text!r}", f"{name}={default:g}", exit_code=Exit.USAGE
        )
    return found
