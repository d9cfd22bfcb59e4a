"""Resolves a target to the address of a server's HTTP API."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..errors import VllmopsError
from ..store.settings import STORE
from ..store.urls import seen_from
from ..targets import Pod, Url, parsed
from ..vllm_api.endpoint import Endpoint
from .record import Folder, Record, folders
from .servers import endpoint_of, find, resolve


def endpoint(target: str | None) -> Endpoint:
    """Where a target's API is; a URL may be of any machine.

    Raises:
        VllmopsError: as `resolve` and `endpoint_of` do, or ``responses.no-url``.
    """
    if target is not None and isinstance(named := parsed(target), Url | Pod):
        return endpoint_of(named)
    try:
        server = resolve(target)
    except VllmopsError as error:
        if record := last(target):
            error.hint += Endpoint("", "", store_of(record)).or_store
        raise
    if server.url is None:
        raise VllmopsError(
            "responses.no-url", f"{server.label} has no known address", "-t http://HOST:PORT"
        )
    store = store_of(server.record) if server.record else None
    return Endpoint(server.url, server.label, store, vllm=True)


def behind(target: str | None) -> Endpoint:
    """As `endpoint`, with the store of a server of this machine that is named by its URL."""
    found = endpoint(target)
    if found.store is None and found.local and target and isinstance(parsed(target), Url):
        with suppress(VllmopsError):  # it is elsewhere, or no instance of ours
            if record := resolve(target).record:
                return replace(found, store=store_of(record))
    return found


def last(target: str | None) -> Record | None:
    """The record of an instance that does not run, as named, or the only one."""
    records = [server.record for server in find() if server.record]
    named = [record for record in records if target in {None, record.name}]
    return named[0] if len(named) == 1 else None


def store_of(record: Record) -> str | None:
    """The URL of an instance's store, None if it has none that can be got at from outside."""
    url = record.environment.get(STORE)
    if url is None or url.startswith(("memory:", "none")):
        return None
    return seen_from(Path(record.directory), url)


def running(target: str | None) -> Endpoint | None:
    """The address of a target, without a look at the processes: for completion; None if unknown."""
    if target and "://" in target:
        return endpoint(target)
    named = [Folder(target)] if target else folders()
    alive = [folder for folder in named if folder.supervised()]
    record = alive[0].read() if len(alive) == 1 else None
    return Endpoint(record.url, record.name) if record and record.url else None
