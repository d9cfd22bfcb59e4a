"""Options that select responses, their completion, and the selection."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer

from vllmops.commands.options import parse_duration, validate_duration
from vllmops.support.errors import make_usage_error

from ...store.backend import STATUSES, Response, ResponseQuery
from .response_rows import format_age
from .source_options import PAGE

COMPLETION_S = 0.5


def complete_status(incomplete: str) -> list[str]:
    """Statuses, for completion."""
    return sorted(status for status in STATUSES if status.startswith(incomplete))


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Models of the responses that a server has, for completion."""
    return sorted(
        {response.model for response in fetch_newest(ctx) if response.model.startswith(incomplete)}
    )


def complete_response_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest responses that a server has, for completion."""
    return make_completions(fetch_newest(ctx), ctx, incomplete)


def complete_running_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest running responses, for completion."""
    return make_completions(
        [response for response in fetch_newest(ctx) if response.is_running], ctx, incomplete
    )


def make_completions(
    responses: list[Response], ctx: typer.Context, incomplete: str
) -> list[tuple[str, str]]:
    named = ctx.params.get("ids") or ()
    return [
        (response.id, f"{response.status}, {response.model}, {format_age(response.created_at)}")
        for response in responses
        if response.id.startswith(incomplete) and response.id not in named
    ]


def fetch_newest(ctx: typer.Context) -> list[Response]:
    """The newest responses of the target server; none if anything fails."""
    from vllmops.servers.target_endpoint import guess_endpoint  # noqa: PLC0415

    from ...client import HttpResponseSource  # noqa: PLC0415 - brings httpx

    async def fetch_page() -> list[Response]:
        target = ctx.params.get("target") or os.environ.get("VLLMOPS_TARGET")
        url = guess_endpoint(target)
        if url is None:
            return []
        async with (
            asyncio.timeout(COMPLETION_S),
            HttpResponseSource(url, timeout_s=COMPLETION_S) as server,
        ):
            return (await server.list_responses(ResponseQuery(limit=PAGE))).responses

    with suppress(Exception):
        return [] if ctx.params.get("store") else asyncio.run(fetch_page())
    return []


Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Read this store directly, with the responses of all API keys: sqlite:///FILE, "
        "postgresql://, redis://.",
    ),
]
Statuses = Annotated[
    list[str] | None,
    typer.Option(
        "--status",
        metavar="STATUS",
        help="Only responses with this status; repeatable.",
        autocompletion=complete_status,
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Only responses of this model.", autocompletion=complete_model)
]
Since = Annotated[
    str | None,
    typer.Option(
        parser=validate_duration,
        metavar="TIME",
        help="Only responses created within this time: 15m, 36h, 30d.",
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        parser=validate_duration,
        metavar="TIME",
        help="Only responses older than this: 15m, 36h, 30d.",
    ),
]


class SelectableResponse(Protocol):
    """What a selection reads of a response."""

    @property
    def status(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def created_at(self) -> float: ...


@dataclass(frozen=True)
class Selection:
    """Which responses a command selects.

    Args:
        statuses: with one of these; empty for any.
        model: of this one.
        created_after: made after that, seconds since the epoch.
        created_before: made before that.
    """

    statuses: frozenset[str] = frozenset()
    model: str | None = None
    created_after: float = 0.0
    created_before: float = float("inf")

    @property
    def is_unfiltered(self) -> bool:
        """Whether it selects all responses."""
        return self == Selection()

    def matches(self, response: SelectableResponse) -> bool:
        return (
            (not self.statuses or response.status in self.statuses)
            and self.model in {None, response.model}
            and self.created_after <= response.created_at < self.created_before
        )

    def build_query(self, *, descending: bool, limit: int = PAGE) -> ResponseQuery:
        """The query for a source; its answer may hold more than the selection."""
        (status,) = self.statuses if len(self.statuses) == 1 else (None,)
        return ResponseQuery(model=self.model, status=status, descending=descending, limit=limit)


def parse_selection(
    statuses: list[str] | None = None,
    model: str | None = None,
    newer_than: str | None = None,
    older_than: str | None = None,
) -> Selection:
    """The selection that options name.

    Raises:
        VllmopsError: ``usage``.
    """
    for status in statuses or ():
        if status not in STATUSES:
            raise make_usage_error(
                f"{status!r} is no status", f"--status {', '.join(sorted(STATUSES))}"
            )
    now = time.time()
    return Selection(
        frozenset(statuses or ()),
        model,
        now - parse_duration(newer_than) if newer_than else 0.0,
        now - parse_duration(older_than) if older_than else float("inf"),
    )
