"""``vllmops responses import``: responses from lines of JSON."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vllmops.commands.options import Target
from vllmops.support import output
from vllmops.support.errors import VllmopsError, make_usage_error
from vllmops.support.files import make_too_large_error, make_unreadable_error, open_input
from vllmops.support.numbers import format_count
from vllmops.support.output import Json, Progress, Result, VerbatimText, print_result

from ...store import response_archive
from ...store.backend import EVERYBODY, Limits, Response
from .progress import ProgressCounter, return_or_show_and_raise
from .response_options import Store
from .source_options import require_single_source, retry_while_unavailable, run_concurrently

if TYPE_CHECKING:
    from ...store.response_store import EventBatch, ResponseStore

SHOWN = 10  # broken lines
# A response with all that it was given: images and sounds among it.
LONGEST_LINE = 512 << 20
# After that a line has no end, and the file is none of lines.
ENDLESS = 1 << 30
# Of a pipe, which is copied first.
MOST_PIPED = 4 << 30

File = Annotated[
    Path,
    typer.Argument(
        readable=False, metavar="FILE", help="A file that `export` wrote; - reads stdin."
    ),
]


class ImportCounts(msgspec.Struct):
    """Counts of an import.

    Args:
        count: new responses.
        replaced: existing responses that were replaced.
        skipped: existing responses that were kept.
        broken: line numbers, from 1, and the reasons.
    """

    count: int = 0
    replaced: int = 0
    skipped: int = 0
    broken: dict[int, str] = {}

    @property
    def lines_read(self) -> int:
        return self.count + self.replaced + self.skipped + len(self.broken)


@print_result
def import_responses(
    file: File,
    *,
    target: Target = None,
    store: Store = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing responses, except running ones.")
    ] = False,
    json_: Json = False,
) -> Result:
    """Import responses into a store: a new one, an existing one, or a server's.

    A server has no route for imports: with -t, its store is opened directly.
    Existing responses are kept, so the command can be repeated. Broken lines
    are reported, and all other lines are imported.
    """
    if store:
        require_single_source(target)
    url = store or find_store_url(target)
    done = ImportCounts()
    with Progress(time.time(), quiet=json_) as progress, open_lines(file) as lines:
        counting = ProgressCounter(progress, "lines imported")
        try:
            name, count = asyncio.run(import_lines(url, lines, done, counting, overwrite=overwrite))
        except KeyboardInterrupt as error:
            raise counting.make_interrupted_error(done) from error
    data = {"store": name, **msgspec.structs.asdict(done)}
    data["broken"] = [{"line": n, "reason": why} for n, why in sorted(done.broken.items())]
    most = Limits().max_size
    if count > most and not json_:
        output.print_to_stderr(
            f"the store holds {count:,} responses; a server keeps {most:,} unless started with "
            f"--store-max-size {count}",
            "yellow",
        )
    failure = None
    if done.broken:
        failure = VllmopsError(
            "responses.broken",
            f"{len(done.broken):,} of {done.lines_read:,} lines are broken",
            "export them again; the other lines are imported",
        )
    return return_or_show_and_raise(
        Result(data, lambda: list(render_summary(name, done))), failure, as_json=json_
    )


def render_summary(name: str, counts: ImportCounts) -> Iterator[str]:
    """Human-readable summary of an import."""
    yield VerbatimText(f"{format_count(counts.count, 'response')} imported into {name}")
    if counts.replaced:
        yield f"{counts.replaced:,} replaced"
    if counts.skipped:
        yield f"{counts.skipped:,} skipped: a response with that id exists"
    for number, why in sorted(counts.broken.items())[:SHOWN]:
        yield VerbatimText(f"line {number}: {why}")
    if len(counts.broken) > SHOWN:
        yield f"and {len(counts.broken) - SHOWN:,} others"


def find_store_url(target: str | None) -> str:
    """The URL of a server's store.

    Raises:
        VllmopsError: as `resolve_endpoint_with_store`, or ``usage`` if it is not known.
    """
    from vllmops.servers.target_endpoint import resolve_endpoint_with_store  # noqa: PLC0415

    server = resolve_endpoint_with_store(target)
    if server.store is None:
        raise make_usage_error(
            f"{server.name} has no route for imports, and its store's URL is not known here",
            "--store URL",
        )
    return server.store


@contextmanager
def open_lines(file: Path) -> Iterator[IO[bytes]]:
    """A file's lines.

    Raises:
        VllmopsError: as `open_input` does.
    """
    with open_input(file) as source:
        if file.is_file():
            yield source
            return
        # Copy the pipe first: a blocking read inside an event loop ignores Ctrl-C.
        with tempfile.TemporaryFile() as spooled:
            try:
                spool_lines(source, spooled)
            except OSError as error:
                raise make_unreadable_error(file, error) from error
            if spooled.tell() > MOST_PIPED:
                failure = make_too_large_error(file, MOST_PIPED)
                failure.hint = "write it to a file, and import the file"
                raise failure
            spooled.seek(0)
            yield spooled


async def import_lines(
    url: str, lines: IO[bytes], counts: ImportCounts, counting: ProgressCounter, *, overwrite: bool
) -> tuple[str, int]:
    """Import lines into a store. Gives its name and its number of responses.

    Raises:
        VllmopsError: as `DirectStore`.
    """
    from ...store.store_source import DirectStore  # noqa: PLC0415

    async with DirectStore(url, create=True) as responses:
        lines_of_ids: dict[str, int] = {}

        async def import_numbered_line(numbered_line: tuple[int, bytes | None]) -> None:
            number, text = numbered_line
            if text is None:
                counts.broken[number] = f"it is longer than {LONGEST_LINE >> 20} MiB"
            elif text.strip():
                await import_line(
                    responses.store, number, text, counts, lines_of_ids, overwrite=overwrite
                )
                counting.add()

        await run_concurrently(number_lines(lines, LONGEST_LINE), import_numbered_line)
        return responses.name, (await responses.collect_stats()).response_count


def spool_lines(source: IO[bytes], copy: IO[bytes]) -> None:
    """Copy a stream, at most up to an endless line, which the reader of the copy reports."""
    line = 0
    while line <= ENDLESS and copy.tell() <= MOST_PIPED and (chunk := source.read(1 << 20)):
        copy.write(chunk)
        end = chunk.rfind(b"\n")
        line = line + len(chunk) if end < 0 else len(chunk) - end


def number_lines(lines: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, from 1; None for one that is too long.

    Args:
        lines: of the file.
        max_line_bytes: bytes of a line.

    Raises:
        VllmopsError: ``responses.unreadable``, a line has no end, or the file can't be read.
    """
    number = 0
    while line := read_line(lines, max_line_bytes + 1):
        number += 1
        if len(line) <= max_line_bytes or line.endswith(b"\n"):
            yield number, line
            continue
        size = len(line)
        while line and not line.endswith(b"\n"):
            line = read_line(lines, 1 << 20)
            size += len(line)
            if size > ENDLESS:
                raise make_invalid_lines_error(f"line {number} is longer than {ENDLESS >> 30} GiB")
        yield number, None


