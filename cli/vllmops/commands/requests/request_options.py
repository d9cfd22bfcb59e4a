"""Options that the commands on requests share, and their completion."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Annotated

import typer

from ...observe.requests import listing
from ...observe.requests.listing import InFlightRequest, RequestListing
from ...servers.discovery import Server, resolve_server
from ...support.errors import VllmopsError
from ...support.output import Progress
from ..options import make_seconds_parser

STUCK_S = 30.0

StuckAfter = Annotated[
    float,
    typer.Option(
        "--stuck-after",
        parser=make_seconds_parser(1),
        help="Seconds without progress after which a request counts as stuck.",
    ),
]


def complete_request_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the requests that a server works on, for completion."""
    with suppress(Exception):
        server = resolve_server(ctx.params.get("target") or os.environ.get("VLLMOPS_TARGET"))
        rows = listing.list_requests(server, STUCK_S).rows
        return [
            (row.http_id or row.id, f"{row.state}, {row.route or 'no HTTP request'}")
            for row in rows
            if row.id and (row.http_id or row.id).startswith(incomplete)
        ]
    return []


def collect_requests(server: Server, stuck_s: float, *, quiet: bool) -> RequestListing:
    """The requests of a server, with a line of progress."""
    with Progress(time.time(), quiet=quiet) as progress:
        progress.update(f"{server.label}: asking every process for its requests")
        return listing.list_requests(server, stuck_s)


def require_requests(
    known_requests: RequestListing, server: Server, request_id: str
) -> list[InFlightRequest]:
    """The requests that an id means.

    Raises:
        VllmopsError: ``requests.unknown``.
    """
    if rows := listing.select_by_id(known_requests.rows, request_id):
        return rows
    raise VllmopsError(
        "requests.unknown",
        f"{server.label} works on no request {request_id!r}",
        f"vllmops requests list -t {server.label}",
    )
