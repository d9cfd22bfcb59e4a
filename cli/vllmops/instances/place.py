"""Resolves a target to the address of a server's HTTP API."""

from __future__ import annotations

from ..errors import Exit, VllmopsError
from ..store.settings import STORE
from ..targets import Pod, Url, parsed
from ..vllm_api.place import Place
from .record import Folder, Record, folders
from .servers import find, place_of, resolve


def place(target: str | None) -> Place:
    """Where a target's API is; a URL may be of any machine.

    Raises:
        VllmopsError: as `resolve` and `place_of` do, or ``responses.no-url``.
    """
    if target is not None and isinstance(named := parsed(target), Url | Pod):
        return place_of(named)
    try:
        server = resolve(target)
    except VllmopsError as error:
        if record := last(target):
            error.hint += Place("", "", store_of(record)).or_store
        raise
    if server.url is None:
        raise VllmopsError(
            "responses.no-url",
            f"{server.label} has no known address",
            "-t http://HOST:PORT",
            exit_code=Exit.NOT_FOUND,
        )
    store = store_of(server.record) if server.record else None
    return Place(server.url, server.label, store, vllm=True)


def last(target: str | None) -> Record | None:
    """The record of an instance that does not run, as named, or the only one."""
    records = [server.record for server in find() if server.record]
    named = [record for record in records if target in {None, record.name}]
    return named[0] if len(named) == 1 else None


def store_of(record: Record) -> str | None:
    """The URL of an instance's store, None if it has none that can be got at from outside."""
    url = record.environment.get(STORE)
    return None if url is None or url.startswith(("memory:", "none")) else url


def glance(target: str | None) -> Place | None:
    """The same in no time, None if it takes more: for completion."""
    if target and "://" in target:
        return place(target)
    named = [Folder(target)] if target else folders()
    running = [folder for folder in named if folder.supervised()]
    record = running[0].read() if len(running) == 1 else None
    return Place(record.url, record.name) if record and record.url else None
