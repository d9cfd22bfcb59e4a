"""``vllmops responses``: what the Responses API has stored."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from .. import output
from ..output import Folded, Json, JsonText, Line, Progress, Result, Verbatim, command, size
from ..store import shape
from ..store.backend import CursorUnknown, Stats
from ..store.store import document
from .check_store import check_store
from .keyring import when
from .options import Target, count
from .removal import cancel, delete, purge
from .sources import (
    PAGE,
    Counting,
    Entry,
    Model,
    Selection,
    Since,
    Statuses,
    Store,
    age,
    entry,
    every_id,
    selected,
    source,
    usage,
    walk,
)
from .transfer import export, import_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from ..store.source import Source
    from ..store.store import Events

app = output.typer_app("Stored responses.")

STYLES = {
    "failed": "red",
    "damaged": "red",
    "cancelled": "yellow",
    "queued": "cyan",
    "in_progress": "cyan",
}
# From here on a line has room for all there is to tell.
WIDE = 100
OWNER_LETTERS = 8
AT_A_TIME = 500
OWNERS = 10  # shown, those who have most


@app.callback()
def responses() -> None:
    """Stored responses."""


@app.command("list", epilog="Example: vllmops responses list --status failed")
@command
def list_(
    *,
    target: Target = None,
    store: Store = None,
    status: Statuses = None,
    model: Model = None,
    since: Since = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", parser=count(), help="At most so many.")
    ] = 20,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Those behind this one.", autocompletion=every_id, show_default=False
        ),
    ] = None,
    json_: Json = False,
) -> Result:
    """List responses, the newest first, with tokens in + out.

    A server shows those of one API key, which is taken from VLLM_API_KEY; the
    store itself has everybody's. On this machine the key is sent to a process of
    yours or of root's alone.
    """
    wanted = selected(status, model, since)
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "looked at")
        found, more, whole = asyncio.run(
            listed(target, store, wanted, None if every else limit, after, counting)
        )
    data = {"responses": found, "next": found[-1].id if more else None}
    nothing = "nothing is stored" if wanted.any and not after else "no response is meant by that"
    if not whole:
        nothing += " that this API key may see" if keyed() else ""
    return Result(data, lambda: listing(found, more=more) if found else [nothing])


def keyed() -> bool:
    return bool(os.environ.get("VLLM_API_KEY"))


async def listed(
    target: str | None,
    store: str | None,
    wanted: Selection,
    limit: int | None,
    after: str | None,
    counting: Counting,
) -> tuple[list[Entry], bool, bool]:
    """The newest that are meant, whether there are others, and whether they are everybody's.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    found: list[Entry] = []
    query = wanted.query(descending=True, limit=min(PAGE, (limit or PAGE) + 1))
    query = msgspec.structs.replace(query, after=after)
    async with source(target, store) as responses:
        try:
            async for page in walk(responses, query):
                for each in page:
                    if each.created_at < wanted.newer:
                        return found, False, responses.whole
                    if not wanted.fits(each):
                        continue
                    if len(found) == limit:
                        return found, True, responses.whole
                    found.append(entry(each, whole=responses.whole))
                counting.add(len(page))
        except CursorUnknown as error:
            raise usage(f"--after: {responses.name} has no response {after!r}", "--all") from error
        return found, False, responses.whole


def listing(found: Sequence[Entry], *, more: bool) -> list[RenderableType]:
    """A line for each, of 80 columns where their ids are vLLM's."""
    from rich.text import Text  # noqa: PLC0415

    owners = {each.owner for each in found if each.owner is not None}
    columns = ["id", "status", "model", "age", "tokens", "size"]
    if len(owners) > 1:
        columns.insert(4, "owner")
    if output.console().width < WIDE:
        del columns[5:]
    # A table is laid out as a whole, which takes its time: of very many the first are shown sooner.
    shown: list[RenderableType] = [
        rows(found[start : start + AT_A_TIME], columns) for start in range(0, len(found), AT_A_TIME)
    ]
    if len(owners) == 1 and (owner := owners.pop()):
        shown.append(Text(f"all of API key {owner[:OWNER_LETTERS]}…, by its SHA-256", style="dim"))
    if more:
        shown.append(Text(f"there are more: --all, or --after {found[-1].id}", style="dim"))
    return shown


def rows(found: Sequence[Entry], columns: list[str]) -> Table:
    """Some of the lines, with a head of their own."""
    from rich.text import Text  # noqa: PLC0415

    table = output.table(*columns, right=["age", "tokens", "size"])
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for each in found:
        cells = {
            "id": Text(each.id),
            "status": Text(state(each), STYLES.get(state(each), "")),
            "model": Text(each.model),
            "age": Text(age(each.created_at) if each.created_at else "-"),
            "owner": Text((each.owner or "-")[:OWNER_LETTERS]),
            "tokens": Text(tokens(each)),
            "size": Text(size(each.bytes)),
        }
        table.add_row(*(cells[name] for name in columns))
    return table


