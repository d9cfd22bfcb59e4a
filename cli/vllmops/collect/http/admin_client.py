"""A server's routes for admins, over its HTTP API."""

from __future__ import annotations

import asyncio
import threading
from urllib.parse import urlsplit

import httpx
import msgspec

from ...model.admin_api import Refusal, RefusalBody
from ...model.snapshot_files import DAMAGE
from ...support.error_codes import parse_error_code
from ...support.errors import ExitCode, VllmopsError
from ...support.urls import redact_url
from ..machine.listeners import explain_distrust
from . import vllm_client
from .endpoint import Endpoint

# Longer than a server waits for another change of its keyring.
TIMEOUT_S = 8.0
REFUSED = msgspec.json.Decoder(RefusalBody)


class AdminClient:
    """A server's admin routes.

    Args:
        endpoint: the server.
        token: its admin token.
        allow_plain_http: use HTTP without TLS to another machine, too.

    Raises:
        VllmopsError: ``admin.plain`` (exit code 2), or ``admin.other-user`` (4) where a process of
            this machine that is neither this user's nor root's listens there.
    """

    def __init__(self, endpoint: Endpoint, token: str, *, allow_plain_http: bool = False) -> None:
        if not (endpoint.local or allow_plain_http or urlsplit(endpoint.url).scheme == "https"):
            raise VllmopsError(
                "admin.plain",
                f"{redact_url(endpoint.url)} is plain HTTP to another machine: anybody on the "
                "network "
                "could read the admin token",
                "use https:// or a tunnel, such as ssh -L; on a private network, keys push takes "
                "--plain",
            )
        if why := explain_distrust(endpoint.url):
            raise VllmopsError(
                "admin.other-user",
                f"the admin token is not sent to {endpoint.url}: {why}",
                "vllmops ps shows what runs; run vllmops as the user who started the server",
            )
        self.endpoint, self.token = endpoint, token
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self.client = vllm_client.make_client(headers, is_remote=not endpoint.local)

    def send_request(
        self,
        method: str,
        path: str,
        timeout_s: float = TIMEOUT_S,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """What the server answers, whatever its status; any number of threads may ask.

        Raises:
            VllmopsError: ``admin.unreachable`` (5) or ``admin.timeout`` (3).
        """
        try:
            answer = vllm_client.send_request_async(
                self.client,
                method,
                f"{self.endpoint.url}{path}",
                timeout_s,
                content=content,
                headers=headers,
            )
            return asyncio.run_coroutine_threadsafe(answer, LOOP.ensure_running()).result()
        except httpx.ConnectTimeout as error:
            raise self.make_unreachable_error(error) from error
        except httpx.TimeoutException as error:
            done = "; it may have done what was asked" if method == "POST" else ""
            raise VllmopsError(
                "admin.timeout",
                f"{self.endpoint.name} did not answer within {timeout_s:g} s{done}",
                "try again: what is done already is not done twice",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.make_unreachable_error(error) from error

    def make_unreachable_error(self, error: Exception) -> VllmopsError:
        return VllmopsError(
            "admin.unreachable",
            f"{redact_url(self.endpoint.url)} can't be reached: "
            f"{str(error) or type(error).__name__}",
            "check the URL after -t, and that the server runs",
        )

    def make_answer_error(self, answer: httpx.Response) -> VllmopsError:
        """The error for an answer that is none of the route's."""
        try:
            why = REFUSED.decode(answer.content).error
        except DAMAGE:
            # vLLM's own answer, or a gateway's.
            return VllmopsError(
                "admin.no-route",
                f"{self.endpoint.name} has no admin routes: it answered {answer.status_code}",
                "start it with vllmops serve --admin-token FILE; vllmops attach adds no routes",
            )
        return self.make_refusal_error(why)

    def make_refusal_error(self, refusal: Refusal) -> VllmopsError:
        """A server's refusal, as an error here."""
        if refusal.code == "admin.refused":
            return VllmopsError(
                "admin.refused",
                f"{self.endpoint.name} rejected the admin token",
                "--admin-token with a copy of the file that the server was started with",
            )
        hint = refusal.hint
        if refusal.code.startswith("agent.") and hint:
            hint = f"on the machine of the server: {hint}"
        elif refusal.code == "admin.no-route":
            hint = "restart the server, so that it loads a vllmops as new as this one"
        code = parse_error_code(refusal.code, "admin.failed")
        exit_code = (
            ExitCode(refusal.exit_code) if refusal.exit_code in set(ExitCode) else ExitCode.FAILED
        )
        return VllmopsError(
            code, f"{self.endpoint.name}: {refusal.message}", hint, exit_code=exit_code
        )


class EventLoopThread:
    """An event loop on a thread of its own, so that connections stay open between questions."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: asyncio.AbstractEventLoop | None = None

    def ensure_running(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.running is None:
                made = self.running = asyncio.new_event_loop()
                threading.Thread(target=made.run_forever, name="vllmops-http", daemon=True).start()
            return self.running


LOOP = EventLoopThread()
