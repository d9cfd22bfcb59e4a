"""``vllmops cache``: what is in the multimodal and encoder caches of a server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import output
from ..bundle import archive
from ..caches import inspect as caches
from ..diagnose import caches as judge
from ..diagnose.findings import Finding, Severity, worst
from ..errors import Exit, VllmopsError
from ..host.processes import alive
from ..instances.servers import resolve
from ..output import Result, command
from ..protocol import files
from ..protocol.caches import (
    Cache,
    CacheSnapshot,
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ProcessCaches,
    ShmCache,
    WorkerEncoderCache,
)
from .compare import compare
from .findings import lines
from .options import Target, seconds, to_write
from .repair import repair
from .reset import reset

if TYPE_CHECKING:
    from rich.console import RenderableType

app = output.typer_app("Multimodal and encoder caches.")

NICENESS = 10
ABREAST = 2  # sides in one table, so that it fits 60 columns

TITLES = {
    "mm-lru": "Multimodal cache, mirrored (front end P0, engine P1)",
    "mm-shm": "Multimodal cache in shared memory",
    "mm-processor-only": "Multimodal cache of one process",
    "encoder": "Encoder cache",
}


@app.callback()
def cache() -> None:
    """Multimodal and encoder caches."""


@app.command(epilog="Example: vllmops cache inspect -t demo --save before.json")
@command
def inspect(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            help="What --save wrote, or a bundle, instead of a server.",
            metavar="[FILE]",
        ),
    ] = None,
    *,
    target: Target = None,
    fail_on: Annotated[
        Severity, typer.Option(help="Exit code 1 from findings of this severity up.")
    ] = Severity.ERROR,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again.")] = False,
    interval: Annotated[
        float, typer.Option(parser=seconds(0.1), help="Seconds between looks.")
    ] = 2.0,
    keys: Annotated[bool, typer.Option("--keys", help="Show every key, oldest first.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            callback=to_write,
            help="Write the snapshot to this file too.",
            show_default=False,
        ),
    ] = None,
    json_: output.Json = False,
) -> Result:
    """Show every cache of every process, and what is wrong with them.

    It reads a snapshot that changes nothing: no counter, no order. What
    looks wrong is read three times before it counts. Exit code 1 where
    there are findings from --fail-on up.
    """
    # A target from the environment gives way to a file, one that was typed does not.
    source = ctx.get_parameter_source("target")
    typed = source is not None and source.name == "COMMANDLINE"
    if file is not None and (typed or watch or save):
        raise usage("FILE stands for a server: it goes with neither --target, --watch nor --save")
    if watch and json_:
        raise usage("--watch is for a person, --json for a script")
    if file is not None:
        return result(saved(file), fail_on, keys)
    # On a full machine the server's work goes first: looking every second must not slow it down.
    os.nice(NICENESS)
    keys_too = keys or save is not None
    agents = caches.Agents(resolve(target))
    try:
        while True:
            snapshot = caches.take(agents, keys=keys_too)
            if save is not None:
                files.save(save, snapshot)
                output.say(f"saved to {save}")
            found = result(snapshot, fail_on, keys)
            if not watch:
                return found
            output.console().clear()
            output.show(*found.text())
            time.sleep(interval)
            # Finding them takes longer than looking into them, and they seldom change.
            if snapshot.samples[-1].silent or not all(map(alive, agents.processes)):
                agents = caches.Agents(resolve(target))
    except KeyboardInterrupt:
        if not watch:
            raise
        # The ordinary way to end it, so nothing is said.
        raise typer.Exit(Exit.INTERRUPTED) from None


app.command(epilog="Example: vllmops cache compare -t demo --fail-on warning")(compare)
app.command(epilog="Example: vllmops cache repair -t demo --dry-run")(repair)
app.command(epilog="Example: vllmops cache reset -t demo --timeout 30")(reset)


def saved(file: Path) -> CacheSnapshot:
    """The caches in a file.

    Raises:
        VllmopsError: as `files.load` and `bundle.load` do, or ``bundle.no-caches``.
    """
    if not archive.is_one(file):
        return files.load(file, CacheSnapshot)
    from ..bundle import bundle  # noqa: PLC0415 - slow, and not for a server

    found = bundle.load(file)
    if found.caches is None:
        silent = [each.why for each in found.unseen if each.code.startswith("agent.")]
        raise VllmopsError(
            "bundle.no-caches",
            f"there are no caches in {file}: {(*silent, 'nobody told any')[0]}",
            f"vllmops doctor {file} tells what there is",
        )
    return found.caches


def usage(message: str) -> VllmopsError:
    return VllmopsError("usage", message, "leave one of them out", exit_code=Exit.USAGE)


def result(snapshot: CacheSnapshot, fail_on: Severity, keys: bool) -> Result:
    """What the command shows, from a live server or a file alike."""
    found = judge.diagnose(snapshot)
    highest = worst(found)
    failed = highest is not None and highest.rank >= fail_on.rank
    last = snapshot.samples[-1]
    data = {
        "server": snapshot.server,
        "taken_at": last.taken_at,
        "quiet": last.quiet,
        "samples": len(snapshot.samples),
        "caches": [row(process, each, keys) for process, each in pairs(snapshot)],
        "findings": found,
        "notes": judge.notes(last),
        "silent": last.silent,
        "problems": [
            {"role": process.role, "pid": process.pid, "problem": problem}
            for process in last.processes
            for problem in process.problems
        ],
    }
    return Result(data, lambda: list(text(data, found)), Exit.FAILED if failed else Exit.OK)


def pairs(snapshot: CacheSnapshot) -> Iterator[tuple[ProcessCaches, Cache]]:
    """The caches of the last sample with their processes."""
    for process in snapshot.samples[-1].processes:
        for each in process.caches:
            yield process, each


def row(process: ProcessCaches, cache: Cache, keys: bool) -> dict[str, Any]:
    """A cache's figures; the same names for every kind, as far as it has them."""
    return {"role": process.role, "pid": process.pid, **figures(cache, keys)}


