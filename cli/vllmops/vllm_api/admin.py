"""A server's routes for admins, over its HTTP API."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx
import msgspec

from ..codes import known
from ..errors import Exit, VllmopsError
from ..host.listeners import distrust
from ..keys import admin_token as admin
from ..keys import file
from ..keys.ring import Ring
from ..protocol.files import DAMAGE
from ..protocol.keys import ProcessKeys
from ..rpc.agent import DECODERS
from ..store.urls import shown
from . import http
from .place import Place

# Longer than a server waits for another change of its keyring.
TIMEOUT_S = 8.0


class Refusal(msgspec.Struct):
    """Why a route refuses, as `VllmopsError` has it."""

    code: str
    message: str
    hint: str = ""


class Refused(msgspec.Struct):
    error: Refusal


REFUSED = msgspec.json.Decoder(Refused)


def push(place: Place, token: str, ring: Ring, *, plain: bool = False) -> ProcessKeys:
    """Give a server a ring.

    Args:
        place: the server.
        token: its admin token.
        ring: the keys, with their secrets.
        plain: send them over HTTP without TLS to another machine.

    Returns:
        What the process that answered holds now.

    Raises:
        VllmopsError: ``admin.plain`` (exit code 2), ``admin.other-user`` (4) where a process of
            this machine that is neither this user's nor root's listens there,
            ``admin.unreachable`` (5), ``admin.timeout`` (3), ``admin.refused`` (4),
            ``admin.no-route``, or the server's own error.
    """
    if not (place.local or plain or urlsplit(place.url).scheme == "https"):
        raise VllmopsError(
            "admin.plain",
            f"{shown(place.url)} is plain HTTP to another machine: anybody on the network could "
            "read the keys",
            "use https:// or a tunnel; use --plain only on a network that nobody can listen to",
            exit_code=Exit.USAGE,
        )
    if why := distrust(place.url):
        raise VllmopsError(
            "admin.other-user",
            f"the admin token and the keys are not sent to {place.url}: {why}",
            "vllmops ps shows what runs; run vllmops as the user who started the server",
            exit_code=Exit.NOT_AUTHORISED,
        )
    try:
        answer = http.ask(
            "POST",
            f"{place.url}{admin.KEYS}",
            TIMEOUT_S,
            outside=not place.local,
            content=file.encode(ring),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
    except httpx.TimeoutException as error:
        raise VllmopsError(
            "admin.timeout",
            f"{place.name} did not answer within {TIMEOUT_S:g} s; it may have taken the keys",
            "try again: the server does not take the same keys twice",
            exit_code=Exit.TIMED_OUT,
        ) from error
    except httpx.HTTPError as error:
        raise VllmopsError(
            "admin.unreachable",
            f"{shown(place.url)} can't be reached: {str(error) or type(error).__name__}",
            "check the URL after -t, and that the server runs",
            exit_code=Exit.NOT_FOUND,
        ) from error
    try:
        if answer.is_success:
            held: ProcessKeys = DECODERS[ProcessKeys].decode(answer.content)
            return held
        raise refused(place, REFUSED.decode(answer.content).error)
    except DAMAGE as error:
        # vLLM's own answer, or a gateway's.
        raise VllmopsError(
            "admin.no-route",
            f"{place.name} has no admin routes: it answered {answer.status_code}",
            "start it with vllmops serve --admin-token FILE",
        ) from error


def refused(place: Place, why: Refusal) -> VllmopsError:
    """A server's refusal, as an error here."""
    if why.code == "admin.refused":
        return VllmopsError(
            "admin.refused",
            f"{place.name} rejected the admin token",
            "--admin-token with a copy of the file that the server was started with",
            exit_code=Exit.NOT_AUTHORISED,
        )
    code = known(why.code, "admin.failed")
    return VllmopsError(code, f"{place.name}: {why.message}", why.hint)
