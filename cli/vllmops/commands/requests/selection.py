"""Options that the commands on requests share, and their completion."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Annotated

import typer

from ...errors import VllmopsError
from ...instances.servers import Server, resolve
from ...output import Progress
from ...requests import listing
from ...requests.listing import Listing, Row
from ..options import seconds

STUCK_S = 30.0

StuckAfter = Annotated[
    float,
    typer.Option(
        "--stuck-after",
        parser=seconds(1),
        help="Seconds without progress after which a request counts as stuck.",
    ),
]


def request_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the requests that a server works on, for completion."""
    with suppress(Exception):
        server = resolve(ctx.params.get("target") or os.environ.get("VLLMOPS_TARGET"))
        rows = listing.take(server, STUCK_S).rows
        return [
            (row.http_id or row.id, f"{row.state}, {row.route or 'no HTTP request'}")
            for row in rows
            if row.id and (row.http_id or row.id).startswith(incomplete)
        ]
    return []


def gathered(server: Server, stuck_s: float, *, quiet: bool) -> Listing:
    """The requests of a server, with a line of progress."""
    with Progress(time.time(), quiet=quiet) as progress:
        progress.update(f"{server.label}: asking every process for its requests")
        return listing.take(server, stuck_s)


def named(known: Listing, server: Server, word: str) -> list[Row]:
    """The requests that an id means.

    Raises:
        VllmopsError: ``requests.unknown``.
    """
    if rows := listing.matching(known.rows, word):
        return rows
    raise VllmopsError(
        "requests.unknown",
        f"{server.label} works on no request {word!r}",
        f"vllmops requests list -t {server.label}",
    )
