"""Runs background responses again that ran when their server went, from what the store has of them.

A run keeps its request in its stored body until it ends by itself, with the name of the start of
the server that runs it. The next start takes up those of the one before it. No other server does,
so each is run again at most once.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from vllmops.agent.transport.unix_socket import make_agent_directory
from vllmops.model.environment import RERUN, RUN
from vllmops.support.errors import VllmopsError
from vllmops.support.files import lock_file

from ...store import credential_redaction
from ...store.backend import BROKEN, EVERYBODY, FINISHED, Response, ResponseQuery
from ...store.response_store import ASKED, BackgroundRequest, ResponseStore
from ..wire_format import ENCODE

# In the metadata of a response that was run again: what it is.
MARK, AGAIN = "vllmops.rerun", "the server was restarted while this response ran"
PAGE = 100


class RerunBody(msgspec.Struct):
    """The part of a run's body from which it can be run again."""

    vllmops: BackgroundRequest | None = None
    metadata: dict[str, str] | None = None


BODY = msgspec.json.Decoder(RerunBody)


def embed_request(body: bytes, request: bytes) -> bytes:
    """The body of a run with its request, unless that can't be stored or has credentials.

    Args:
        body: the response object as JSON.
        request: as JSON.
    """
    try:
        asked: dict[str, Any] = msgspec.json.decode(request)
    except (msgspec.DecodeError, RecursionError):  # 1e400, for example, which Python reads
        return body
    asked.pop("input", None)
    run = os.environ.get(RUN)
    if not run or credential_redaction.redact_value(asked) != asked:
        return body
    return ENCODE({**msgspec.json.decode(body), ASKED: BackgroundRequest(run=run, request=asked)})


def extract_request(response: Response) -> tuple[str, dict[str, Any], Mapping[str, str]]:
    """The start of a server that ran a response, its request and its metadata; empty if unknown."""
    try:
        found = BODY.decode(response.body)
    except BROKEN:
        return "", {}, {}
    if found.vllmops is None:
        return "", {}, {}
    return found.vllmops.run, found.vllmops.request, found.metadata or {}


async def requeue_interrupted_runs(
    store: ResponseStore,
) -> AsyncIterator[tuple[Response, dict[str, Any]]]:
    """Put back into the queue what the start before this one ran; with the request of each.

    One process of a server does so, before any answers requests.

    Args:
        store: that has them.

    Raises:
        StoreUnavailable: the store is down.
    """
    before = os.environ.get(RERUN)
    if not before:
        return
    path = make_agent_directory() / f"rerun-{before}.lock"
    if (lock := lock_file(path)) is None:
        return
    try:
        for run in await list_interrupted_runs(store, before):
            _, request, metadata = extract_request(run)
            if MARK in metadata:
                continue
            request["metadata"] = {**metadata, MARK: AGAIN}
            body = {**msgspec.json.decode(run.body), "metadata": request["metadata"]}
            again = replace(run, status="queued", error="", body=ENCODE(body))
            if await store.put(again, unless_status=FINISHED - {run.status}):
                yield again, request
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


async def list_interrupted_runs(store: ResponseStore, start_id: str) -> list[Response]:
    """What a start of a server ran and did not end, the oldest first; raises StoreUnavailable."""
    found: dict[str, Response] = {}
    for status in ("queued", "in_progress", "failed"):
        query: ResponseQuery | None = ResponseQuery(status=status, limit=PAGE, descending=False)
        while query:
            try:
                page = await store.list_responses(EVERYBODY, query)
            except VllmopsError as error:
                if error.code != "store.cursor":
                    raise
                break  # the last one was deleted meanwhile
            found |= {one.id: one for one in page.responses if extract_request(one)[0] == start_id}
            query = replace(query, after_id=page.responses[-1].id) if page.has_more else None
    return sorted(found.values(), key=lambda one: one.created_at)
