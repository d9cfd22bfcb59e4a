"""``vllmops cache inspect``: what a server's multimodal and encoder caches hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...collect.machine.processes import is_alive
from ...model import snapshot_files
from ...model.caches import (
    Cache,
    CacheSnapshot,
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ProcessCaches,
    ShmCache,
    WorkerEncoderCache,
)
from ...model.findings import Finding, Severity
from ...model.ranks import format_process
from ...model.ranks import make_process_fields as ranked
from ...observe.caches import snapshot as caches
from ...rules import caches as judge
from ...servers.discovery import resolve_server
from ...support import output
from ...support.errors import VllmopsError
from ...support.files import is_gzip
from ...support.output import Result
from ..findings_view import FailOn, choose_exit_code, render_findings
from ..multi_target import run_per_target
from ..options import Target, is_on_command_line, make_seconds_parser, validate_output_path

if TYPE_CHECKING:
    from rich.console import RenderableType

NICENESS = 10
SIDES_PER_TABLE = 3

TITLES = {
    "mm-lru": "Multimodal cache, mirrored (front end P0, engine P1)",
    "mm-shm": "Multimodal cache in shared memory",
    "mm-processor-only": "Multimodal cache of one process",
    "encoder": "Encoder cache",
}


@run_per_target
def inspect(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            help="A file that --save wrote, or a bundle; not with a server.",
            metavar="[FILE]",
        ),
    ] = None,
    *,
    target: Target = None,
    fail_on: FailOn = Severity.ERROR,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(0.1), help="With --watch: seconds between snapshots."
        ),
    ] = 2.0,
    keys: Annotated[bool, typer.Option("--keys", help="List every key, oldest first.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            callback=validate_output_path,
            help="Write the snapshot to this file as well.",
        ),
    ] = None,
    json_: output.Json = False,
) -> Result:
    """Show the caches of every process, and what is wrong with them.

    The snapshot changes nothing in the server: no hit counter and no LRU
    order. A fault that is seen once is read three times before it becomes
    a finding. The exit code is 1 if a finding has the severity --fail-on
    or a higher one.
    """
    # FILE overrides a target from the environment; a typed target contradicts it.
    if file is not None and (is_on_command_line(ctx, "target") or watch or save):
        raise make_usage_error("FILE cannot be combined with --target, --watch or --save")
    if file is not None:
        return make_caches_result(load_snapshot(file), fail_on, keys)
    # The server's work goes first: a snapshot every second must not slow it down.
    os.nice(NICENESS)
    agents: caches.CacheAgents | None = None

    def inspect_once() -> Result:
        nonlocal agents
        # The processes seldom change, and to find them takes longer than to read their caches.
        if agents and not (agents.server.fleet or all(map(is_alive, agents.processes))):
            agents = None
        agents = agents or caches.CacheAgents(resolve_server(target))
        snapshot = caches.observe_caches(agents, keys=keys or save is not None)
        if save is not None:
            snapshot_files.save_snapshot(save, snapshot)
            output.print_to_stderr(f"saved to {save}")
        if snapshot.samples[-1].gaps:
            agents = None
        return make_caches_result(snapshot, fail_on, keys)

    return output.run_or_watch(inspect_once, interval, watch=watch, as_json=json_)


def load_snapshot(file: Path) -> CacheSnapshot:
    """The cache snapshot in a file: one that --save wrote, or a bundle.

    Raises:
        VllmopsError: as `snapshot_files.load_snapshot` and `bundle_file.load_bundle` do, or
            ``bundle.no-caches``.
    """
    if not is_gzip(file):
        return snapshot_files.load_snapshot(file, CacheSnapshot)
    from ...bundle import bundle_file  # noqa: PLC0415 - slow to import, and needed for a bundle only

    bundled = bundle_file.load_bundle(file)
    if bundled.caches is None:
        reasons = [unseen.reason for unseen in bundled.gaps if unseen.code.startswith("agent.")]
        raise VllmopsError(
            "bundle.no-caches",
            f"{file} contains no caches: {(*reasons, 'no agent reported any')[0]}",
            f"vllmops doctor {file} shows what the bundle contains",
        )
    return bundled.caches


def make_usage_error(message: str) -> VllmopsError:
    return VllmopsError("usage", message, "leave one of these options out")


def make_caches_result(snapshot: CacheSnapshot, fail_on: Severity, keys: bool) -> Result:
    """What the command shows of a snapshot, from a server or from a file."""
    findings = judge.diagnose_caches(snapshot)
    last = snapshot.samples[-1]
    data = {
        "server": snapshot.server,
        "taken_at": last.taken_at,
        "quiet": last.quiet,
        "samples": len(snapshot.samples),
        "caches": [
            build_cache_row(process, cache, keys) for process, cache in list_caches(snapshot)
        ],
        "findings": findings,
        "notes": judge.make_cache_notes(last),
        "silent": last.gaps,
        "problems": [
            {**ranked(process), "problem": problem}
            for process in last.processes
            for problem in process.problems
        ],
    }
    return Result(
        data, lambda: list(render_caches(data, findings)), choose_exit_code(findings, fail_on)
    )


def list_caches(snapshot: CacheSnapshot) -> Iterator[tuple[ProcessCaches, Cache]]:
    """The caches of the last sample, each with its process."""
    for process in snapshot.samples[-1].processes:
        for cache in process.caches:
            yield process, cache


def build_cache_row(process: ProcessCaches, cache: Cache, keys: bool) -> dict[str, Any]:
    """A cache's figures; every kind uses the same names."""
    return {**ranked(process), **build_cache_figures(cache, keys)}


