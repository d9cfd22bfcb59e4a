"""Routes for whoever operates a server from another machine, with the admin token.

``GET /v1/vllmops/keys`` tells which keys the process that answers holds, without their secrets;
``POST`` gives it a keyring. They are there where the environment names the token's file. vLLM's
own routes and middleware come after them: an API key of vLLM's says nothing here.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import VllmopsError
from ..keys import admin_token as admin
from ..keys import file
from ..keys.ring import Ring
from . import found, keys
from .gate import Scope, Send
from .identity import role
from .imports import when_imported
from .log import log

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Receive = Callable[[], Awaitable[Any]]

STATUS = {
    "admin.refused": 401,
    "admin.no-route": 404,
    "admin.no-ring": 400,
    "keys.no-file": 409,
    "keys.locked": 503,
}


def install() -> None:
    """Have the routes in each app of FastAPI's that this process makes, where there is a token."""
    place = os.environ.get(admin.PLACE)
    if place and role() == "api":
        put_before = functools.partial(before, Path(place))
        when_imported("fastapi.applications", found.guarded(put_before))


def before(place: Path, module: ModuleType) -> None:
    """Wrap ``FastAPI.__call__`` in place; `module` is ``fastapi.applications``."""
    call = module.FastAPI.__call__
    if hasattr(call, "__vllmops_admin__"):
        return

    @functools.wraps(call)
    async def __call__(self: Any, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: N807
        if scope["type"] != "http" or not scope["path"].startswith(admin.ROUTES):
            await call(self, scope, receive, send)
            return
        from starlette.requests import Request  # noqa: PLC0415 - other processes don't need it

        answer = await answered(Request(scope, receive), place)
        await answer(scope, receive, send)

    __call__.__vllmops_admin__ = True  # type: ignore[attr-defined]
    module.FastAPI.__call__ = __call__


async def answered(request: Request, place: Path) -> Response:
    """What a request is answered; never raises.

    Args:
        request: to one of the routes.
        place: the file with the token.
    """
    try:
        await asyncio.to_thread(admit, request.headers.get("authorization", ""), place)
        match request.method, request.scope["path"]:
            case "GET", admin.KEYS:
                return json(keys.state())
            case "POST", admin.KEYS:
                ring = decoded(await body(request))
                return json(await asyncio.to_thread(keys.take_in, ring))
        raise VllmopsError("admin.no-route", "there is no such route for admins")
    except VllmopsError as error:
        content = {"code": error.code, "message": error.message, "hint": error.hint}
        return json({"error": content}, STATUS.get(error.code, 500))
    except Exception as error:
        # Not what it says: a keyring was on its way.
        log.warning("vllmops: a request of an admin's failed: %s", type(error).__name__)
        content = {"code": "internal", "message": f"unexpected {type(error).__name__}", "hint": ""}
        return json({"error": content}, 500)


def json(content: Any, status: int = 200) -> Response:
    from starlette.responses import Response  # noqa: PLC0415 - other processes don't need it

    headers = {"WWW-Authenticate": "Bearer"} if status == STATUS["admin.refused"] else None
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def admit(authorization: str, place: Path) -> None:
    """See that a request has the token, as its file has it now.

    Raises:
        VllmopsError: ``admin.refused``, whatever is wrong.
    """
    try:
        wanted = f"Bearer {admin.token(place)}"
    except VllmopsError as error:
        found.report(f"the admin token can't be had, and nobody is let in: {error.message}")
        wanted = ""
    same = hmac.compare_digest(wanted.encode(), authorization.encode(errors="replace"))
    if not (wanted and same):
        raise VllmopsError("admin.refused", "this is not the admin token")


async def body(request: Request) -> bytes:
    """What a request brings.

    Raises:
        VllmopsError: ``admin.no-ring`` where it is more than any keyring.
    """
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > file.MOST_BYTES:
            raise VllmopsError("admin.no-ring", f"a keyring has {file.MOST_BYTES} bytes at most")
    return bytes(content)


def decoded(content: bytes) -> Ring:
    """The keyring that a request brings.

    Raises:
        VllmopsError: ``admin.no-ring``.
    """
    try:
        return file.decode(content, Path("what was sent"))
    except VllmopsError as error:
        raise VllmopsError("admin.no-ring", error.message) from None
