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
from ...errors import Exit, VllmopsError
from ...files import not_written, written
from ...output import Json, JsonText, Progress, Result, command
from ...store import archive, shape
from ...store.backend import Response
from ..options import Target, to_write
from .progress import Counting, ended
from .selection import Model, Selection, Since, Statuses, Store, selected
from .sources import patiently, source, spread, usage, walk

if TYPE_CHECKING:
    from ...vllm_api.responses import Source

SHOWN = 10  # broken lines


class Exported(msgspec.Struct):
    """How far an export is.

    Args:
        count: responses written.
        running: those left out because they run.
        damaged: ids of those left out because they are damaged, and what is wrong with them.
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
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            readable=False,
            callback=to_write,
            metavar="FILE",
            help="Write it there.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE.")] = False,
    json_: Json = False,
) -> Result:
    """Write responses with their input and events, a line of JSON for each.

    What runs is left out. `import` takes it into any store; only what came from
    the store itself is the same there to the byte, and everybody's. A server
    gives those of one API key, which is taken from VLLM_API_KEY.
    """
    if json_ and out is None:
        raise usage("--json prints one envelope: the lines have to go elsewhere", "--out FILE")
    wanted = selected(status, model, since)
    done = Exported()
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "exported")
        with sink(out, force=force) as write:
            try:
                asyncio.run(exported(source(target, store), wanted, write, done, counting))
            except KeyboardInterrupt as error:
                cut = counting.interrupted()
                cut.hint = "what was written is no whole export" if out is None else ""
                raise cut from error
    if not json_:
        told(done, out)
    data: dict[str, Any] = {"count": done.count, "running": done.running}
    data["path"] = str(out) if out else None
    lacking: VllmopsError | None = None
    if done.damaged:
        data["damaged"] = [{"id": name, "reason": why} for name, why in done.damaged.items()]
        lacking = VllmopsError(
            "responses.damaged",
            f"{len(done.damaged):,} responses are damaged, and left out",
            "vllmops responses show ID tells what is left of one",
        )
    return ended(Result(data), lacking, as_json=json_)


def told(done: Exported, out: Path | None) -> None:
    output.say(f"{done.count:,} responses exported" + (f" to {out}" if out else ""), "dim")
    if done.running:
        output.say(f"{done.running:,} that run are left out: export again once they are over")
    for name, why in list(done.damaged.items())[:SHOWN]:
        output.say(f"left out, as it is damaged: {name}: {why}")


@contextmanager
def sink(out: Path | None, *, force: bool) -> Iterator[Callable[[list[bytes]], None]]:
    """Where lines go: stdout, or a file that is there once it is whole.

    Raises:
        VllmopsError: ``responses.exists`` (exit code 2) or ``responses.not-written``.
    """
    if out is None:
        yield lambda lines: output.show(JsonText(b"\n".join(lines).decode()))
        return
    exists = VllmopsError(
        "responses.exists",
        f"{out} is there already",
        "another --out",
        exit_code=Exit.USAGE,
    )
    if os.path.isfile(out) and not force:
        raise exists
    try:
        with written(out, overwrite=force) as file:
            yield lambda lines: file.writelines(each + b"\n" for each in lines)
    except FileExistsError as error:
        raise exists from error
    except OSError as error:
        hint = "choose another place with --out"
        raise not_written(out, error, "responses.not-written", hint) from error


async def exported(
    place: Source,
    wanted: Selection,
    write: Callable[[list[bytes]], None],
    done: Exported,
    counting: Counting,
) -> None:
    """Write all that are meant, the oldest first, but what is made from now on.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    began = time.time()
    async with place as responses:
        owner = "" if responses.whole else await responses.owner()  # type: ignore[attr-defined]
        async for page in walk(responses, wanted.query(descending=False)):
            chosen = [each for each in page if wanted.fits(each) and not later(each, began)]
            over = [each for each in chosen if not each.running]
            done.running += len(chosen) - len(over)
            lines = dict.fromkeys((each.id for each in over), b"")

            async def one(each: Response, lines: dict[str, bytes] = lines) -> None:
                try:
                    lines[each.id] = await line(responses, each, owner)
                    archive.decode(lines[each.id])  # nobody else could take it either
                except ValueError as error:
                    done.damaged[each.id] = f"{error}"
                    del lines[each.id]

            await spread(over, one)
            if lines:
                write(list(lines.values()))
            done.count += len(lines)
            counting.add(len(over))
            if page and later(page[-1], began):
                return


def later(response: Response, began: float) -> bool:
    """Whether a response was made meanwhile, rather than in no year at all."""
    return began <= response.created_at < shape.LATEST


async def line(responses: Source, response: Response, owner: str) -> bytes:
    """All there is of one response, as a line."""
    from ...vllm_api.responses import decoded  # noqa: PLC0415

    head = decoded(response.body)
    events = []
    if head and head.background:
        events = await patiently(lambda: responses.events(response))
    items = await patiently(lambda: responses.items(response))
    whole = msgspec.structs.replace(response, input=items)
    if not responses.whole:
        whole = msgspec.structs.replace(whole, owner=owner)
    return archive.encode(whole, events)
