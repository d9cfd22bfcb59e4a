"""Options that select responses, their completion, and the selection."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer

from ...store.backend import STATUSES, Query, Response
from ..options import duration, time_
from .entries import age
from .sources import PAGE, usage

COMPLETION_S = 0.5


def statuses(incomplete: str) -> list[str]:
    """Statuses, for completion."""
    return sorted(each for each in STATUSES if each.startswith(incomplete))


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Models of the responses that a server has, for completion."""
    return sorted({each.model for each in glimpse(ctx) if each.model.startswith(incomplete)})


def every_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest responses that a server has, for completion."""
    return ids(glimpse(ctx), ctx, incomplete)


def running_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """The same of those that run."""
    return ids([each for each in glimpse(ctx) if each.running], ctx, incomplete)


def ids(found: list[Response], ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    named = ctx.params.get("ids") or ()
    return [
        (each.id, f"{each.status}, {each.model}, {age(each.created_at)}")
        for each in found
        if each.id.startswith(incomplete) and each.id not in named
    ]


def glimpse(ctx: typer.Context) -> list[Response]:
    """The newest responses of the server that is meant; none where that takes any trouble."""
    from ...vllm_api.responses import Http, glance  # noqa: PLC0415 - brings httpx

    async def ask() -> list[Response]:
        target = ctx.params.get("target") or os.environ.get("VLLMOPS_TARGET")
        found = glance(target)
        if found is None:
            return []
        async with asyncio.timeout(COMPLETION_S), Http(found, timeout_s=COMPLETION_S) as server:
            return (await server.page(Query(limit=PAGE))).responses

    with suppress(Exception):
        return [] if ctx.params.get("store") else asyncio.run(ask())
    return []


Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Ask no server but the store itself, everybody's: sqlite:///FILE, postgresql://, "
        "redis://.",
        show_default=False,
    ),
]
Statuses = Annotated[
    list[str] | None,
    typer.Option(
        "--status",
        metavar="STATUS",
        help="With this status only; repeatable.",
        autocompletion=statuses,
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="Of this model only.", autocompletion=models, show_default=False),
]
Since = Annotated[
    str | None,
    typer.Option(
        parser=time_,
        metavar="TIME",
        help="Made within this time only: 15m, 36h, 30d.",
        show_default=False,
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        parser=time_,
        metavar="TIME",
        help="Made before that: 15m, 36h, 30d.",
        show_default=False,
    ),
]


class Listed(Protocol):
    """As much of a response as tells whether it is meant."""

    @property
    def status(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def created_at(self) -> float: ...


@dataclass(frozen=True)
class Selection:
    """Which responses are meant.

    Args:
        statuses: with one of these; empty for any.
        model: of this one.
        newer: made after that, seconds since the epoch.
        older: made before that.
    """

    statuses: frozenset[str] = frozenset()
    model: str | None = None
    newer: float = 0.0
    older: float = float("inf")

    @property
    def any(self) -> bool:
        """Whether all are meant."""
        return self == Selection()

    def fits(self, response: Listed) -> bool:
        return (
            (not self.statuses or response.status in self.statuses)
            and self.model in {None, response.model}
            and self.newer <= response.created_at < self.older
        )

    def query(self, *, descending: bool, limit: int = PAGE) -> Query:
        """What a source is asked, which may give more."""
        (status,) = self.statuses if len(self.statuses) == 1 else (None,)
        return Query(model=self.model, status=status, descending=descending, limit=limit)


def selected(
    statuses: list[str] | None = None,
    model: str | None = None,
    since: str | None = None,
    older_than: str | None = None,
) -> Selection:
    """Which are meant by what was typed.

    Raises:
        VllmopsError: ``usage``.
    """
    for each in statuses or ():
        if each not in STATUSES:
            raise usage(f"{each!r} is no status", f"--status {', '.join(sorted(STATUSES))}")
    now = time.time()
    return Selection(
        frozenset(statuses or ()),
        model,
        now - duration(since) if since else 0.0,
        now - duration(older_than) if older_than else float("inf"),
    )