def read_line(lines: IO[bytes], max_bytes: int) -> bytes:
    """A line, cut at a number of bytes."""
    try:
        return lines.readline(max_bytes)
    except OSError as error:
        raise make_invalid_lines_error(
            f"the file cannot be read: {error.strerror or error}"
        ) from error


def make_invalid_lines_error(reason: str) -> VllmopsError:
    return VllmopsError(
        "responses.unreadable", reason, "give a file that the export of this command wrote"
    )


async def import_line(
    store: Any,
    number: int,
    text: bytes,
    counts: ImportCounts,
    lines_of_ids: dict[str, int],
    *,
    overwrite: bool,
) -> None:
    """Import one line into a store.

    Args:
        store: where it goes.
        number: of the line, from 1.
        text: of the line.
        counts: the counts to update.
        lines_of_ids: line numbers of earlier responses, by id.
        overwrite: whether an existing response is replaced.
    """
    try:
        response, events = response_archive.decode_line(text)
    except (ValueError, RecursionError) as error:
        counts.broken[number] = f"{error}"
        return
    if (first := lines_of_ids.setdefault(response.id, number)) != number:
        counts.broken[number] = f"{response.id} is already in line {first}"
        return
    new = await retry_while_unavailable(lambda: store.create(response))
    if not new:
        there = await retry_while_unavailable(lambda: store.get(EVERYBODY, response.id))
        if there is None or there.is_running or not overwrite:
            if there and events and is_same_response(there, response):
                # An import before this one may have been cut off at them.
                log = await retry_while_unavailable(
                    lambda: store.read_events(EVERYBODY, response.id, -1)
                )
                last = log.chunks[-1].last_number if log and log.chunks else -1
                await append_events(
                    store, response, [part for part in events if part.first_number > last]
                )
            counts.skipped += 1
            return
        await retry_while_unavailable(lambda: store.delete(EVERYBODY, response.id))
        try:
            created = await retry_while_unavailable(lambda: store.create(response))
        except BaseException:  # what was there is better than nothing
            await store.create(there)
            raise
        if not created:
            counts.skipped += 1
            return
    await append_events(store, response, events)
    if new:
        counts.count += 1
    else:
        counts.replaced += 1


def is_same_response(stored_response: Response, imported_response: Response) -> bool:
    """Whether a stored response is the one of a line."""
    return (stored_response.owner, stored_response.created_at, stored_response.status) == (
        imported_response.owner,
        imported_response.created_at,
        imported_response.status,
    )


async def append_events(
    store: ResponseStore, response: Response, events: Sequence[EventBatch]
) -> None:
    """Write events of a response."""
    for part in events:
        await retry_while_unavailable(
            partial(store.append_events, response, part.first_number, part.events)
        )
