"""``vllmops doctor``: what is wrong with a server, and what to do next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..collect.machine import name_collision
from ..collect.machine.server_address import format_url
from ..model.findings import Finding, Severity
from ..model.server_snapshot import Gap, ServerSnapshot
from ..model.vllm_metrics import Metrics
from ..rules import diagnosis as judge
from ..rules.stacks.explanation import StackFinding
from ..support.errors import make_usage_error
from ..support.output import (
    FoldedLines,
    IndentedLine,
    Json,
    Progress,
    Result,
    format_bytes,
    format_duration,
    make_facts_table,
    make_table,
    make_typer_app,
    print_to_stderr,
    style_text,
)
from . import step_history_view
from .findings_view import STYLES, FailOn, choose_exit_code
from .multi_target import run_per_target
from .options import Target, is_on_command_line, make_seconds_parser
from .stacks.explanation_view import render_evidence as lines_of

if TYPE_CHECKING:
    from rich.console import RenderableType

app = make_typer_app()

EVIDENCE = 4  # lines of each finding


def complete_check_code(incomplete: str) -> list[str]:
    """Codes of checks, for completion."""
    return [check.code for check in judge.list_checks() if check.code.startswith(incomplete)]


Codes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CODE",
        help="A check's code, or the first word of several codes; repeatable.",
        autocompletion=complete_check_code,
        rich_help_panel="Checks",
    ),
]


@app.command(epilog="Example: vllmops doctor -t demo --canary")
@run_per_target
def doctor(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False, help="A bundle to examine instead of a server.", metavar="[FILE]"
        ),
    ] = None,
    *,
    target: Target = None,
    fail_on: FailOn = Severity.ERROR,
    only: Codes = None,
    skip: Codes = None,
    list_: Annotated[
        bool,
        typer.Option(
            "--list", help="List every check, and examine nothing.", rich_help_panel="Checks"
        ),
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(0.1), help="Seconds over which metrics are compared."
        ),
    ] = 1.0,
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="Only show the last 5 minutes of the engines' steps, also of a server that was"
            " killed, for example: vllmops doctor -t demo --history.",
        ),
    ] = False,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="Also send one request for one token, with VLLM_API_KEY if the server is yours or"
            " root's.",
            rich_help_panel="Active checks",
        ),
    ] = False,
    clean_shm: Annotated[
        bool,
        typer.Option(
            "--clean-shm",
            help="Remove shared memory that is proven to be unused, and do nothing else.",
            rich_help_panel="Active checks",
        ),
    ] = False,
    json_: Json = False,
) -> Result:
    """Show what is wrong with a server, and what to do next.

    The worst finding comes first. doctor examines progress, stacks, caches,
    patches, memory, processes, the machine, who can reach the server, and its
    metrics. It takes longer if something seems to be stuck, and it names what
    it can't see. It changes nothing, and sends no request except with --canary.
    """
    every = judge.list_checks()
    selected = select_codes(every, only, skip)
    if list_:
        return Result(
            {"checks": [check for check in every if check.code in selected]},
            lambda: [make_checks_table([check for check in every if check.code in selected])],
        )
    if clean_shm:
        return clean_shared_memory(is_only_option=file is None and not canary and not history)
    if history and canary:
        raise make_usage_error(
            "--history can't be combined with --canary", "vllmops doctor --history"
        )
    if file is not None:
        if canary or is_on_command_line(ctx, "target"):
            raise make_usage_error(
                "a FILE can't be combined with --target or --canary", "give a FILE or a server"
            )
        from ..bundle import bundle_file  # noqa: PLC0415

        snapshot = bundle_file.load_bundle(file)
        if history:
            return step_history_view.make_steps_result(snapshot.server, snapshot.recordings, ())
    elif history:
        from ..observe import step_recordings  # noqa: PLC0415

        return step_history_view.make_steps_result(*step_recordings.load_history(target))
    else:
        if line := name_collision.describe_namesakes():
            print_to_stderr(line, "yellow")
        snapshot = take_live_snapshot(target, interval, canary=canary, quiet=json_)
    diagnosis = judge.diagnose_snapshot(snapshot)
    findings = [finding for finding in diagnosis.findings if finding.code in selected]
    data = {
        "server": snapshot.server,
        "url": snapshot.url,
        "model": snapshot.model,
        "vllm_version": snapshot.vllm_version,
        "taken_at": snapshot.taken_at,
        "findings": findings,
        "stalls": diagnosis.stalls,
        "stacks": diagnosis.explanation.verdict if diagnosis.explanation else None,
        "figures": format_figures(snapshot),
        "unseen": snapshot.gaps,
    }
    return Result(
        data,
        lambda: list(
            render_diagnosis(snapshot, findings, has_skipped_checks=len(selected) < len(every))
        ),
        choose_exit_code(findings, fail_on),
    )


def clean_shared_memory(*, is_only_option: bool) -> Result:
    """Remove what is left in ``/dev/shm``, and say what stays and why.

    Raises:
        VllmopsError: ``usage``.
    """
    if not is_only_option:
        raise make_usage_error(
            "--clean-shm can't be combined with a FILE, --canary or --history",
            "vllmops doctor --clean-shm",
        )
    from ..collect.machine import shared_memory  # noqa: PLC0415
    from ..support.home import format_user  # noqa: PLC0415

    left, removed = shared_memory.remove_stale_segments()
    young = (
        f"it is less than {format_duration(shared_memory.OLD_S)} old, so a process may be about to "
        "use it"
    )
    kept = [
        {
            "name": segment.name,
            "bytes": segment.bytes,
            "age_s": segment.age_s,
            "owner": format_user(segment.uid),
            "why": left.uncertainty
            or (young if segment.age_s < shared_memory.OLD_S else "a process uses it now"),
        }
        for segment in left.segments
    ]
    gone = [{"name": segment.name, "bytes": segment.bytes} for segment in removed]

    def render_removals() -> Iterator[RenderableType]:
        yield from (f"removed {segment.name}, {format_bytes(segment.bytes)}" for segment in removed)
        yield from (f"kept {segment['name']}: {segment['why']}" for segment in kept)
        if not removed and not kept:
            yield "no shared memory of dead processes is left"

    return Result({"removed": gone, "left": kept}, lambda: list(render_removals()))


def take_live_snapshot(
    target: str | None, interval_s: float, *, canary: bool, quiet: bool
) -> ServerSnapshot:
    """A snapshot of a running server."""
    from ..observe import server_snapshot  # noqa: PLC0415 - slow, and not for --list
    from ..servers.discovery import resolve_server  # noqa: PLC0415

    server = resolve_server(target)
    with Progress(time.time(), quiet=quiet) as progress:
        options = server_snapshot.ExaminationOptions(interval_s=interval_s, canary=canary)
        return server_snapshot.examine_server(server, options, progress.update)


def select_codes(
    checks: Sequence[judge.Check], only_codes: Sequence[str] | None, skip: Sequence[str] | None
) -> set[str]:
    """The codes of the checks to show.

    Raises:
        VllmopsError: ``usage`` for an unknown code.
    """
    known = {check.code for check in checks}

    def expand_codes(prefixes: Sequence[str]) -> set[str]:
        codes: set[str] = set()
        for word in prefixes:
            here = {code for code in known if code == word or code.startswith(f"{word}.")}
            if not here:
                raise make_usage_error(f"unknown check {word!r}", "vllmops doctor --list")
            codes |= here
        return codes

    return (expand_codes(only_codes) if only_codes else known) - expand_codes(skip or ())


def make_checks_table(checks: Sequence[judge.Check]) -> RenderableType:
    shown = make_table("code", "severity", "finding")
    for check in checks:
        shown.add_row(check.code, check.severity, check.title)
    return shown


def render_diagnosis(
    snapshot: ServerSnapshot, findings: Sequence[Finding], *, has_skipped_checks: bool
) -> Iterator[RenderableType]:
    """The result for a person: the server, what is wrong, its figures, what could not be seen."""
    yield style_text(format_headline(snapshot), "bold")
    for number, finding in enumerate(findings, 1):
        yield ""
        yield FoldedLines(tuple(render_finding(number, finding)))
    if findings:
        yield ""
        more = " (each finding has its page)" if len(findings) > 1 else ""
        yield f"help: vllmops help {findings[0].code}{more}"
    if told := format_figures(snapshot):
        yield ""
        rows = make_facts_table(told.items())
        rows.box = None
        yield rows
    if snapshot.gaps:
        yield ""
        yield FoldedLines(tuple(render_gaps(snapshot)))
    if not findings:
        yield ""
        where = " in what could be seen" if snapshot.gaps else ""
        of_checks = " of the selected checks" if has_skipped_checks else ""
        yield style_text(f"No findings{of_checks}{where}.", "green")


def format_headline(snapshot: ServerSnapshot) -> str:
    parts = [f"{snapshot.server}: vLLM {snapshot.vllm_version or 'of unknown version'}"]
    if snapshot.model:
        parts.append(f"serves {snapshot.model}")
    if snapshot.url:
        parts.append(f"at {format_url(snapshot.url)}")
    if snapshot.state:
        parts.append(snapshot.state)
    if snapshot.uptime_s is not None:
        parts.append(f"up {format_duration(snapshot.uptime_s)}")
    return ", ".join(parts).replace(", serves", " serves").replace(", at", " at")


def render_finding(number: int, finding: Finding) -> Iterator[IndentedLine]:
    """One finding: what, where, what was seen, and what to do next."""
    title = f"{number}. {finding.severity}: {finding.title} [{finding.code}]"
    yield IndentedLine(0, title, STYLES[finding.severity])
    yield IndentedLine(3, f"where: {finding.subject}")
    if isinstance(finding, StackFinding):
        if finding.victims:
            yield IndentedLine(3, f"waiting for it: {', '.join(finding.victims)}")
        yield IndentedLine(3, f"why: {finding.cause} ({finding.confidence})")
        yield IndentedLine(3, "seen:")
        for line in finding.lines[:EVIDENCE]:
            yield from lines_of(line, 5)
    else:
        yield IndentedLine(3, f"seen: {finding.evidence}")
    yield IndentedLine(3, f"next: {finding.next_step}", "bold")
    if finding.reference:
        yield IndentedLine(3, f"see: {finding.reference}")


def render_gaps(snapshot: ServerSnapshot) -> Iterator[IndentedLine]:
    """What could not be seen; parts with one reason share a line."""
    alike: dict[str, list[Gap]] = {}
    for part in snapshot.gaps:
        alike.setdefault(part.code, []).append(part)
    for first, *others in alike.values():
        more = f", {', '.join(other.part for other in others)}" if others else ""
        yield IndentedLine(0, f"not seen: {first.part}{more}: {first.reason}", "yellow")
        if first.hint:
            yield IndentedLine(2, f"hint: {first.hint}")


def format_figures(snapshot: ServerSnapshot) -> dict[str, str]:
    """The server's figures, as far as they are known."""
    looks = [look for look in snapshot.samples if look.metrics]
    rows: dict[str, str] = {}
    engines = [report.engine for report in snapshot.reports if report.engine.running is not None]
    last = looks[-1].metrics if looks else None
    http = sum(report.traffic.in_flight or 0 for report in snapshot.reports)
    if engines:
        running = sum(engine.running or 0 for engine in engines)
        waiting = sum(engine.waiting or 0 for engine in engines)
        rows["requests"] = f"{running} running, {waiting} waiting, {http} HTTP requests in flight"
    elif last and last.running is not None:
        rows["requests"] = f"{last.running:.0f} running, {last.waiting or 0:.0f} waiting (metrics)"
    if not looks or last is None or looks[0].metrics is None:
        return rows
    first = looks[0].metrics
    seconds = looks[-1].at_s - looks[0].at_s
    if seconds > 0 and (rates := list(format_rates(first, last, seconds))):
        rows[f"over {seconds:.1f} s"] = ", ".join(rates)
    if shares := list(format_cache_use(last)):
        rows["caches"] = ", ".join(shares)
    return rows


