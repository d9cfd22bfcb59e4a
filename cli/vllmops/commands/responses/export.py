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

from ... import output
from ...errors import VllmopsError, usage
from ...files import not_written, written
from ...numbers import many
from ...output import Json, JsonText, Progress, Result, command
from ...store import archive, shape
from ...store.backend import Response
from ..options import Target, to_write
from .import_ import LONGEST_LINE
from .progress import Counting, ended
from .selection import Model, Selection, Since, Statuses, Store, selected
from .sources import concurrently, retried, source, walk

if TYPE_CHECKING:
    from ...store.source import Source

SHOWN = 10  # broken lines
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", readable=False, callback=to_write, metavar="FILE", help="Write to this file."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE.")]


class Exported(msgspec.Struct):
    """Counts of an export.

    Args:
        count: responses written.
        running: running responses, which are left out.
        damaged: ids of damaged responses, which are left out, and the reasons.
    """

    count: int = 0
    running: int = 0
    damaged: dict[str, str] = {}


@command
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
        raise usage("--json prints one envelope, so the lines need a file", "--out FILE")
    selection = selected(status, model, since)
    done = Exported()
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "exported")
        with sink(out, force=force) as write:
            try:
                asyncio.run(exported(source(target, store), selection, write, done, counting))
            except KeyboardInterrupt as error:
                cut = counting.interrupted()
                cut.hint = "the written export is incomplete" if out is None else ""
                raise cut from error
    if not json_:
        print_summary(done, out)
    data: dict[str, Any] = {"count": done.count, "running": done.running}
    data["path"] = str(out) if out else None
    lacking: VllmopsError | None = None
    if done.damaged:
        data["damaged"] = [{"id": name, "reason": why} for name, why in done.damaged.items()]
        lacking = VllmopsError(
            "responses.damaged",
            f"damaged and left out: {many(len(done.damaged), 'response')}",
            "vllmops responses show ID shows what is readable",
        )
    return ended(Result(data), lacking, as_json=json_)


def print_summary(done: Exported, out: Path | None) -> None:
    output.say(f"{many(done.count, 'response')} exported" + (f" to {out}" if out else ""), "dim")
    if done.running:
        output.say(
            f"{done.running:,} running responses left out: export again when they have finished"
        )
    for name, why in list(done.damaged.items())[:SHOWN]:
        output.say(f"left out (damaged): {name}: {why}")


@contextmanager
def sink(out: Path | None, *, force: bool) -> Iterator[Callable[[list[bytes]], None]]:
    """A writer of lines: to stdout, or to a file that appears once it is complete.

    Raises:
        VllmopsError: ``responses.exists`` (exit code 2) or ``responses.not-written``.
    """
    if out is None:
        yield lambda lines: output.show(JsonText(b"\n".join(lines).decode()))
        return
    exists = VllmopsError("responses.exists", f"{out} exists already", "choose another --out")
    if os.path.isfile(out) and not force:
        raise exists
    try:
        with written(out, overwrite=force) as file:
            yield lambda lines: file.writelines(line + b"\n" for line in lines)
    except FileExistsError as error:
        raise exists from error
    except OSError as error:
        hint = "choose another place with --out"
        raise not_written(out, error, "responses.not-written", hint) from error


async def exported(
    place: Source,
    selection: Selection,
    write: Callable[[list[bytes]], None],
    done: Exported,
    counting: Counting,
) -> None:
    """Write all selected responses, the oldest first, except those created from now on.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    began = time.time()
    async with place as responses:
        owner = "" if responses.whole else await responses.owner()  # type: ignore[attr-defined]
        async for page in walk(responses, selection.query(descending=False)):
            chosen = [
                response
                for response in page
                if selection.fits(response) and not later(response, began)
            ]
            over = [response for response in chosen if not response.running]
            done.running += len(chosen) - len(over)
            lines = dict.fromkeys((response.id for response in over), b"")

            async def one(response: Response, lines: dict[str, bytes] = lines) -> None:
                try:
                    lines[response.id] = await line(responses, response, owner)
                    if len(lines[response.id]) >= LONGEST_LINE:
                        raise ValueError(f"it has more than {LONGEST_LINE >> 20} MiB")
                    archive.decode(lines[response.id])  # what cannot be read back is damaged
                except ValueError as error:
                    done.damaged[response.id] = f"{error}"
                    del lines[response.id]

            await concurrently(over, one)
            if lines:
                write(list(lines.values()))
            done.count += len(lines)
            counting.add(len(over))
            if page and later(page[-1], began):
                return


def later(response: Response, began: float) -> bool:
    """Whether a response was created after the export began; a nonsense time does not count."""
    return began <= response.created_at < shape.LATEST


async def line(responses: Source, response: Response, owner: str) -> bytes:
    """One response with its input and events, as a line."""
    from ...vllm_api.responses import decoded  # noqa: PLC0415

    head = decoded(response.body)
    events = []
    if head and head.background:
        events = await retried(lambda: responses.events(response))
    items = await retried(lambda: responses.items(response))
    whole = msgspec.structs.replace(response, input=items)
    if not responses.whole:
        whole = msgspec.structs.replace(whole, owner=owner)
    return archive.encode(whole, events)