def build_cache_figures(cache: Cache, keys: bool) -> dict[str, Any]:
    match cache:
        case LruCache():
            return {
                "kind": cache.kind,
                "side": cache.side,
                "entries": cache.entries,
                "bytes": cache.bytes,
                "capacity_bytes": int(cache.capacity_bytes),
                "used": compute_used_fraction(cache.bytes, cache.capacity_bytes),
                **build_hit_figures(cache.hits, cache.queries),
                "pinned": len(cache.pinned_keys),
                "oldest": cache.oldest_key,
                "newest": cache.newest_key,
                **({"keys": cache.order} if keys else {}),
            }
        case ShmCache():
            return {
                "kind": cache.kind,
                "side": cache.side,
                "entries": len(cache.keys) if cache.writer else None,
                "bytes": cache.bytes,
                "capacity_bytes": cache.capacity_bytes,
                "used": compute_used_fraction(cache.bytes, cache.capacity_bytes),
                **build_hit_figures(cache.hits, cache.queries),
                "pinned": None,
                "max_object_bytes": cache.max_object_bytes,
                **select_end_keys(cache.keys if cache.writer else None, keys),
            }
        case EncoderCache():
            return {
                "kind": "encoder",
                "side": "scheduler",
                "entries": len(cache.requests_by_key),
                "slots": cache.slots,
                "free_slots": cache.free_slots,
                "freeable_slots": cache.freeable_slots,
                "used": compute_used_fraction(cache.slots - cache.free_slots, cache.slots),
                "referenced": sum(map(bool, cache.requests_by_key.values())),
                **select_end_keys(list(cache.requests_by_key), keys),
            }
        case EncoderDecoderCache():
            return {
                "kind": "encoder",
                "side": "scheduler",
                "entries": None,
                "slots": cache.slots,
                "free_slots": cache.free_slots,
                "freeable_slots": None,
                "used": compute_used_fraction(cache.slots - cache.free_slots, cache.slots),
                "referenced": None,
                **select_end_keys(None, keys),
            }
        case WorkerEncoderCache():
            return {
                "kind": "encoder",
                "side": "worker",
                "entries": len(cache.keys),
                "bytes": cache.bytes,
                "device": cache.device,
                **select_end_keys(cache.keys, keys),
            }