def format_rates(first_metrics: Metrics, last_metrics: Metrics, seconds: float) -> Iterator[str]:
    """Rates and times between two samples."""
    before, after = msgspec.structs.asdict(first_metrics), msgspec.structs.asdict(last_metrics)
    grown: dict[str, float] = {
        name: value - before[name]
        for name, value in after.items()
        if value is not None and before[name] is not None
    }
    if not grown.get("finished") and not grown.get("tokens"):
        return
    yield f"{grown.get('finished', 0.0) / seconds:.1f} requests/s"
    yield f"{grown.get('tokens', 0.0) / seconds:.0f} tokens/s"
    means = {
        name: total / count
        for name in ("queue", "prefill", "first", "between", "whole")
        if (count := grown.get(f"{name}_n", 0.0)) > 0
        and (total := grown.get(f"{name}_s")) is not None
    }
    if {"first", "queue", "prefill"} <= means.keys():
        rest = max(means["first"] - means["queue"] - means["prefill"], 0.0)
        yield (
            f"first token after {means['first']:.3f} s (queue {means['queue']:.3f}, "
            f"prefill {means['prefill']:.3f}, rest {rest:.3f})"
        )
    if "between" in means:
        yield f"{1000 * means['between']:.1f} ms from token to token"
    if grown.get("preemptions"):
        yield f"{grown['preemptions']:.0f} preemptions"


def format_cache_use(metrics: Metrics) -> Iterator[str]:
    """How full the KV cache is, and the hit rates of the caches since the start."""
    if metrics.kv_cache_usage is not None:
        yield f"KV {metrics.kv_cache_usage:.0%} full"
    if metrics.prefix_queries:
        yield f"prefix {(metrics.prefix_hits or 0) / metrics.prefix_queries:.0%} of tokens hit"
    if metrics.mm_queries:
        yield f"multimodal {(metrics.mm_hits or 0) / metrics.mm_queries:.0%} of items hit"
