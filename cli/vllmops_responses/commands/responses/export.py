"""``vllmops responses export``: responses as lines of JSON."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vllmops.commands.options import Target, validate_output_path
from vllmops.support import output
from vllmops.support.errors import VllmopsError, make_usage_error
from vllmops.support.files import make_not_written_error, open_atomically
from vllmops.support.numbers import format_count
from vllmops.support.output import Json, JsonText, Progress, Result, print_result

from ...store import response_archive, response_schema
from ...store.backend import Response
from .import_ import LONGEST_LINE
from .progress import ProgressCounter, return_or_show_and_raise
from .response_options import Model, Selection, Since, Statuses, Store, parse_selection
from .source_options import iterate_pages, open_source, retry_while_unavailable, run_concurrently

if TYPE_CHECKING:
    from ...store.response_source import ResponseSource

SHOWN = 10  # broken lines
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        readable=False,
        callback=validate_output_path,
        metavar="FILE",
        help="Write to this file.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE.")]


class ExportCounts(msgspec.Struct):
    """Counts of an export.

    Args:
        count: responses written.
        running: running responses, which are left out.
        damage_by_id: ids of damaged responses, which are left out, and the reasons.
    """

    count: int = 0
    running: int = 0
    damage_by_id: dict[str, str] = msgspec.field(default={}, name="damaged")


@print_result
def export(
    *,
    target: Target = None,
    store: Store = None,
    status: Statuses = None,
    model: Model = None,
    since: Since = None,
    out: Out = None,
    force: Force = False,
    json_: Json = False,
) -> Result:
    """Write responses with their input and events, one line of JSON each.

    Running responses are left out. `import` reads the file into any store. Only
    an export with --store holds all keys, and is identical to the byte. A server
    exports the responses of one API key, taken from VLLM_API_KEY.
    """
    if json_ and out is None:
        raise make_usage_error("--json prints one envelope, so the lines need a file", "--out FILE")
    selection = parse_selection(status, model, since)
    done = ExportCounts()
    with Progress(time.time(), quiet=json_) as progress:
        counting = ProgressCounter(progress, "exported")
        with open_line_writer(out, force=force) as write:
            try:
                asyncio.run(
                    export_responses(open_source(target, store), selection, write, done, counting)
                )
            except KeyboardInterrupt as error:
                cut = counting.make_interrupted_error()
                cut.hint = "the written export is incomplete" if out is None else ""
                raise cut from error
    if not json_:
        print_summary(done, out)
    data: dict[str, Any] = {"count": done.count, "running": done.running}
    data["path"] = str(out) if out else None
    lacking: VllmopsError | None = None
    if done.damage_by_id:
        data["damaged"] = [{"id": name, "reason": why} for name, why in done.damage_by_id.items()]
        lacking = VllmopsError(
            "responses.damaged",
            f"damaged and left out: {format_count(len(done.damage_by_id), 'response')}",
            "vllmops responses show ID shows what is readable",
        )
    return return_or_show_and_raise(Result(data), lacking, as_json=json_)


def print_summary(counts: ExportCounts, output_path: Path | None) -> None:
    output.print_to_stderr(
        f"{format_count(counts.count, 'response')} exported"
        + (f" to {output_path}" if output_path else ""),
        "dim",
    )
    if counts.running:
        output.print_to_stderr(
            f"{counts.running:,} running responses left out: export again when they have finished"
        )
    for name, why in list(counts.damage_by_id.items())[:SHOWN]:
        output.print_to_stderr(f"left out (damaged): {name}: {why}")


@contextmanager
def open_line_writer(
    output_path: Path | None, *, force: bool
) -> Iterator[Callable[[list[bytes]], None]]:
    """A writer of lines: to stdout, or to a file that appears once it is complete.

    Raises:
        VllmopsError: ``responses.exists`` (exit code 2) or ``responses.not-written``.
    """
    if output_path is None:
        yield lambda lines: output.print_parts(JsonText(b"\n".join(lines).decode()))
        return
    exists = VllmopsError(
        "responses.exists", f"{output_path} exists already", "choose another --out"
    )
    if os.path.isfile(output_path) and not force:
        raise exists
    try:
        with open_atomically(output_path, overwrite=force) as file:
            yield lambda lines: file.writelines(line + b"\n" for line in lines)
    except FileExistsError as error:
        raise exists from error
    except OSError as error:
        hint = "choose another place with --out"
        raise make_not_written_error(output_path, error, "responses.not-written", hint) from error


async def export_responses(
    source: ResponseSource,
    selection: Selection,
    write: Callable[[list[bytes]], None],
    counts: ExportCounts,
    counting: ProgressCounter,
) -> None:
    """Write all selected responses, the oldest first, except those created from now on.

    Raises:
        VllmopsError: as `open_source` and its methods.
    """
    began = time.time()
    async with source as responses:
        owner = "" if responses.has_all_owners else await responses.fetch_owner()  # type: ignore[attr-defined]
        async for page in iterate_pages(responses, selection.build_query(descending=False)):
            chosen = [
                response
                for response in page
                if selection.matches(response) and not is_created_after(response, began)
            ]
            over = [response for response in chosen if not response.is_running]
            counts.running += len(chosen) - len(over)
            lines = dict.fromkeys((response.id for response in over), b"")

            async def export_response(response: Response, lines: dict[str, bytes] = lines) -> None:
                try:
                    lines[response.id] = await encode_response(responses, response, owner)
                    if len(lines[response.id]) >= LONGEST_LINE:
                        raise ValueError(f"it has more than {LONGEST_LINE >> 20} MiB")
                    response_archive.decode_line(
                        lines[response.id]
                    )  # what cannot be read back is damaged
                except ValueError as error:
                    counts.damage_by_id[response.id] = f"{error}"
                    del lines[response.id]

            await run_concurrently(over, export_response)
            if lines:
                write(list(lines.values()))
            counts.count += len(lines)
            counting.add(len(over))
            if page and is_created_after(page[-1], began):
                return


def is_created_after(response: Response, began: float) -> bool:
    """Whether a response was created after the export began; a nonsense time does not count."""
    return began <= response.created_at < response_schema.LATEST


async def encode_response(responses: ResponseSource, response: Response, owner: str) -> bytes:
    """One response with its input and events, as a line."""
    from ...client import parse_response_object  # noqa: PLC0415

    head = parse_response_object(response.body)
    events = []
    if head and head.background:
        events = await retry_while_unavailable(lambda: responses.read_events(response))
    items = await retry_while_unavailable(lambda: responses.list_input_items(response))
    whole = msgspec.structs.replace(response, input=items)
    if not responses.has_all_owners:
        whole = msgspec.structs.replace(whole, owner=owner)
    return response_archive.encode_line(whole, events)
