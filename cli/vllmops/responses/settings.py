"""What a server is told of its store, by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import VllmopsError
from . import opening
from .backend import Backend, Limits

STORE = "VLLMOPS_RESPONSES_STORE"
MAX_SIZE = "VLLM_RESPONSES_API_STORE_MAX_SIZE"
TTL = "VLLMOPS_RESPONSES_STORE_TTL"
OFF = "none"


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


def number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        found = float(text) if text else default
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise VllmopsError("usage", f"{name} is {text!r}", f"{name}={default:g}")
    return found