def figures(cache: Cache, keys: bool) -> dict[str, Any]:
    match cache:
        case LruCache():
            return {
                "kind": cache.kind,
                "side": cache.side,
                "entries": cache.entries,
                "bytes": cache.bytes,
                "capacity_bytes": int(cache.capacity_bytes),
                "used": share(cache.bytes, cache.capacity_bytes),
                **asked(cache.hits, cache.queries),
                "pinned": len(cache.pinned),
                "oldest": cache.oldest,
                "newest": cache.newest,
                **({"keys": cache.order} if keys else {}),
            }
        case ShmCache():
            return {
                "kind": cache.kind,
                "side": cache.side,
                "entries": len(cache.keys) if cache.writer else None,
                "bytes": cache.bytes,
                "capacity_bytes": cache.capacity_bytes,
                "used": share(cache.bytes, cache.capacity_bytes),
                **asked(cache.hits, cache.queries),
                "pinned": None,
                "max_object_bytes": cache.max_object_bytes,
                **ends(cache.keys if cache.writer else None, keys),
            }
        case EncoderCache():
            return {
                "kind": "encoder",
                "side": "scheduler",
                "entries": len(cache.cached),
                "slots": cache.slots,
                "free_slots": cache.free_slots,
                "freeable_slots": cache.freeable_slots,
                "used": share(cache.slots - cache.free_slots, cache.slots),
                "referenced": sum(map(bool, cache.cached.values())),
                **ends(list(cache.cached), keys),
            }
        case EncoderDecoderCache():
            return {
                "kind": "encoder",
                "side": "scheduler",
                "entries": None,
                "slots": cache.slots,
                "free_slots": cache.free_slots,
                "freeable_slots": None,
                "used": share(cache.slots - cache.free_slots, cache.slots),
                "referenced": None,
                **ends(None, keys),
            }
        case WorkerEncoderCache():
            return {
                "kind": "encoder",
                "side": "worker",
                "entries": len(cache.keys),
                "bytes": cache.bytes,
                "device": cache.device,
                **ends(cache.keys, keys),
            }


