"""A vLLM server's own HTTP API: health and metrics.

``/health`` makes no round trip to the engine: a server that hangs still answers 200.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import httpx

from ...model.server_snapshot import Canary, CanaryOutcome
from ...model.vllm_metrics import Metrics
from ..machine.server_address import UNIX, parse_unix_url

TIMEOUT_S = 2.0
GRACE_S = 0.5  # for an answer that comes in several parts, each in time
ANSWER_BYTES = 64 << 20  # a response with its images
METRICS_BYTES = 8 << 20  # of many engines
SHORT_BYTES = 1 << 20  # of what has a version or a status
SLOWEST = 1 << 20  # bytes per second: an answer may take this much longer than a small one
KEY = "VLLM_API_KEY"
# Of the development mode; and of a server that takes tokens, since 0.31 behind the API key.
ABORTS = ("/abort_requests", "/inference/v1/abort_requests")
# Connections are given up before a server closes them, as uvicorn does after 5 s.
LIMITS = httpx.Limits(keepalive_expiry=2.0)
MOST = 1e18  # of a metric; more is no figure, nor are infinity and NaN, which their format allows
# What reading JSON of any shape may raise.
NO_ANSWER = (ValueError, LookupError, TypeError, RecursionError)


# A sample's name, and labels that it must have, to the field that it adds to.
FIELDS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("vllm:num_requests_running", {}, "running"),
    ("vllm:num_requests_waiting", {}, "waiting"),
    ("vllm:num_requests_waiting_by_reason", {"reason": "deferred"}, "deferred"),
    ("vllm:engine_sleep_state", {"sleep_state": "awake"}, "awake"),
    ("vllm:kv_cache_usage_perc", {}, "kv_cache_usage"),
    ("vllm:prefix_cache_hits_total", {}, "prefix_hits"),
    ("vllm:prefix_cache_queries_total", {}, "prefix_queries"),
    ("vllm:mm_cache_hits_total", {}, "mm_hits"),
    ("vllm:mm_cache_queries_total", {}, "mm_queries"),
    ("vllm:prompt_tokens_total", {}, "tokens"),
    ("vllm:generation_tokens_total", {}, "tokens"),
    ("vllm:num_preemptions_total", {}, "preemptions"),
    ("vllm:request_success_total", {}, "finished"),
    ("vllm:request_success_total", {"finished_reason": "error"}, "failed"),
    ("http_requests_total", {}, "answers"),
    ("http_requests_total", {"status": "5xx"}, "errors"),
    *(
        (f"vllm:{name}_seconds_{end}", {}, f"{field}_{unit}")
        for name, field in (
            ("request_queue_time", "queue"),
            ("request_prefill_time", "prefill"),
            ("request_decode_time", "decode"),
            ("time_to_first_token", "first"),
            ("inter_token_latency", "between"),
            ("e2e_request_latency", "whole"),
        )
        for end, unit in (("sum", "s"), ("count", "n"))
    ),
)


class UnixSocketTransport(httpx.AsyncBaseTransport):
    """HTTP through the Unix sockets that are URLs' hosts, as `make_unix_url` writes them."""

    def __init__(self) -> None:
        self.by_path: dict[str, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = rewrite_unix_url(request)
        if path not in self.by_path:
            verify = make_ssl_context(is_remote=False)
            self.by_path[path] = httpx.AsyncHTTPTransport(uds=path, verify=verify, limits=LIMITS)
        return await self.by_path[path].handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self.by_path.values():
            await transport.aclose()


def rewrite_unix_url(request: httpx.Request) -> str:
    """Give a request a URL that HTTP knows; returns the path of the socket that it goes through."""
    path = parse_unix_url(str(request.url))
    assert path is not None
    request.url = request.url.copy_with(scheme="http", host="localhost")
    request.headers["Host"] = "localhost"
    return path


def is_healthy(url: str, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether ``/health`` answers 200; its certificate is not judged here."""
    return fetch_health_status(url, timeout_s=timeout_s) == httpx.codes.OK


class HealthResponse(NamedTuple):
    """What ``/health`` answers.

    Args:
        status: 0 if a connection is taken and not answered in time; None if there is no
            connection: it may not be up yet, or not reachable from here.
        has_retry_after: whether it is 503 and says when to come back, as a server that drains does
            and one whose engine is dead does not.
    """

    status: int | None
    has_retry_after: bool = False


def fetch_health(url: str, *, timeout_s: float = TIMEOUT_S) -> HealthResponse:
    """What ``/health`` answers."""
    try:
        answer = send_request("GET", f"{url}/health", timeout_s, max_bytes=SHORT_BYTES)
    except httpx.ReadTimeout:
        return HealthResponse(0)
    except (httpx.HTTPError, httpx.InvalidURL):
        return HealthResponse(None)
    code, after = answer.status_code, answer.headers.get("Retry-After")
    return HealthResponse(code, bool(after) and code == httpx.codes.SERVICE_UNAVAILABLE)


def fetch_health_status(url: str, *, timeout_s: float = TIMEOUT_S) -> int | None:
    """The status of ``/health``, as in `HealthResponse`."""
    return fetch_health(url, timeout_s=timeout_s).status


def fetch_status_code(url: str, method: str = "GET", *, timeout_s: float = TIMEOUT_S) -> int | None:
    """The status of any answer, None if nothing answers."""
    try:
        return send_request(method, url, timeout_s, max_bytes=SHORT_BYTES).status_code
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def fetch_version(url: str) -> str | None:
    """The server's vLLM version, None if unknown."""
    try:
        answer = send_request("GET", f"{url}/version", TIMEOUT_S, max_bytes=SHORT_BYTES)
        return str(answer.raise_for_status().json()["version"])
    except (httpx.HTTPError, httpx.InvalidURL, *NO_ANSWER):
        return None


class ApiKeyHeaders(NamedTuple):
    """The headers with the user's API key for a server.

    Args:
        headers: the one that holds it, if any.
        withheld: why it is not sent although there is one; empty if it is.
    """

    headers: dict[str, str]
    withheld: str = ""


def build_api_key_headers(url: str) -> ApiKeyHeaders:
    """The API key from ``VLLM_API_KEY`` for a server; none for another user's process.

    No other variable is read: a key for another service must not reach this server. A key that is
    no HTTP header is not sent: the error of a client that tries would show it.
    """
    from ..machine.listeners import explain_distrust  # noqa: PLC0415 - most commands send no key

    key = os.environ.get(KEY)
    if not key:
        return ApiKeyHeaders({})
    if not (key.isascii() and key.isprintable()):
        return ApiKeyHeaders({}, "it has a character that no HTTP header can hold")
    withheld = explain_distrust(url)
    return (
        ApiKeyHeaders({}, withheld)
        if withheld
        else ApiKeyHeaders({"Authorization": f"Bearer {key}"})
    )


def abort_requests_or_all(url: str, ids: Sequence[str]) -> int | None:
    """Have vLLM's own routes end requests; they do not say which of them they know.

    Args:
        url: of the server.
        ids: as clients see them; all requests where empty.

    Returns:
        How many vLLM ends or was told of; None if it has no such route: that for all is one of its
        development mode.
    """
    for path in ABORTS if ids else ABORTS[:1]:
        try:
            answer = send_request(
                "POST",
                f"{url}{path}",
                TIMEOUT_S,
                headers=build_api_key_headers(url).headers,
                json={"request_ids": list(ids)},
                max_bytes=SHORT_BYTES,
            )
            if answer.is_success:
                return len(ids) or int(answer.json()["aborted"])
        except (httpx.HTTPError, httpx.InvalidURL, *NO_ANSWER):
            continue
    return None


def request_one_token(url: str, timeout_s: float) -> Canary:
    """Ask a server for one token, as a user would.

    Args:
        url: of the server.
        timeout_s: for everything.
    """
    began = time.monotonic()
    headers, withheld = build_api_key_headers(url)

    def make_canary(outcome: CanaryOutcome, detail: str) -> Canary:
        return Canary(outcome, time.monotonic() - began, detail)

    try:
        models = send_request(
            "GET", f"{url}/v1/models", timeout_s, headers=headers, max_bytes=SHORT_BYTES
        )
        if models.status_code in {401, 403}:
            why = f"{KEY} was not sent: {withheld}" if withheld else f"set {KEY}"
            return make_canary("unable", f"it needs an API key: {why}")
        model = models.raise_for_status().json()["data"][0]["id"]
        left_s = max(timeout_s - (time.monotonic() - began), 1.0)
        body = {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0}
        answer = send_request(
            "POST",
            f"{url}/v1/completions",
            left_s,
            headers=headers,
            json=body,
            max_bytes=SHORT_BYTES,
        )
    except httpx.TimeoutException:
        return make_canary("timeout", f"no answer within {timeout_s:.0f} s")
    except (httpx.HTTPError, httpx.InvalidURL, *NO_ANSWER) as error:
        return make_canary("refused", f"{type(error).__name__}: {error}")
    if answer.is_success:
        return make_canary("answered", "")
    # Some models, for example for transcription, have no such route or take no text.
    outcome: CanaryOutcome = "refused" if answer.is_server_error else "unable"
    return make_canary(outcome, f"it answered {answer.status_code}: {answer.text[:200]}")


def send_request(
    method: str, url: str, timeout_s: float, *, is_remote: bool | None = None, **fields: Any
) -> httpx.Response:
    """The same as `send_request_async`, of a `make_client`; not on a thread whose event loop runs.

    Whether the server is outside, as of `make_client`, is found out where it is None.
    """

    async def send_once() -> httpx.Response:
        async with make_client(
            is_remote=is_remote_url(url) if is_remote is None else is_remote
        ) as asking:
            return await send_request_async(asking, method, url, timeout_s, **fields)

    return asyncio.run(send_once())


def is_remote_url(url: str) -> bool:
    """Whether a URL is of another machine; raises httpx.InvalidURL."""
    if url.startswith(UNIX):
        return False
    from ..machine.listeners import is_this_machine  # noqa: PLC0415 - brings psutil

    return not is_this_machine(httpx.URL(url).host, exclusive=True)


@cache
def make_ssl_context(*, is_remote: bool) -> ssl.SSLContext:
    """What certificates are trusted; to read the well-known ones takes 20 ms."""
    return httpx.create_ssl_context(verify=is_remote)


def make_client(
    headers: dict[str, str] | None = None, *, is_remote: bool = False
) -> httpx.AsyncClient:
    """What asks servers.

    Args:
        headers: of every request.
        is_remote: whether the server is on another machine: a proxy for the outside is not for a
            server on this machine, whose certificate is its own.
    """
    return httpx.AsyncClient(
        # A small answer that is compressed can be as large as this machine's memory.
        headers={"Accept-Encoding": "identity", **(headers or {})},
        trust_env=is_remote,
        verify=make_ssl_context(is_remote=is_remote),
        mounts={UNIX: UnixSocketTransport()},
        limits=LIMITS,
    )


async def send_request_async(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    timeout_s: float,
    *,
    max_bytes: int | None = None,
    **fields: Any,
) -> httpx.Response:
    """A server's whole answer, of at most so many bytes.

    Any program may listen there: an answer that is too slow or too long is given up.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: no answer in time, or one that is too large.
    """
    try:
        async with (
            asyncio.timeout(timeout_s + GRACE_S) as end,
            client.stream(method, url, timeout=timeout_s, **fields) as answer,
        ):
            return await read_whole_answer(answer, end, max_bytes)
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no complete answer within {timeout_s:g} s") from error


async def read_whole_answer(
    answer: httpx.Response, end: asyncio.Timeout, max_bytes: int | None = None
) -> httpx.Response:
    """An answer with its content, the parts of `read_answer_parts`; the charset is UTF-8."""
    content = b"".join([part async for part in read_answer_parts(answer, end, max_bytes)])
    kept = {
        "Content-Type": answer.headers.get("Content-Type", "").partition(";")[0],
        "Retry-After": answer.headers.get("Retry-After", ""),
    }
    headers = httpx.Headers(kept, encoding="utf-8")
    return httpx.Response(
        answer.status_code, headers=headers, content=content, request=answer.request
    )


async def read_answer_parts(
    answer: httpx.Response, end: asyncio.Timeout, max_bytes: int | None = None
) -> AsyncIterator[bytes]:
    """The parts of an answer's content; much of it puts the end off.

    Args:
        answer: whose.
        end: of the time for it.
        max_bytes: bytes; `ANSWER_BYTES` unless given.

    Raises:
        httpx.RemoteProtocolError: it has too many of them, or is compressed.
    """
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise httpx.RemoteProtocolError("its answer is compressed, which was not asked for")
    began, size, limit = end.when() or 0.0, 0, ANSWER_BYTES if max_bytes is None else max_bytes
    async for part in answer.aiter_raw():
        size += len(part)
        if size > limit:
            raise httpx.RemoteProtocolError(f"its answer has more than {limit >> 20} MiB")
        end.reschedule(began + size / SLOWEST)
        yield part


def fetch_metrics_text(url: str, timeout_s: float) -> str:
    """The server's metrics in Prometheus' format; raises httpx.HTTPError, httpx.InvalidURL."""
    answer = send_request("GET", f"{url}/metrics", timeout_s, max_bytes=METRICS_BYTES)
    return answer.raise_for_status().text


def fetch_metrics(url: str, *, timeout_s: float = TIMEOUT_S) -> Metrics | None:
    """The server's metrics, None if it does not answer."""
    try:
        return parse_metrics(fetch_metrics_text(url, timeout_s))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def parse_metrics(text: str) -> Metrics:
    """The metrics in a text in Prometheus' format.

    Raises:
        ValueError: it is in another format.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    fields: dict[str, list[tuple[dict[str, str], str]]] = {}
    for name, labels, field in FIELDS:
        fields.setdefault(name, []).append((labels, field))
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for labels, field in fields.get(sample.name, ()):
                if labels.items() <= sample.labels.items():
                    values.setdefault(field, []).append(sample.value)
    found = {f: max(v) if f == "kv_cache_usage" else sum(v) for f, v in values.items()}
    return Metrics(**{f: value for f, value in found.items() if abs(value) <= MOST})