def state(each: Entry) -> str:
    """The status of a response, or that it is damaged."""
    return "damaged" if each.damaged else each.status


def tokens(each: Entry) -> str:
    """Tokens in and out, a dash where there are none yet."""
    if each.input_tokens is None:
        return "-"
    return f"{each.input_tokens}+{each.output_tokens}"


@app.command(epilog="Example: vllmops responses show resp_1f2e --input")
@command
def show(
    response_id: Annotated[
        str, typer.Argument(metavar="ID", help="The response.", autocompletion=every_id)
    ],
    *,
    target: Target = None,
    store: Store = None,
    given: Annotated[
        bool, typer.Option("--input", help="What its turn was given, too; not those before it.")
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="What is kept of its background stream, too.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="JSON as the API gives it; of --input or --events alone.")
    ] = False,
    json_: Json = False,
) -> Result:
    """Show a response: what became of it, and what it says."""
    found, body, items, logs = asyncio.run(seen(target, store, response_id, given, events))
    logged = [msgspec.Raw(json_of(each)) for part in logs for each in part.events]
    data: dict[str, Any] = {
        **msgspec.structs.asdict(found),
        "response": msgspec.Raw(body),
        "input": msgspec.Raw(items) if given else None,
        "events": logged if events else None,
    }
    if raw:
        return Result(data, lambda: rawly(body, items, logged, given=given, events=events))
    return Result(data, lambda: list(told(found, body, items if given else None, logs, events)))


async def seen(
    target: str | None, store: str | None, response_id: str, given: bool, events: bool
) -> tuple[Entry, bytes, bytes, list[Events]]:
    """A response as it is listed, its object, its input, and its events, as far as wanted.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    async with source(target, store) as responses:
        found = await responses.get(response_id)
        items = await responses.items(found) if given else b"[]"
        logs = await responses.events(found) if events else []
        return entry(found, whole=responses.whole), json_of(document(found)), json_of(items), logs


def json_of(document: bytes) -> bytes:
    """JSON as it is; null where it is none, or can't be put into other JSON."""
    try:
        shape.shallow(document)
        msgspec.json.decode(document)
    except (ValueError, RecursionError):
        return b"null"
    return document


def rawly(
    body: bytes, items: bytes, logged: list[msgspec.Raw], *, given: bool, events: bool
) -> list[RenderableType]:
    """JSON, the object and its input over several lines, and a line for each event."""
    wanted = [body] if not given and not events else [items] if given else []
    shown: list[RenderableType] = [
        JsonText(msgspec.json.format(each, indent=2).decode()) for each in wanted
    ]
    return shown + [JsonText(bytes(each).decode()) for each in logged]


def told(
    found: Entry, body: bytes, items: bytes | None, logs: list[Events], events: bool
) -> Iterator[RenderableType]:
    """The same for a person."""
    from rich.text import Text  # noqa: PLC0415

    style = STYLES.get(state(found), "green")
    yield Text.assemble((found.id, "bold"), "  ", (state(found), style))
    facts = output.table("", "")
    facts.show_header = False
    for name, value in (
        ("model", found.model),
        ("damaged", found.damaged),
        ("made", found.created_at and f"{when(found.created_at)}, {age(found.created_at)} ago"),
        ("follows", found.previous_response_id),
        ("run", "in the background" if found.background else "in the foreground"),
        ("tokens", tokens(found) if found.input_tokens is not None else None),
        ("size", size(found.bytes)),
        ("API key", found.owner and f"{found.owner}, by its SHA-256"),
        ("error", found.error),
    ):
        if value:
            facts.add_row(name, Text(value))
    yield facts
    if items is not None:
        yield Text("\ninput", style="bold")
        yield Folded(tuple(said(lambda: shape.ITEMS.decode(items))))
    yield Text("\noutput", style="bold")
    yield Folded(
        tuple(said(lambda: shape.DOCUMENT.decode(body).output)) or (Line(2, "none", "dim"),)
    )
    if events:
        yield Text("\nevents", style="bold")
        if not logs:
            yield Text(
                "  none are kept: it was no stream in the background, or is over for too long"
            )
        for part in logs:
            for number, event in enumerate(part.events, part.first):
                yield Verbatim(f"{number:>7}  {brief(event)}")
        if found.status in {"queued", "in_progress"}:
            yield Text("  it goes on")


def said(items: Callable[[], list[shape.Item]]) -> Iterator[Line]:
    """What items say, or that they can't be read."""
    try:
        yield from spoken(items())
    except shape.BROKEN as error:
        yield Line(2, f"it is damaged: {error}", "red")