def share(part: float | None, whole: float) -> float | None:
    """None where it makes no sense: an encoder-decoder model's free slots exceed its capacity."""
    return None if part is None or part < 0 or whole <= 0 else part / whole


def asked(hits: int | None, queries: int | None) -> dict[str, Any]:
    rate = hits / queries if hits is not None and queries else None
    return {"hits": hits, "queries": queries, "hit_rate": rate}


def ends(order: Sequence[str] | None, keys: bool) -> dict[str, Any]:
    """The oldest and the newest key; all of them where asked for."""
    found: dict[str, Any] = {
        "oldest": order[0] if order else None,
        "newest": order[-1] if order else None,
    }
    return {**found, "keys": order} if keys else found


def text(data: dict[str, Any], found: Sequence[Finding]) -> Iterator[RenderableType]:
    """The same for a person."""
    from rich.text import Text  # noqa: PLC0415

    for kind, title in TITLES.items():
        sides = [each for each in data["caches"] if each["kind"] == kind]
        if kind == "mm-processor-only" and len(sides) < len(data["caches"]):
            # Every process has one for measuring at start; empty, it says nothing.
            sides = [each for each in sides if each["entries"] or each["queries"]]
        for start in range(0, len(sides), ABREAST):
            yield Text(title, "bold")
            yield compared(sides[start : start + ABREAST])
            yield from listed(sides[start : start + ABREAST])
            yield Text()
    for note in data["notes"]:
        yield Text(f"note: {note.text}")
    for silent in data["silent"]:
        yield Text(f"{silent.role} {silent.pid} did not tell: {silent.why}", "yellow")
        yield Text(f"  hint: {silent.hint}")
    for each in data["problems"]:
        yield Text(f"{each['role']} {each['pid']}: {each['problem']}", "yellow")
    yield from lines(found)
    if not found:
        where = " in what could be read" if data["silent"] or data["problems"] else ""
        yield Text(f"No findings{where}.", "yellow" if where else "green")


LABELS = {
    "entries": "entries",
    "bytes": "bytes",
    "capacity_bytes": "capacity",
    "max_object_bytes": "largest item",
    "slots": "slots",
    "free_slots": "free",
    "freeable_slots": "freeable",
    "referenced": "referenced",
    "used": "used",
    "hits": "hits",
    "queries": "queries",
    "pinned": "pinned",
    "device": "device",
    "oldest": "oldest key",
    "newest": "newest key",
}
SIZES = {"bytes", "capacity_bytes", "max_object_bytes"}


def compared(sides: Sequence[dict[str, Any]]) -> RenderableType:
    """One column for each side, one line for each figure that any of them has."""
    heads = [heading(each) for each in sides]
    table = output.table("", *heads, right=heads)
    for name, label in LABELS.items():
        if any(each.get(name) is not None for each in sides):
            table.add_row(label, *(cell(each, name) for each in sides))
    return table


def heading(figures: dict[str, Any]) -> str:
    process = f"{figures['role']} {figures['pid']}"
    return process if figures["side"] == figures["role"] else f"{figures['side']}: {process}"


def cell(figures: dict[str, Any], name: str) -> str:
    value = figures.get(name)
    if value is None:
        return "-"
    if name in SIZES:
        return output.size(value)
    if name == "used":
        return f"{value:.1%}"
    if name == "hits" and figures.get("hit_rate") is not None:
        return f"{value} ({figures['hit_rate']:.0%})"
    return judge.short(str(value))


def listed(sides: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """The keys, where they were asked for."""
    from rich.text import Text  # noqa: PLC0415

    for each in sides:
        if each.get("keys"):
            yield Text(f"keys of {each['side']}, oldest first:")
            yield Text("\n".join(f"  {key}" for key in each["keys"]))
