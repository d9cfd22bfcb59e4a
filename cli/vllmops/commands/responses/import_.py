"""``vllmops responses import``: responses from lines of JSON."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import typer

from ... import output
from ...errors import VllmopsError
from ...files import opened, unreadable
from ...output import Json, Progress, Result, Verbatim, command
from ...store import archive
from ...store.backend import EVERYBODY, Limits
from ..options import Target
from .progress import Counting, ended
from .selection import Store
from .sources import either, patiently, spread, usage

SHOWN = 10  # broken lines
# A response with all that it was given: images and sounds among it.
LONGEST_LINE = 64 << 20
# After that a line has no end, and the file is none of lines.
ENDLESS = 1 << 30


class Imported(msgspec.Struct):
    """How far an import is.

    Args:
        count: responses that are there now and were not before.
        replaced: others that were there, and have made room.
        skipped: those that were there, and have not.
        broken: numbers of lines, from 1, and what is wrong with them.
    """

    count: int = 0
    replaced: int = 0
    skipped: int = 0
    broken: dict[int, str] = {}

    @property
    def looked(self) -> int:
        return self.count + self.replaced + self.skipped + len(self.broken)


@command
def import_(
    file: Annotated[
        Path,
        typer.Argument(readable=False, metavar="FILE", help="What `export` wrote; - reads stdin."),
    ],
    *,
    target: Target = None,
    store: Store = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is there, but what runs.")
    ] = False,
    json_: Json = False,
) -> Result:
    """Take responses into a store, which may be new, or that of a server.

    A server has no route for that: with -t it is its store that is opened. What
    is there stays, so that a second time does no harm. A line that is broken is
    named, and the others are taken.
    """
    if store:
        either(target)
    url = store or store_behind(target)
    done = Imported()
    with Progress(time.time(), quiet=json_) as progress, lines_of(file) as lines:
        counting = Counting(progress, "lines taken in")
        try:
            name, count = asyncio.run(imported(url, lines, done, counting, overwrite=overwrite))
        except KeyboardInterrupt as error:
            raise counting.interrupted(done) from error
    data = {"store": name, **msgspec.structs.asdict(done)}
    data["broken"] = [{"line": n, "reason": why} for n, why in sorted(done.broken.items())]
    most = Limits().max_size
    if count > most and not json_:
        output.say(
            f"it holds {count:,} now: a server keeps {most:,} of them, unless it is started with "
            f"--store-max-size {count}",
            "yellow",
        )
    failure = None
    if done.broken:
        failure = VllmopsError(
            "responses.broken",
            f"{len(done.broken):,} of {done.looked:,} lines are broken",
            "export them again; the others are in the store",
        )
    return ended(Result(data, lambda: list(summary(name, done))), failure, as_json=json_)


def summary(name: str, done: Imported) -> Iterator[str]:
    """What an import has come to, for a person."""
    yield Verbatim(f"{done.count:,} responses imported into {name}")
    if done.replaced:
        yield f"{done.replaced:,} replaced"
    if done.skipped:
        yield f"{done.skipped:,} skipped: there is one by that id already"
    for number, why in sorted(done.broken.items())[:SHOWN]:
        yield Verbatim(f"line {number}: {why}")
    if len(done.broken) > SHOWN:
        yield f"and {len(done.broken) - SHOWN:,} others"


def store_behind(target: str | None) -> str:
    """The URL of a server's store.

    Raises:
        VllmopsError: as `place`, or ``usage`` where it is not known.
    """
    from ...vllm_api.responses import place  # noqa: PLC0415 - brings httpx

    server = place(target)
    if server.store is None:
        raise usage(
            f"{server.name} has no route that takes responses in, and where its store is, is not "
            "known here",
            "--store URL",
        )
    return server.store


@contextmanager
def lines_of(file: Path) -> Iterator[IO[bytes]]:
    """A file's lines.

    Raises:
        VllmopsError: as `opened` does.
    """
    with opened(file) as source:
        if file.is_file():
            yield source
            return
        # All of it first: whoever waits for a pipe does not hear of Ctrl-C in an event loop.
        with tempfile.TemporaryFile() as spooled:
            try:
                spool(source, spooled)
            except OSError as error:
                raise unreadable(file, error) from error
            spooled.seek(0)
            yield spooled


async def imported(
    url: str, lines: IO[bytes], done: Imported, counting: Counting, *, overwrite: bool
) -> tuple[str, int]:
    """Take lines into a store; its name, and how many it holds then.

    Raises:
        VllmopsError: as `Storage`.
    """
    from ...store.direct import Storage  # noqa: PLC0415

    async with Storage(url, create=True) as responses:
        lines_of_ids: dict[str, int] = {}

        async def one(numbered: tuple[int, bytes | None]) -> None:
            number, text = numbered
            if text is None:
                done.broken[number] = f"it is longer than {LONGEST_LINE >> 20} MiB"
            elif text.strip():
                await taken(responses.store, number, text, done, lines_of_ids, overwrite=overwrite)
                counting.add()

        await spread(numbered(lines), one)
        return responses.name, (await responses.stats()).count


def spool(source: IO[bytes], copy: IO[bytes]) -> None:
    """Copy a stream, up to a line that has no end: whoever reads the copy finds it."""
    line = 0
    while line <= ENDLESS and (chunk := source.read(1 << 20)):
        copy.write(chunk)
        end = chunk.rfind(b"\n")
        line = line + len(chunk) if end < 0 else len(chunk) - end


def numbered(lines: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, from 1; None for one that is too long.

    Raises:
        VllmopsError: ``responses.unreadable``, a line has no end, or the file can't be read.
    """
    number = 0
    while line := part(lines, LONGEST_LINE + 1):
        number += 1
        if len(line) <= LONGEST_LINE or line.endswith(b"\n"):
            yield number, line
            continue
        size = len(line)
        while line and not line.endswith(b"\n"):
            line = part(lines, 1 << 20)
            size += len(line)
            if size > ENDLESS:
                raise no_lines(f"line {number} is longer than {ENDLESS >> 30} GiB")
        yield number, None


def part(lines: IO[bytes], most: int) -> bytes:
    """A line, or as much of it as may be."""
    try:
        return lines.readline(most)
    except OSError as error:
        raise no_lines(f"it can't be read: {error.strerror or error}") from error


def no_lines(why: str) -> VllmopsError:
    return VllmopsError(
        "responses.unreadable", why, "the name of a file that vllmops responses export wrote"
    )


async def taken(
    store: Any,
    number: int,
    text: bytes,
    done: Imported,
    lines_of_ids: dict[str, int],
    *,
    overwrite: bool,
) -> None:
    """Take one line into a store.

    Args:
        store: where it goes.
        number: of the line, from 1.
        text: of the line.
        done: how far the import is.
        lines_of_ids: the lines that came before, by their ids.
        overwrite: whether what is there is replaced.
    """
    try:
        response, events = archive.decode(text)
    except (ValueError, RecursionError) as error:
        done.broken[number] = f"{error}"
        return
    if (first := lines_of_ids.setdefault(response.id, number)) != number:
        done.broken[number] = f"{response.id} came before, in line {first}"
        return
    new = await patiently(lambda: store.create(response))
    if not new:
        there = await patiently(lambda: store.get(EVERYBODY, response.id)) if overwrite else None
        if there is None or there.running:
            done.skipped += 1
            return
        await patiently(lambda: store.delete(EVERYBODY, response.id))
        if not await patiently(lambda: store.create(response)):
            done.skipped += 1
            return
    for part in events:
        await patiently(partial(store.append, response, part.first, part.events))
    if new:
        done.count += 1
    else:
        done.replaced += 1
