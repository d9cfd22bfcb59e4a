"""``vllmops responses show``: one response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vllmops.commands.options import Target
from vllmops.support import output
from vllmops.support.durations import format_utc_time
from vllmops.support.output import (
    FoldedLines,
    IndentedLine,
    Json,
    JsonText,
    Result,
    VerbatimText,
    format_bytes,
    print_result,
)

from ...store import response_schema
from ...store.backend import BROKEN
from ...store.response_store import encode_response
from .response_options import Store, complete_response_id
from .response_rows import (
    STYLES,
    ResponseEntry,
    format_age,
    format_status,
    format_tokens,
    make_entry,
)
from .source_options import open_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from ...store.response_store import EventBatch


@print_result
def show(
    response_id: Annotated[
        str, typer.Argument(metavar="ID", help="The response.", autocompletion=complete_response_id)
    ],
    *,
    target: Target = None,
    store: Store = None,
    include_input: Annotated[
        bool,
        typer.Option("--input", help="Also show the input of this turn, without earlier turns."),
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="Also show the stored events of a background stream.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Print the API's JSON; with --input or --events, only that."),
    ] = False,
    json_: Json = False,
) -> Result:
    """Show a response: its status, tokens and output."""
    entry, body, items, logs = asyncio.run(
        load_response(target, store, response_id, include_input, events)
    )
    logged = [msgspec.Raw(sanitize_json(event)) for part in logs for event in part.events]
    data: dict[str, Any] = {
        **msgspec.structs.asdict(entry),
        "response": msgspec.Raw(body),
        "input": msgspec.Raw(items) if include_input else None,
        "events": logged if events else None,
    }
    if raw:
        return Result(
            data,
            lambda: render_raw(body, items, logged, include_input=include_input, events=events),
        )
    return Result(
        data,
        lambda: list(render_response(entry, body, items if include_input else None, logs, events)),
    )


async def load_response(
    target: str | None, store: str | None, response_id: str, include_input: bool, events: bool
) -> tuple[ResponseEntry, bytes, bytes, list[EventBatch]]:
    """A response as it is listed, its object, its input, and its events, as far as documents.

    Raises:
        VllmopsError: as `open_source` and its methods.
    """
    async with open_source(target, store) as responses:
        response = await responses.get(response_id)
        items = await responses.list_input_items(response) if include_input else b"[]"
        logs = await responses.read_events(response) if events else []
        return (
            make_entry(response, has_owners=responses.has_all_owners),
            sanitize_json(encode_response(response)),
            sanitize_json(items),
            logs,
        )


def sanitize_json(document: bytes) -> bytes:
    """The JSON unchanged; null if it is invalid or nested too deeply."""
    try:
        response_schema.validate_depth(document)
        msgspec.json.decode(document)
    except (ValueError, RecursionError):
        return b"null"
    return document


def render_raw(
    body: bytes,
    items: bytes,
    stored_events: list[msgspec.Raw],
    *,
    include_input: bool,
    events: bool,
) -> list[RenderableType]:
    """JSON, the object and its input over several lines, and a line for each event."""
    documents = [body] if not include_input and not events else [items] if include_input else []
    shown: list[RenderableType] = [
        JsonText(msgspec.json.format(text, indent=2).decode()) for text in documents
    ]
    return shown + [JsonText(bytes(event).decode()) for event in stored_events]


def render_response(
    entry: ResponseEntry, body: bytes, items: bytes | None, logs: list[EventBatch], events: bool
) -> Iterator[RenderableType]:
    """Human-readable output."""
    from rich.text import Text  # noqa: PLC0415

    style = STYLES.get(format_status(entry), "green")
    yield Text.assemble((entry.id, "bold"), "  ", (format_status(entry), style))
    rows = [
        ("model", entry.model),
        ("damaged", entry.damaged),
        (
            "created",
            entry.created_at
            and f"{format_utc_time(entry.created_at)}, {format_age(entry.created_at)} ago",
        ),
        ("follows", entry.previous_response_id),
        ("run", "in the background" if entry.background else "in the foreground"),
        ("tokens", format_tokens(entry) if entry.input_tokens is not None else None),
        ("size", format_bytes(entry.bytes)),
        ("API key", entry.owner and f"{entry.owner} (SHA-256)"),
        ("error", entry.error),
    ]
    yield output.make_facts_table((name, value) for name, value in rows if value)
    if items is not None:
        yield output.style_text("\ninput", "bold")
        yield FoldedLines(tuple(render_items(lambda: response_schema.ITEMS.decode(items))))
    yield output.style_text("\noutput", "bold")
    yield FoldedLines(
        tuple(render_items(lambda: response_schema.DOCUMENT.decode(body).output))
        or (IndentedLine(2, "none", "dim"),)
    )
    if events:
        yield output.style_text("\nevents", "bold")
        if not logs:
            yield "  no stored events: it was not a background stream, or it ended too long ago"
        for part in logs:
            for number, event in enumerate(part.events, part.first_number):
                yield VerbatimText(f"{number:>7}  {format_event(event)}")
        if entry.status in {"queued", "in_progress"}:
            yield "  the response is still running"


def render_items(items: Callable[[], list[response_schema.ResponseItem]]) -> Iterator[IndentedLine]:
    """The lines of items, or why they cannot be read."""
    try:
        yield from render_item_lines(items())
    except BROKEN as error:
        yield IndentedLine(2, f"damaged: {error}", "red")


def render_item_lines(items: list[response_schema.ResponseItem]) -> Iterator[IndentedLine]:
    """The role and text of items, as lines."""
    for item in items:
        kind = item.type or "message"
        yield IndentedLine(
            2, " ".join(filter(None, (item.role, *describe_item(kind, item)))), "cyan"
        )
        for text in extract_texts(item):
            for line in text.splitlines() or [""]:
                yield IndentedLine(4, line)


def describe_item(kind: str, item: response_schema.ResponseItem) -> Iterator[str]:
    """Type, name and call id of an item that is not a message."""
    if kind != "message":
        yield kind
        yield from filter(None, (item.name, item.call_id))


def extract_texts(item: response_schema.ResponseItem) -> Iterator[str]:
    """The texts in an item; other parts by their type."""
    for value in (item.content, item.summary, item.output, item.arguments, item.input):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str):
                yield part
            elif isinstance(part, dict):
                text = part.get("text", part.get("refusal"))
                yield text if isinstance(text, str) else f"[{part.get('type', 'part')}]"


def format_event(event: bytes) -> str:
    """An event as one line."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(event, type=dict[str, Any])
    except BROKEN as error:
        return f"damaged: {error}"
    delta = fields.get("delta")
    return f"{fields.get('type')}" + (f"  {delta!r}" if isinstance(delta, str) else "")
