"""``vllmops doctor``: what is wrong with a server, and what to do next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..diagnose import doctor as judge
from ..diagnose.findings import Finding, Severity, worst
from ..diagnose.stacks import StackFinding
from ..errors import Exit, VllmopsError
from ..host import namesake
from ..host.shape import shown
from ..output import (
    Folded,
    Json,
    Line,
    Progress,
    Result,
    command,
    say,
    size,
    span,
    table,
    typer_app,
)
from ..protocol.metrics import Metrics
from ..protocol.server import ServerSnapshot, Unseen
from .findings import STYLES
from .options import Target, seconds
from .stacks.explanation import steps

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer_app()

EVIDENCE = 4  # lines of each finding


def codes(incomplete: str) -> list[str]:
    """Codes of checks, for completion."""
    return [check.code for check in judge.checks() if check.code.startswith(incomplete)]


Codes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CODE",
        help="A check's code, or its first word; may be given several times.",
        show_default=False,
        autocompletion=codes,
    ),
]


@app.command(epilog="Example: vllmops doctor -t demo --canary")
@command
def doctor(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(readable=False, help="A bundle, instead of a server.", metavar="[FILE]"),
    ] = None,
    *,
    target: Target = None,
    fail_on: Annotated[
        Severity, typer.Option(help="Exit code 1 from findings of this severity up.")
    ] = Severity.ERROR,
    only: Codes = None,
    skip: Codes = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Name every check, and look at nothing.")
    ] = False,
    interval: Annotated[
        float, typer.Option(parser=seconds(0.1), help="Seconds over which metrics are compared.")
    ] = 1.0,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="Send one request for one token, too, with VLLM_API_KEY if the server is yours or"
            " root's.",
        ),
    ] = False,
    clean_shm: Annotated[
        bool,
        typer.Option(
            "--clean-shm", help="Remove shared memory that is proven to be nobody's; nothing else."
        ),
    ] = False,
    json_: Json = False,
) -> Result:
    """Say what is wrong with a server, worst first, and what to do next.

    It looks at progress, stacks, caches, patches, memory, processes, the
    machine, who can reach the server, and its metrics; longer where something
    seems to stand still. What it can't see it says. It changes nothing, and
    sends no request unless asked to (--canary).
    """
    every = judge.checks()
    wanted = chosen(every, only, skip)
    if list_:
        return Result(
            {"checks": [check for check in every if check.code in wanted]},
            lambda: [listing([check for check in every if check.code in wanted])],
        )
    if clean_shm:
        return cleaned(alone=file is None and not canary)
    if file is not None:
        source = ctx.get_parameter_source("target")
        if canary or (source is not None and source.name == "COMMANDLINE"):
            raise VllmopsError(
                "usage",
                "FILE stands for a server: it goes with neither --target nor --canary",
                "leave one of them out",
                exit_code=Exit.USAGE,
            )
        from ..bundle import bundle  # noqa: PLC0415

        snapshot = bundle.load(file)
    else:
        if line := namesake.warning():
            say(line, "yellow")
        snapshot = live(target, interval, canary=canary, quiet=json_)
    told = judge.examine(snapshot)
    found = [each for each in told.findings if each.code in wanted]
    highest = worst(found)
    failed = highest is not None and highest.rank >= fail_on.rank
    data = {
        "server": snapshot.server,
        "url": snapshot.url,
        "model": snapshot.model,
        "vllm_version": snapshot.vllm_version,
        "taken_at": snapshot.taken_at,
        "findings": found,
        "stalls": told.stalls,
        "stacks": told.explanation.verdict if told.explanation else None,
        "figures": figures(snapshot),
        "unseen": snapshot.unseen,
    }
    return Result(
        data,
        lambda: list(screen(snapshot, found, skipped=len(wanted) < len(every))),
        Exit.FAILED if failed else Exit.OK,
    )


def cleaned(*, alone: bool) -> Result:
    """Remove what is left in ``/dev/shm`` and say what could not be removed, and why.

    Raises:
        VllmopsError: ``usage``.
    """
    if not alone:
        raise VllmopsError(
            "usage",
            "--clean-shm looks at this machine alone: it goes with neither FILE nor --canary",
            "vllmops doctor --clean-shm",
            exit_code=Exit.USAGE,
        )
    from ..home import user  # noqa: PLC0415
    from ..host import shm  # noqa: PLC0415

    left, removed = shm.clean()
    young = f"it is less than {span(shm.OLD_S)} old: it may be in the making"
    kept = [
        {
            "name": each.name,
            "bytes": each.bytes,
            "age_s": each.age_s,
            "owner": user(each.uid),
            "why": left.doubt or (young if each.age_s < shm.OLD_S else "it came into use"),
        }
        for each in left.segments
    ]
    gone = [{"name": each.name, "bytes": each.bytes} for each in removed]

    def told() -> Iterator[RenderableType]:
        yield from (f"removed {each.name}, {size(each.bytes)}" for each in removed)
        yield from (f"left {each['name']}: {each['why']}" for each in kept)
        if not removed and not kept:
            yield "no shared memory is left of processes that are gone"

    return Result({"removed": gone, "left": kept}, lambda: list(told()))


def live(target: str | None, interval_s: float, *, canary: bool, quiet: bool) -> ServerSnapshot:
    """A snapshot of a running server."""
    from ..doctor import examine  # noqa: PLC0415 - slow, and not for --list
    from ..instances.servers import resolve  # noqa: PLC0415

    server = resolve(target)
    with Progress(time.time(), quiet=quiet) as progress:
        options = examine.Options(interval_s=interval_s, canary=canary)
        return examine.take(server, options, progress.update)


def chosen(
    every: Sequence[judge.Check], only: Sequence[str] | None, skip: Sequence[str] | None
) -> set[str]:
    """The codes that count.

    Raises:
        VllmopsError: ``usage``, for a code that there is not.
    """
    known = {check.code for check in every}

    def meant(words: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for word in words:
            here = {code for code in known if code == word or code.startswith(f"{word}.")}
            if not here:
                raise VllmopsError(
                    "usage",
                    f"there is no check {word!r}",
                    "vllmops doctor --list",
                    exit_code=Exit.USAGE,
                )
            found |= here
        return found

    return (meant(only) if only else known) - meant(skip or ())


def listing(checks: Sequence[judge.Check]) -> RenderableType:
    shown = table("code", "severity", "finding")
    for check in checks:
        shown.add_row(check.code, check.severity, check.title)
    return shown


def screen(
    snapshot: ServerSnapshot, found: Sequence[Finding], *, skipped: bool
) -> Iterator[RenderableType]:
    """The answer for a person: who, what is wrong, how it does, what could not be seen."""
    from rich.text import Text  # noqa: PLC0415

    yield Text(headline(snapshot), "bold")
    for number, finding in enumerate(found, 1):
        yield Text()
        yield Folded(tuple(paragraph(number, finding)))
    facts = figures(snapshot)
    if facts:
        yield Text()
        shown = table("", "")
        shown.show_header = False
        shown.box = None
        for name, value in facts.items():
            shown.add_row(name, value)
        yield shown
    if snapshot.unseen:
        yield Text()
        yield Folded(tuple(unseen(snapshot)))
    if not found:
        yield Text()
        where = " in what could be seen" if snapshot.unseen else ""
        chosen = " among the checks that were chosen" if skipped else ""
        yield Text(f"No findings{where}{chosen}.", "green")


def headline(snapshot: ServerSnapshot) -> str:
    parts = [f"{snapshot.server}: vLLM {snapshot.vllm_version or 'of unknown version'}"]
    if snapshot.model:
        parts.append(f"serves {snapshot.model}")
    if snapshot.url:
        parts.append(f"at {shown(snapshot.url)}")
    if snapshot.state:
        parts.append(snapshot.state)
    if snapshot.uptime_s is not None:
        parts.append(f"up {span(snapshot.uptime_s)}")
    return ", ".join(parts).replace(", serves", " serves").replace(", at", " at")


def paragraph(number: int, finding: Finding) -> Iterator[Line]:
    """One finding: what, where, what was seen, and what comes next."""
    title = f"{number}. {finding.severity}: {finding.title} [{finding.code}]"
    yield Line(0, title, STYLES[finding.severity])
    yield Line(3, f"where: {finding.subject}")
    if isinstance(finding, StackFinding):
        yield Line(3, f"why: {finding.cause} ({finding.confidence})")
        yield Line(3, "seen:")
        for each in finding.lines[:EVIDENCE]:
            yield from steps(each, 5)
    else:
        yield Line(3, f"seen: {finding.evidence}")
    yield Line(3, f"next: {finding.next}", "bold")
    if finding.reference:
        yield Line(3, f"see: {finding.reference}")


def unseen(snapshot: ServerSnapshot) -> Iterator[Line]:
    """What could not be looked at; what has one reason is told once."""
    alike: dict[str, list[Unseen]] = {}
    for each in snapshot.unseen:
        alike.setdefault(each.code, []).append(each)
    for first, *others in alike.values():
        more = f", nor {', '.join(each.part for each in others)}" if others else ""
        yield Line(0, f"not seen: {first.part}{more}: {first.why}", "yellow")
        if first.hint:
            yield Line(2, f"hint: {first.hint}")


def figures(snapshot: ServerSnapshot) -> dict[str, str]:
    """How the server does, as far as it tells."""
    looks = [look for look in snapshot.looks if look.metrics]
    found: dict[str, str] = {}
    engines = [each.engine for each in snapshot.told if each.engine.running is not None]
    last = looks[-1].metrics if looks else None
    in_flight = [each.traffic.in_flight for each in snapshot.told]
    http = sum(each for each in in_flight if each is not None)
    if engines:
        running = sum(each.running or 0 for each in engines)
        waiting = sum(each.waiting or 0 for each in engines)
        found["requests"] = f"{running} running, {waiting} waiting, {http} HTTP requests in flight"
    elif last and last.running is not None:
        found["requests"] = f"{last.running:.0f} running, {last.waiting or 0:.0f} waiting (metrics)"
    if not looks or last is None or looks[0].metrics is None:
        return found
    first = looks[0].metrics
    seconds = looks[-1].at_s - looks[0].at_s
    if rates := list(pace(first, last, seconds)):
        found[f"over {seconds:.1f} s"] = ", ".join(rates)
    if shares := list(hits(last)):
        found["caches"] = ", ".join(shares)
    return found


def pace(first: Metrics, last: Metrics, seconds: float) -> Iterator[str]:
    """What the server did between two looks."""
    before, after = msgspec.structs.asdict(first), msgspec.structs.asdict(last)
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
        name: grown[f"{name}_s"] / count
        for name in ("queue", "prefill", "first", "between", "whole")
        if (count := grown.get(f"{name}_n", 0.0)) > 0
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


def hits(last: Metrics) -> Iterator[str]:
    """How full the KV cache is, and what share of queries the caches have answered so far."""
    if last.kv_cache_usage is not None:
        yield f"KV {last.kv_cache_usage:.0%} full"
    if last.prefix_queries:
        yield f"prefix {(last.prefix_hits or 0) / last.prefix_queries:.0%} of tokens hit"
    if last.mm_queries:
        yield f"multimodal {(last.mm_hits or 0) / last.mm_queries:.0%} of items hit"