def compute_used_fraction(part: float | None, total: float) -> float | None:
    """The used fraction; None without a meaning: vLLM can count more free slots than slots."""
    return None if part is None or part < 0 or total <= 0 else part / total


def build_hit_figures(hits: int | None, queries: int | None) -> dict[str, Any]:
    rate = hits / queries if hits is not None and queries else None
    return {"hits": hits, "queries": queries, "hit_rate": rate}


def select_end_keys(order: Sequence[str] | None, keys: bool) -> dict[str, Any]:
    """The oldest and the newest key; with ``keys`` all of them."""
    both: dict[str, Any] = {
        "oldest": order[0] if order else None,
        "newest": order[-1] if order else None,
    }
    return {**both, "keys": order} if keys else both


def render_caches(data: dict[str, Any], findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """The data of `make_caches_result` for a person."""
    for kind, title in TITLES.items():
        sides = [cache for cache in data["caches"] if cache["kind"] == kind]
        if kind == "mm-processor-only" and len(sides) < len(data["caches"]):
            # Every process has one for the memory profiling at start; nothing else uses it.
            sides = [side for side in sides if side["entries"] or side["queries"]]
        for together in group_sides(sides):
            yield output.style_text(title, "bold")
            yield make_sides_table(together)
            yield from render_key_lists(together)
            yield ""
    for note in data["notes"]:
        yield f"note: {note.text}"
    for silent in data["silent"]:
        yield output.style_text(
            f"{format_process(silent)} did not answer: {silent.reason}", "yellow"
        )
        yield f"  hint: {silent.hint}"
    for problem in data["problems"]:
        yield output.style_text(f"{format_process_name(problem)}: {problem['problem']}", "yellow")
    yield from render_findings(findings)
    if not findings:
        where = " in what could be read" if data["silent"] or data["problems"] else ""
        yield output.style_text(f"No findings{where}.", "yellow" if where else "green")


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


def make_sides_table(sides: Sequence[dict[str, Any]]) -> RenderableType:
    """A column for each side, a line for each figure that one of them has."""
    titles = [format_heading(side) for side in sides]
    made = output.make_table("", *titles, right_columns=titles)
    for name, label in LABELS.items():
        if any(side.get(name) is not None for side in sides):
            made.add_row(label, *(format_cell(side, name) for side in sides))
    return made


def group_sides(sides: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The sides of each table: an engine is beside its own workers, and they are by their ranks."""
    order = [side["role"] for side in sides]
    by_rank = sorted(
        sides,
        key=lambda side: (
            side["dp_rank"] or 0,
            order.index(side["role"]),
            side["pp_rank"] or 0,
            side["tp_rank"] or 0,
        ),
    )
    for _, engine in groupby(by_rank, key=lambda side: side["dp_rank"] or 0):
        together = list(engine)
        for start in range(0, len(together), SIDES_PER_TABLE):
            yield together[start : start + SIDES_PER_TABLE]


def format_process_name(row: dict[str, Any]) -> str:
    """The process that a row is about."""
    return " ".join(filter(None, (row["role"], row["ranks"], str(row["pid"]))))


def format_heading(figures: dict[str, Any]) -> str:
    process = format_process_name(figures)
    return process if figures["side"] == figures["role"] else f"{figures['side']}: {process}"


def format_cell(figures: dict[str, Any], name: str) -> str:
    value = figures.get(name)
    if value is None:
        return "-"
    if name in SIZES:
        return output.format_bytes(value)
    if name == "used":
        return f"{value:.1%}"
    if name == "hits" and figures.get("hit_rate") is not None:
        return f"{value} ({figures['hit_rate']:.0%})"
    return judge.shorten_key(str(value))


def render_key_lists(sides: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """The keys of each side that lists them (--keys)."""
    for side in sides:
        if side.get("keys"):
            yield f"keys of {side['side']}, oldest first:"
            yield "\n".join(f"  {key}" for key in side["keys"])