def spoken(items: list[shape.Item]) -> Iterator[Line]:
    """What items say, whoever made them."""
    for item in items:
        kind = item.type or "message"
        yield Line(2, " ".join(filter(None, (item.role, *label(kind, item)))), "cyan")
        for text in texts(item):
            for line in text.splitlines() or [""]:
                yield Line(4, line)


def label(kind: str, item: shape.Item) -> Iterator[str]:
    """How an item is called, where its role does not say enough."""
    if kind != "message":
        yield kind
        yield from filter(None, (item.name, item.call_id))


def texts(item: shape.Item) -> Iterator[str]:
    """The texts in an item; other parts by their type."""
    for value in (item.content, item.summary, item.output, item.arguments, item.input):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str):
                yield part
            elif isinstance(part, dict):
                text = part.get("text", part.get("refusal"))
                yield text if isinstance(text, str) else f"[{part.get('type', 'part')}]"


def brief(event: bytes) -> str:
    """An event in a line."""
    try:
        found: dict[str, Any] = msgspec.json.decode(event, type=dict[str, Any])
    except shape.BROKEN as error:
        return f"it is damaged: {error}"
    delta = found.get("delta")
    return f"{found.get('type')}" + (f"  {delta!r}" if isinstance(delta, str) else "")


@app.command(epilog="Example: vllmops responses stats --store sqlite:///a.db")
@command
def stats(*, target: Target = None, store: Store = None, json_: Json = False) -> Result:
    """Count responses by status, model and API key; bytes, age and evictions.

    A server tells of those of one API key, each as JSON, and not of events
    and evictions; the store itself of all, and of bytes as they are kept.
    """
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "counted")
        name, found, whole = asyncio.run(counted(target, store, counting))
    data = {"of": name, "count": found.count, **msgspec.structs.asdict(found)}
    if not whole:
        data["evictions"] = None
    return Result(data, lambda: list(figures(data)))


async def counted(
    target: str | None, store: str | None, counting: Counting
) -> tuple[str, Stats, bool]:
    """What there is, whose word that is, and whether it is everybody's.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    async with source(target, store) as responses:
        if responses.whole:
            from ..store.direct import Storage  # noqa: PLC0415

            assert isinstance(responses, Storage)
            return responses.name, await responses.stats(), True
        return responses.name, await added_up(responses, counting), False


async def added_up(responses: Source, counting: Counting) -> Stats:
    """The same from a list of all."""
    statuses, models, total = Counter[str](), Counter[str](), 0
    oldest: float | None = None
    async for page in walk(responses, Selection().query(descending=True)):
        statuses.update(each.status for each in page)
        models.update(each.model for each in page)
        total += sum(len(each.body) for each in page)
        oldest = min([*([] if oldest is None else [oldest]), *(each.created_at for each in page)])
        counting.add(len(page))
    return Stats(
        statuses=dict(statuses),
        models=dict(models),
        bytes=total,
        event_bytes=None,
        oldest=oldest,
        evictions=0,
    )


def figures(data: dict[str, Any]) -> Iterator[RenderableType]:
    """The same for a person."""
    from rich.text import Text  # noqa: PLC0415

    yield Text(f"{data['of']}: {data['count']:,} responses", style="bold")
    for name, head in (("statuses", "status"), ("models", "model")):
        if data[name]:
            table = output.table(head, "", right=[""])
            for word, count in sorted(data[name].items(), key=lambda each: -each[1]):
                table.add_row(Text(word, STYLES.get(word, "")), f"{count:,}")
            yield table
    if data["owners"]:
        table = output.table("API key, by its SHA-256", "", right=[""])
        for owner, count in list(data["owners"].items())[:OWNERS]:
            table.add_row(Text(f"{owner[:OWNER_LETTERS]}…" if owner else "none"), f"{count:,}")
        if len(data["owners"]) > OWNERS:
            table.add_row(f"and {len(data['owners']) - OWNERS:,} others", "", style="dim")
        yield table
    rest = output.table("", "")
    rest.show_header = False
    rest.add_row("bytes", size(data["bytes"]))
    rest.add_row("of events", told_or(data["event_bytes"], size))
    rest.add_row("oldest", f"{age(data['oldest'])} ago" if data["oldest"] is not None else "-")
    rest.add_row("evicted, ever", told_or(data["evictions"], "{:,}".format))
    yield rest


def told_or(value: Any, told: Any) -> str:
    return "not known to a server; --store tells" if value is None else str(told(value))


app.command(epilog="Example: vllmops responses cancel --all-running")(cancel)
app.command(epilog="Example: vllmops responses delete resp_1f2e resp_3d4c")(delete)
app.command(epilog="Example: vllmops responses purge --older-than 30d --dry-run")(purge)
app.command(epilog="Example: vllmops responses export -o responses.jsonl")(export)
app.command("import", epilog="Example: vllmops responses import a.jsonl -t demo")(import_)
app.command(epilog="Example: vllmops responses check-store postgresql://user@host/database")(
    check_store
)
