"""Admin routes, for operators on another machine who have the admin token.

`server_members` answers those of the server's processes, an extension its own. All exist where the
environment names the token's file. They run before vLLM's own routes and middleware: vLLM's API key
gives no access here, and a server that drains still answers.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ...collect.agents import admin_token
from ...model.admin_api import LONGEST_S, PROCESSES, ROUTES, TIMEOUT, Refusal, RefusalBody
from ...model.agent_socket import BODY_BYTES
from ...model.environment import ADMIN_TOKEN_FILE
from ...support.error_codes import ErrorCode
from ...support.errors import VllmopsError
from ...support.numbers import parse_number
from ..extensions import AdminRoute
from ..hooks import vllm_objects
from ..hooks.import_hook import when_imported
from ..hooks.request_gate import Scope, Send
from ..identity import detect_role, find_standing
from ..log import log
from . import node_channel

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Receive = Callable[[], Awaitable[Any]]

STATUS = {
    "admin.busy": 503,
    "admin.no-ring": 400,
    "admin.no-route": 404,
    "admin.refused": 401,
    "admin.too-large": 413,
    "agent.gone": 404,
    "agent.node-lost": 504,
    "agent.timeout": 504,
    "keys.no-file": 409,
    "keys.locked": 503,
    "keys.same-kid": 409,
}


def install_routes(added: Mapping[tuple[str, str], AdminRoute]) -> None:
    """Add the routes to each FastAPI app of an API server, where the environment names a token.

    On a node without an API server, let the other nodes ask.

    Args:
        added: routes of an extension, by method and path.
    """
    node_channel.set_responder(answer_other_node)
    place = os.environ.get(ADMIN_TOKEN_FILE)
    if place and detect_role() == "api":
        from . import server_members  # noqa: F401, PLC0415 - other processes don't need it; now, as it is slow

        put_before = functools.partial(hook_fastapi, Path(place), added)
        when_imported("fastapi.applications", vllm_objects.catch_errors(put_before))


def hook_fastapi(
    token_path: Path, added: Mapping[tuple[str, str], AdminRoute], module: ModuleType
) -> None:
    """Wrap ``FastAPI.__call__`` in place.

    Args:
        token_path: the file with the token.
        added: as in `install_routes`.
        module: ``fastapi.applications``.
    """
    call = module.FastAPI.__call__
    if hasattr(call, "__vllmops_admin__"):
        return

    @functools.wraps(call)
    async def __call__(self: Any, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: N807
        if scope["type"] != "http" or not scope["path"].startswith(ROUTES):
            await call(self, scope, receive, send)
            return
        from starlette.requests import Request  # noqa: PLC0415 - other processes don't need it

        response = await answer_admin_request(Request(scope, receive), token_path, added)
        await response(scope, receive, send)

    __call__.__vllmops_admin__ = True  # type: ignore[attr-defined]
    module.FastAPI.__call__ = __call__


async def answer_admin_request(
    request: Request, token_path: Path, added: Mapping[tuple[str, str], AdminRoute]
) -> Response:
    """Answer a request to one of the routes; never raises.

    Args:
        request: the request.
        token_path: the file with the token.
        added: as in `install_routes`.
    """
    from . import server_members  # noqa: PLC0415

    try:
        await asyncio.to_thread(
            require_admin_token, request.headers.get("authorization", ""), token_path
        )
        if route := added.get((request.method, request.scope["path"])):
            content = b""
            if request.method == "POST":
                content = await read_body(request, route.max_bytes, route.too_large)
            return make_json_response(await asyncio.to_thread(route.answer, content))
        match request.method, request.scope["path"]:
            case "GET", path if path == PROCESSES:
                return make_json_response(
                    await server_members.run_in_thread(server_members.observe_server_processes)
                )
            case ("GET" | "POST") as method, path if path.startswith(f"{PROCESSES}/"):
                return await forward_to_process(request, method, path.removeprefix(f"{PROCESSES}/"))
        raise VllmopsError("admin.no-route", "there is no such admin route")
    except VllmopsError as error:
        return make_response(*encode_refusal(error))
    except Exception as error:
        # Without the error's message: it may contain part of the keyring.
        log.warning("vllmops: an admin request failed: %s", type(error).__name__)
        return make_json_response(
            RefusalBody(Refusal("internal", f"unexpected {type(error).__name__}")), 500
        )


def answer_other_node(
    method: str, path: str, content: bytes | None, timeout_s: float, servers: list[str]
) -> tuple[int, bytes]:
    """Answer another node, whose admin token has been checked.

    Args:
        method: of the request.
        path: of it.
        content: of it; None without one.
        timeout_s: seconds that the other node waits.
        servers: the ids of the server that it asks about.
    """
    from . import server_members  # noqa: PLC0415

    if not set(servers) & set(find_standing().servers):
        error = VllmopsError("agent.gone", "the process that answers is of another server")
        return node_channel.STRANGER, encode_refusal(error)[1]
    try:
        if (method, path) == ("GET", PROCESSES):
            return 200, msgspec.json.encode(server_members.observe_node_processes())
        return server_members.forward_to_agent(
            method, path.removeprefix(f"{PROCESSES}/"), content, timeout_s
        )
    except VllmopsError as error:
        return encode_refusal(error)
    except Exception as error:
        return encode_refusal(VllmopsError("admin.failed", f"unexpected {error!r}"))


def encode_refusal(error: VllmopsError) -> tuple[int, bytes]:
    """The status and the content of an answer that refuses."""
    why = Refusal(error.code, error.message, error.hint, error.exit_code)
    return STATUS.get(error.code, 500), msgspec.json.encode(RefusalBody(why))


async def forward_to_process(request: Request, method: str, path: str) -> Response:
    """Pass a request on to the agent of a process.

    Args:
        request: the request.
        method: of it.
        path: its path, from the pid on.
    """
    from . import server_members  # noqa: PLC0415

    question = request.scope["query_string"].decode("latin-1")
    content = await read_body(request, BODY_BYTES, "admin.too-large") if method == "POST" else None
    timeout_s = 2.0
    with suppress(ValueError):
        timeout_s = parse_number(request.headers.get(TIMEOUT, ""), 0.1, LONGEST_S)
    whole = f"{path}?{question}" if question else path
    ask = functools.partial(server_members.forward_to_agent, method, whole, content, timeout_s)
    return make_response(*await server_members.run_in_thread(ask))


def make_json_response(content: Any, status: int = 200) -> Response:
    return make_response(status, msgspec.json.encode(content))


def make_response(status: int, content: bytes) -> Response:
    from starlette.responses import Response  # noqa: PLC0415 - other processes don't need it

    headers = {"WWW-Authenticate": "Bearer"} if status == STATUS["admin.refused"] else None
    return Response(content, status, headers, "application/json")


def require_admin_token(authorization: str, token_path: Path) -> None:
    """Check that a request has the token that the file holds now.

    Raises:
        VllmopsError: ``admin.refused``, whatever the reason.
    """
    try:
        expected = f"Bearer {admin_token.read_admin_token(token_path)}"
    except VllmopsError as error:
        vllm_objects.report_problem(
            f"admin requests are refused: the admin token can't be read: {error.message}"
        )
        expected = ""
    same = hmac.compare_digest(expected.encode(), authorization.encode(errors="replace"))
    if not (expected and same):
        raise VllmopsError("admin.refused", "the admin token is missing or wrong")


async def read_body(request: Request, max_bytes: int, code: ErrorCode) -> bytes:
    """The body of a request; raises VllmopsError if it has more than `max_bytes` bytes."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > max_bytes:
            raise VllmopsError(code, f"the request has more than {max_bytes} bytes")
    return bytes(content)
