"""``vllmops status``: one server on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from rich.console import RenderableType

from ..collect.agents import agent_client
from ..collect.agents.agent_client import Agent
from ..collect.http import vllm_client
from ..model.agent_state import EngineState
from ..model.caches import LruCache, ProcessCaches, ShmCache
from ..model.patches import PatchState, ProcessPatches
from ..model.ranks import format_process
from ..model.roles import ROLES, Role
from ..model.vllm_metrics import Metrics
from ..observe.instances import InstanceRow, build_instance_row
from ..servers.discovery import Server, resolve_server
from ..servers.record import InstanceFolder
from ..support import output
from ..support.output import Json, Result, format_bytes, make_typer_app
from .multi_target import run_per_target
from .options import Target, TargetArgument
from .ps import render_servers

A = TypeVar("A")

app = make_typer_app()


class CacheUse(msgspec.Struct, frozen=True):
    """How full one multimodal cache is; bytes."""

    process: str
    side: str
    kind: str
    entries: int
    bytes: float | None
    capacity_bytes: float


@app.command(epilog="Example: vllmops status demo")
@run_per_target
def status(name: TargetArgument = None, target: Target = None, json_: Json = False) -> Result:
    """Show one server on one screen.

    The screen has its processes, requests, cache use and patches.
    """
    server = resolve_server(name or target)
    seen = build_instance_row(server)
    agents, _ = agent_client.collect_answers(
        server.select_processes(*ROLES), agent_client.open_agent
    )
    engines = fetch_answers(agents, Agent.fetch_engine_state, Role.ENGINE)
    metrics = vllm_client.fetch_metrics(server.url) if server.url else None
    caches = collect_cache_uses(fetch_answers(agents, Agent.fetch_caches, Role.API, Role.ENGINE))
    patched = group_patches_by_state(fetch_answers(agents, Agent.fetch_patches, *ROLES))
    data: dict[str, Any] = {
        "instance": seen,
        "stage": server.record.stage if server.record else None,
        "engines": engines,
        "metrics": metrics,
        "caches": caches,
        "patches": patched,
    }
    return Result(data, lambda: render_status(server, seen, engines, metrics, caches, patched))


def fetch_answers(agents: Iterable[Agent], ask: Callable[[Agent], A], *roles: Role) -> list[A]:
    """What the agents in these roles answer; a process whose agent hangs is not asked again."""
    asked = {one.process: one for one in agents if one.process.role in roles}
    return agent_client.collect_answers(asked, lambda process: ask(asked[process]))[0]


def group_patches_by_state(answers: Iterable[ProcessPatches]) -> dict[str, list[str]]:
    """The patches in each state, by id; one that differs between processes is in several."""
    states: dict[str, list[str]] = {}
    for answer in answers:
        for verdict in answer.patches:
            if verdict.id not in states.setdefault(verdict.state, []):
                states[verdict.state].append(verdict.id)
    return states


def collect_cache_uses(answers: Iterable[ProcessCaches]) -> list[CacheUse]:
    """How full the multimodal caches are, as far as agents report it."""
    rows = []
    for answer in answers:
        for cache in answer.caches:
            if isinstance(cache, LruCache):
                used = (cache.entries, cache.bytes)
            elif isinstance(cache, ShmCache) and cache.writer:
                used = (len(cache.keys), cache.bytes or 0)
            else:
                continue
            where = format_process(answer)
            rows.append(CacheUse(where, cache.side, cache.kind, *used, cache.capacity_bytes))
    return rows


def render_status(
    server: Server,
    row: InstanceRow,
    engines: list[EngineState],
    metrics: Metrics | None,
    caches: list[CacheUse],
    patch_states: dict[str, list[str]],
) -> list[RenderableType]:
    facts = output.make_facts_table(())
    facts.box = None
    record = server.record
    if record and record.state == "starting":
        facts.add_row("stage", record.stage)
    facts.add_row("requests", format_requests(engines, metrics))
    facts.add_row("KV cache", format_kv_cache(engines, metrics))
    if metrics and metrics.prefix_queries:
        facts.add_row(
            "prefix cache",
            f"{(metrics.prefix_hits or 0) / metrics.prefix_queries:.0%} of tokens hit",
        )
    for cells in make_cache_rows(caches):
        facts.add_row(*cells)
    facts.add_row("patches", format_patches(patch_states))
    if row.supervised is False:
        facts.add_row("supervision", "its supervisor had died; a new one has started")
    elif row.supervised is None and not row.remote:
        facts.add_row("supervision", "none: vllmops did not start it")
    if record and record.watch is not None:
        running = InstanceFolder(record.name).has_watch()
        facts.add_row("watch", "on" if running else "not running")
    return [*render_servers([row]), "", facts]


def make_cache_rows(caches: list[CacheUse]) -> Iterator[tuple[str, str]]:
    """A label and its content for each cache; of several alike the label names the process."""
    alike = Counter((cache.kind, cache.side) for cache in caches)
    for cache in caches:
        where = f", {cache.process}" if alike[cache.kind, cache.side] > 1 else ""
        full = f"{format_bytes(cache.bytes)} of {format_bytes(cache.capacity_bytes)}"
        yield f"{cache.kind} {cache.side}{where}", f"{cache.entries} entries, {full}"


def format_requests(engines: list[EngineState], metrics: Metrics | None) -> str:
    """Running and waiting requests; from the engine if it answers, since metrics lag a hang."""
    known = [engine for engine in engines if engine.running is not None]
    if known:
        running = sum(engine.running or 0 for engine in known)
        waiting = sum(engine.waiting or 0 for engine in known)
        return f"{running} running, {waiting} waiting"
    if metrics and metrics.running is not None:
        return f"{metrics.running:.0f} running, {metrics.waiting or 0:.0f} waiting (metrics)"
    return "unknown: no agent answers, and /metrics does not either"


def format_kv_cache(engines: list[EngineState], metrics: Metrics | None) -> str:
    shares = [(one.ranks, one.kv_cache_usage) for one in engines if one.kv_cache_usage is not None]
    if not shares and metrics and metrics.kv_cache_usage is not None:
        shares = [("", metrics.kv_cache_usage)]
    return ", ".join(f"{rank} {share:.1%} used".lstrip() for rank, share in shares) or "unknown"


def format_patches(states: dict[str, list[str]]) -> str:
    """How many patches are in each state; those in a bad state by name."""
    well = PatchState.APPLIED, PatchState.FIXED
    parts = [
        f"{len(ids)} {state}" if state in well else f"{state}: {', '.join(ids)}"
        for state, ids in states.items()
    ]
    return "; ".join(parts) or "unknown: no agent answers"
