"""``vllmops responses show``: one response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ... import output
from ...keys.ring import when
from ...output import Folded, Json, JsonText, Line, Result, Verbatim, command, size
from ...store import shape
from ...store.store import document
from ..options import Target
from .entries import STYLES, Entry, age, entry, state, tokens
from .selection import Store, every_id
from .sources import source

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from ...store.store import Events


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
