"""Resolves a target to the address of a server's HTTP API."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..collect.http.endpoint import Endpoint
from ..model.environment import STORE
from ..model.targets import Pod, ServerUrl, parse_target
from ..support.errors import VllmopsError
from ..support.urls import resolve_store_url
from .discovery import list_servers, open_remote_endpoint, resolve_server
from .record import InstanceFolder, InstanceRecord, list_instance_folders


def resolve_endpoint(target: str | None) -> Endpoint:
    """Where a target's API is; a URL may be of any machine.

    Raises:
        VllmopsError: as `resolve_server` and `open_remote_endpoint` do, or ``responses.no-url``.
    """
    if target is not None and isinstance(named := parse_target(target), ServerUrl | Pod):
        return open_remote_endpoint(named)
    try:
        server = resolve_server(target)
    except VllmopsError as error:
        if record := find_record(target):
            error.hint += Endpoint("", "", find_store_url(record)).store_hint
        raise
    if server.url is None:
        raise VllmopsError(
            "responses.no-url", f"{server.label} has no known address", "-t http://HOST:PORT"
        )
    store = find_store_url(server.record) if server.record else None
    return Endpoint(server.url, server.label, store, vllm=True)


def resolve_endpoint_with_store(target: str | None) -> Endpoint:
    """As `resolve_endpoint`, with the store of a server here that is named by its URL."""
    found = resolve_endpoint(target)
    if (
        found.store is None
        and found.local
        and target
        and isinstance(parse_target(target), ServerUrl)
    ):
        with suppress(VllmopsError):  # it is elsewhere, or no instance of ours
            if record := resolve_server(target).record:
                return replace(found, store=find_store_url(record))
    return found


def find_record(target: str | None) -> InstanceRecord | None:
    """The record of an instance that does not run, as named, or the only one."""
    records = [server.record for server in list_servers() if server.record]
    named = [record for record in records if target in {None, record.name}]
    return named[0] if len(named) == 1 else None


def find_store_url(record: InstanceRecord) -> str | None:
    """The URL of an instance's store, None if it has none that can be got at from outside."""
    url = record.environment.get(STORE)
    if url is None or url.startswith(("memory:", "none")):
        return None
    return resolve_store_url(Path(record.directory), url)


def guess_endpoint(target: str | None) -> Endpoint | None:
    """The address of a target, without a look at the processes: for completion; None if unknown."""
    if target and "://" in target:
        return resolve_endpoint(target)
    named = [InstanceFolder(target)] if target else list_instance_folders()
    alive = [folder for folder in named if folder.is_supervised()]
    record = alive[0].load_record() if len(alive) == 1 else None
    return Endpoint(record.url, record.name) if record and record.url else None
