"""What the commands on stored responses share: where they are, which are meant, how far one is."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import msgspec
import typer

from .. import output
from ..errors import Exit, VllmopsError
from ..output import Progress, Result, span
from ..store import shape
from ..store.backend import STATUSES, CursorUnknown, Query, Response, StoreUnavailable
from ..store.store import document
from .options import duration, time_

if TYPE_CHECKING:
    from ..store.source import Outcome, Source

T = TypeVar("T")

PAGE = 100
# Requests that are on their way at once.
AT_ONCE = 16
# A store or a server that says it is unavailable is asked again, each time after what it says.
TRIES = 5
# How long something goes on before it tells how far it is, and how often then.
QUIET_S, OFTEN_S, SELDOM_S = 1.0, 0.2, 5.0
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
    from ..instances.place import glance  # noqa: PLC0415
    from ..vllm_api.responses import Http  # noqa: PLC0415 - brings httpx

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


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is listed.

    Args:
        created_at: seconds since the epoch.
        owner: a hash of the API key that made it; None where a server was asked, which shows those
            of one key.
        bytes: of the response object as JSON.
        damaged: why it can't be told in full, in words; None where it can.
    """

    id: str
    status: str
    model: str
    created_at: float
    previous_response_id: str | None
    background: bool
    input_tokens: int | None
    output_tokens: int | None
    bytes: int
    error: str | None
    owner: str | None
    damaged: str | None = None


def entry(response: Response, *, whole: bool) -> Entry:
    """What is listed of a response.

    Args:
        response: as a source gives it.
        whole: whether that tells owners.
    """
    try:
        head, damaged = shape.read(response), None
    except ValueError as error:
        head, damaged = shape.Document(), f"{error}"
    known = 0 <= response.created_at < shape.LATEST
    usage = head.usage
    return Entry(
        id=response.id,
        status=response.status,
        model=response.model,
        created_at=response.created_at if known else 0.0,
        previous_response_id=response.previous_id,
        background=bool(head.background),
        input_tokens=usage.input_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        bytes=len(response.body) if damaged else len(document(response)),
        error=response.error or (head.error.message if head.error else None),
        owner=response.owner if whole else None,
        damaged=damaged,
    )


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


def source(target: str | None, store: str | None, *, create: bool = False) -> Source:
    """Where responses are looked at.

    Raises:
        VllmopsError: ``usage``, or as `place` and `Storage` do.
    """
    if store is None:
        from ..instances.place import place  # noqa: PLC0415
        from ..vllm_api.responses import Http  # noqa: PLC0415 - brings httpx

        return Http(place(target))
    either(target)
    from ..store.direct import Storage  # noqa: PLC0415

    return Storage(store, create=create)


def either(target: str | None) -> None:
    """Refuse a target beside a store, unless it is the environment's.

    Raises:
        VllmopsError: ``usage``.
    """
    if target and target != os.environ.get("VLLMOPS_TARGET"):
        raise usage("--target names a server, and --store asks none", "one of them")


async def walk(source: Source, query: Query) -> AsyncIterator[list[Response]]:
    """All responses, page by page, though some go meanwhile.

    Args:
        source: where.
        query: which; its ``limit`` is a page's.

    Raises:
        CursorUnknown: there is no response to begin behind.
        VllmopsError: ``responses.refused``, the list has no end.
    """
    trail = [query.after] if query.after else []
    told: set[str] = set()
    asked: set[str | None] = set()
    while True:
        at = msgspec.structs.replace(query, after=trail[-1] if trail else None)
        try:
            page = await patiently(partial(source.page, at))
        except CursorUnknown:
            if not told:
                raise
            trail.pop()  # it is gone; what was before it may still be there
            continue
        yield [each for each in page.responses if not each.id or each.id not in told]
        found = [each.id for each in page.responses if each.id]
        new = set(found) - told
        told |= new
        trail += found
        if not page.more or not found:
            return
        if not new and at.after in asked:
            raise VllmopsError(
                "responses.refused", f"{source.name} gives the same part of its list for ever"
            )
        asked.add(at.after)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call a few times while the store is unavailable.

    Raises:
        StoreUnavailable: it still is.
    """
    for _ in range(TRIES):
        try:
            return await call()
        except StoreUnavailable as error:
            await asyncio.sleep(error.retry_after_s)
    return await call()


async def spread(each: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do something to each, several at once.

    Raises:
        VllmopsError: of the first that raises one; no others are begun then.
    """
    left = iter(each)

    async def some() -> None:
        for one in left:
            await work(one)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Counting:
    """Tells how far something is, once it takes longer than a moment.

    Args:
        progress: where.
        what: is done to them, as in ``deleted``.
        total: how many there are, None where that is not known.
    """

    def __init__(self, progress: Progress, what: str, total: int | None = None) -> None:
        self.progress = progress
        self.what = what
        self.total = total
        self.done = 0
        self.next = time.monotonic() + QUIET_S

    def add(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if now >= self.next:
            self.next = now + (SELDOM_S if self.progress.plain else OFTEN_S)
            self.progress.update(f"{self.far} {self.what}")

    @property
    def far(self) -> str:
        return f"{self.done:,}" + (f" of {self.total:,}" if self.total is not None else "")

    def interrupted(self, data: Any = None) -> VllmopsError:
        """The error of a command that was ended on the way."""
        return VllmopsError(
            "interrupted",
            f"interrupted: {self.far} {self.what}",
            "the same command goes on from here",
            exit_code=Exit.INTERRUPTED,
            data=data,
        )


def ended(result: Result, failure: VllmopsError | None, *, as_json: bool) -> Result:
    """A result, or the failure that goes with it, told after it.

    Raises:
        VllmopsError: the failure.
    """
    if failure is None:
        return result
    failure.data = result.data
    if not as_json:
        output.show(*result.text())
    raise failure


def judged(outcomes: list[Outcome], what: str) -> VllmopsError | None:
    """The failure of what was to be done to several, None where all was done.

    Args:
        outcomes: of each.
        what: was to be done to them, as in ``deleted``.
    """
    bad = [each for each in outcomes if not each.done]
    if not bad:
        return None
    codes, exits = {each.code for each in bad}, {each.exit_code for each in bad}
    if len(outcomes) == 1:
        message = f"{bad[0].id} was not {what}: {bad[0].told}"
    else:
        message = f"{len(bad):,} of {len(outcomes):,} were not {what}"
    code = bad[0].code if len(codes) == 1 else ""
    return VllmopsError(
        code or "responses.some-failed",
        message,
        "vllmops responses list shows what there is",
        exit_code=Exit(bad[0].exit_code) if len(exits) == 1 else Exit.FAILED,
    )


def usage(message: str, hint: str) -> VllmopsError:
    return VllmopsError("usage", message, hint, exit_code=Exit.USAGE)


def age(created_at: float) -> str:
    """How long ago that was, for a person."""
    return span(max(0.0, time.time() - created_at))
