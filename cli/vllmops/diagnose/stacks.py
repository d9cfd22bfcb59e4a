"""What stuck processes are stuck in; pure, from stacks and the catalogue of signatures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ..protocol.metrics import Metrics
from ..protocol.pasted import Crash, Pasted
from ..protocol.stacks import Frame, ProcessStacks, StacksSnapshot, Thread
from .findings import Finding, Rule, Severity
from .signatures import (
    Case,
    Confidence,
    Signature,
    ThreadPattern,
    bare,
    catalogue,
    functions,
    is_called,
)

RANKS: tuple[Confidence, ...] = ("possible", "likely", "sure")
SHOWN_FRAMES = 6
ARROW = " < "  # from a frame to its caller
LOG_SHOWN = 200
GONE = {"stacks.gone", "stacks.zombie"}
# The tokens of a long prompt are counted at its end.
FROZEN_S = 30.0
PACES = ("progress", "steps")  # frozen or moving
FACTS = ("running", "waiting", "deferred", "kv_usage", "still", *PACES)
# Frames that say what a thread does, where no signature fits.
TELLING = re.compile(r"vllm|triton|torch|xgrammar|llguidance|lmcache|nixl|flashinfer|ray")
WAITING = (
    "get",
    "wait",
    "poll",
    "select",
    "_worker",
    "accept",
    "acquire",
    "recv",
    "_recv",
    "sleep",
)

# In a text without blanks: the lines of a log may have been wrapped anywhere.
STATS = re.compile(
    r"(?:Engine(?P<id>\d+):)?Avgpromptthroughput:(?P<prompt>[\d.]+)tokens/s,"
    r"Avggenerationthroughput:(?P<generation>[\d.]+)tokens/s,"
    r"Running:(?P<running>\d+)reqs,Waiting:(?P<waiting>\d+)reqs"
    r"(?:,Deferred:(?P<deferred>\d+)reqs)?.{0,80}?KVcacheusage:(?P<kv>[\d.]+)%"
)


STOPPED = Rule(
    "process.stopped",
    Severity.ERROR,
    "a process is stopped by a signal",
    "kill -CONT with its pid lets it go on",
)


class StackFinding(Finding, frozen=True, kw_only=True):
    """A finding from stacks.

    Args:
        confidence: ``possible``, ``likely`` or ``sure``.
        lines: the evidence, line by line.
        cause: why it comes to this.
        sure: what would make it sure; empty where it is.
        references: all of them.
        fixed_in: vLLM's version, empty where none is known.
        hang: whether something is stuck.
    """

    confidence: Confidence
    lines: tuple[str, ...]
    cause: str = ""
    sure: str = ""
    references: tuple[str, ...] = ()
    fixed_in: str = ""
    hang: bool = True


class Seen(msgspec.Struct, frozen=True):
    """One process in a line or two: what is said where no signature fits."""

    role: str
    pid: int
    title: str
    threads: int
    doing: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True):
    """The answer.

    Args:
        verdict: ``hang``, ``crash``, ``idle``, ``working`` where tokens are known to come,
            ``maybe`` where a signature fits that work would fit, too, and ``unknown``.
        findings: worst first.
        seen: every process of the last sample.
        samples: how many.
        facts: what was known besides the stacks.
        notes: what a reader must know of how sure this can be.
    """

    verdict: str
    findings: tuple[StackFinding, ...]
    seen: tuple[Seen, ...]
    samples: int
    facts: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Spot:
    """A thread that fits a pattern, and where."""

    process: ProcessStacks
    thread: Thread
    frames: tuple[Frame, ...]

    @property
    def key(self) -> tuple[object, ...]:
        # Unnamed threads of a process can't be told apart from one sample to the next.
        return (self.process.pid or self.process.title, self.thread.tid or self.thread.name)


@dataclass(frozen=True)
class Hit:
    """A case that holds."""

    signature: Signature
    confidence: Confidence
    lines: tuple[str, ...]
    subject: str
    short_of: tuple[str, ...] = field(default=())


def explain(pasted: Pasted, facts: Mapping[str, str] | None = None) -> Explanation:
    """Say what is stuck.

    Args:
        pasted: stacks, from a text or from a live server.
        facts: what else is known, by the names in `FACTS`; a log in the text adds to it.
    """
    log = "".join(pasted.text.split())
    known = {**logged(log), **(facts or {})}
    scene = Scene(pasted)
    hits = [hit for each in catalogue() if (hit := _hit(each, scene, known, log))]
    halted = [p for p in (pasted.samples[-1].processes if pasted.samples else ()) if p.stopped]
    if halted:
        # Where a process can't move, what the others wait for is that.
        hits = []
    strong = [hit for hit in hits if hit.confidence != "possible"]
    hidden = {name for hit in strong or hits for name in hit.signature.hides}
    if any(hit.signature.hang for hit in strong):
        hits = [hit for hit in strong if hit.signature.hang]
    elif strong:  # idle
        hits = strong
    shown = [_finding(hit) for hit in hits if hit.signature.id not in hidden]
    found = [*map(_crashed, _distinct(pasted.crashes)), *map(_stopped, halted), *shown]
    found.sort(key=lambda each: (-each.severity.rank, -RANKS.index(each.confidence)))
    verdict = _verdict(found, known)
    return Explanation(
        verdict=verdict,
        findings=tuple(found),
        seen=tuple(map(_seen, pasted.samples[-1].processes)) if pasted.samples else (),
        samples=len(pasted.samples),
        facts=known,
        notes=tuple(_notes(pasted, idle=verdict == "idle")),
    )


def logged(log: str) -> dict[str, str]:
    """Facts from the last figures in vLLM's log, which is given without blanks."""
    lines = list(STATS.finditer(log))
    if not lines:
        return {}
    last = lines[-1]
    facts = {"running": last["running"], "waiting": last["waiting"], "kv_usage": last["kv"]}
    facts["deferred"] = last["deferred"] or "0"
    if not _is_still(last):
        facts["progress"] = "moving"
    else:
        # A request may have come just before one line; by the next it has got somewhere.
        latest = [line for line in lines if line["id"] == last["id"]][-2:]
        if len(latest) == 2 and all(_is_still(line) and _pending(line) for line in latest):
            facts["progress"] = "frozen"
    return facts


def _is_still(line: re.Match[str]) -> bool:
    return float(line["prompt"]) == 0 and float(line["generation"]) == 0


def _pending(line: re.Match[str]) -> bool:
    return any(int(line[name] or 0) for name in ("running", "waiting", "deferred"))


def figures(before: Metrics | None, after: Metrics | None, seconds: float) -> dict[str, str]:
    """Facts from metrics, as far as they are the same before and after."""
    if before is None or after is None:
        return {}
    found = {}
    for name, was, now in (
        ("running", before.running, after.running),
        ("waiting", before.waiting, after.waiting),
        ("deferred", before.deferred, after.deferred),
    ):
        if now is not None and was == now:
            found[name] = f"{now:g}"
    if after.kv_cache_usage is not None:
        found["kv_usage"] = f"{100 * after.kv_cache_usage:g}"
    if before.tokens is not None and after.tokens is not None:
        if after.tokens != before.tokens:
            found["progress"] = "moving"
        elif seconds >= FROZEN_S and (after.running or after.waiting):
            found["progress"] = "frozen"
    return found


def agrees(have: str, wanted: str) -> bool:
    """Whether a fact is as wanted: ``>0``, ``=0``, ``<1``, or a word."""
    if wanted[0] not in "><=":
        return have == wanted
    try:
        value, limit = float(have), float(wanted[1:])
    except ValueError:
        return False
    return {">": value > limit, "<": value < limit, "=": value == limit}[wanted[0]]


class Scene:
    """Stacks, and which functions each thread is in: most have none of a pattern's.

    Args:
        pasted: the stacks.
    """

    def __init__(self, pasted: Pasted) -> None:
        self.pasted = pasted
        threads = (t for s in pasted.samples for p in s.processes for t in p.threads)
        self.functions = {id(thread): frozenset(_functions(thread)) for thread in threads}


def _functions(thread: Thread) -> Iterator[str]:
    yield "*"
    for frame in _frames(thread):
        yield bare(frame.function).rpartition(".")[2]


def _frames(thread: Thread) -> tuple[Frame, ...]:
    """Its frames; Python names a thread after the outermost one: Thread-1 (work)."""
    if "(" not in thread.name:
        return thread.frames
    return (*thread.frames, Frame(thread.name.rpartition("(")[2].rstrip(")"), "", ""))


def _hit(signature: Signature, scene: Scene, facts: Mapping[str, str], log: str) -> Hit | None:
    held = (_holds(signature, case, scene, facts, log) for case in signature.cases)
    hits = [hit for hit in held if hit]
    return max(hits, key=lambda hit: RANKS.index(hit.confidence), default=None)


def _holds(
    signature: Signature, case: Case, scene: Scene, facts: Mapping[str, str], text: str
) -> Hit | None:
    pasted = scene.pasted
    if any(name not in facts for name in case.needs):
        return None
    told = [(name, wanted) for name, wanted in case.facts.items() if name in facts]
    if not all(agrees(facts[name], wanted) for name, wanted in told):
        return None
    # A process that was dumped once among others that were dumped thrice counts where it is.
    roles = [each.roles for each in case.threads if each.who == "some"]
    samples = [
        sample
        for sample in pasted.samples
        if all(any(_fits(process, each) for process in sample.processes) for each in roles)
    ]
    # Somebody holds the GIL in nearly every dump of a process that works.
    if not samples or (len(samples) < case.samples and any(each.gil for each in case.threads)):
        return None
    if any(p.role in case.lacks and not _is_gone(p) for p in pasted.samples[-1].processes):
        return None
    spots = _everywhere(case, samples, scene)
    if spots is None:
        return None
    lines = [_evidence(spot) for spot in spots]
    lines += list(_absences(case, samples[-1]))
    if len(samples) > 1:
        lines.append(f"the same in {len(samples)} of {len(pasted.samples)} samples")
    log = [words for words in signature.logs if re.search(words.replace(" ", ""), text)]
    lines += [f"log: {_logged_line(words, pasted.text)}" for words in log]
    lines += [f"{name} is {facts[name]}" for name, _ in told]
    # Of the figures only these look different where the server works.
    corroborated = bool(log) or any(name in {"progress", "still"} for name, _ in told)
    confidence, short_of = _confidence(case, pasted, len(samples), spots, corroborated)
    subject = ", ".join(dict.fromkeys(_label(spot.process) for spot in spots))
    return Hit(signature, confidence, tuple(lines), subject, short_of)


def _confidence(
    case: Case, pasted: Pasted, samples: int, spots: Sequence[Spot], corroborated: bool
) -> tuple[Confidence, tuple[str, ...]]:
    """How sure, and what it is short of."""
    short_of: list[str] = []
    if samples < case.samples and not corroborated:
        dumps = "one dump" if samples == 1 else f"{samples} dumps"
        short_of.append(
            f"{dumps} can't tell this from work: take {max(3, case.samples)} some seconds apart "
            "into one file"
        )
    if case.corroborate and not corroborated:
        short_of.append("stacks alone can't tell this from work: a figure or a log line must agree")
    if case.complete and not (pasted.complete or corroborated):
        short_of.append("this may not be all of the server's processes")
    if any(spot.process.role == "other" for spot in spots):
        short_of.append("it does not tell which process it is of")
    if any(f.who != "some" for f in case.threads) and _is_part(pasted):
        short_of.append("not all threads seem to be here")
    rank = RANKS.index(case.confidence)
    if short_of:
        rank = 0
    elif corroborated or (case.samples == 1 and samples >= 3):
        rank = min(rank + 1, len(RANKS) - 1)
    return RANKS[rank], tuple(short_of)


def _is_part(pasted: Pasted) -> bool:
    """Whether a dump looks as if somebody had cut it: a process with one nameless thread."""
    return all(
        len(process.threads) < 2 and all(not t.frames or t.tid is None for t in process.threads)
        for process in pasted.samples[-1].processes
    )


def _everywhere(case: Case, samples: Sequence[StacksSnapshot], scene: Scene) -> list[Spot] | None:
    """The threads that fit in all samples, as they were in the last; None where the case fails."""
    kept: list[Spot] = []
    for pattern in case.threads:
        found = [list(_spots(pattern, sample, scene)) for sample in samples]
        if pattern.who == "none":
            if any(found):
                return None
            continue
        if pattern.who == "every":
            for sample, spots in zip(samples, found, strict=True):
                having = {id(spot.process) for spot in spots}
                if any(
                    process.role in pattern.roles and process.threads and id(process) not in having
                    for process in sample.processes
                ):
                    return None
            kept += found[-1]
            continue
        lasting = [spot for spot in found[-1] if all(_again(pattern, spot, s) for s in found[:-1])]
        if not lasting:
            return None
        kept += lasting
    return kept


def _again(pattern: ThreadPattern, spot: Spot, earlier: Sequence[Spot]) -> bool:
    return any(
        each.key == spot.key
        and (not pattern.frozen or _places(each.thread) == _places(spot.thread))
        for each in earlier
    )


def _places(thread: Thread) -> list[tuple[str, int | None]]:
    return [(frame.function, frame.line) for frame in thread.frames]


def _spots(pattern: ThreadPattern, sample: StacksSnapshot, scene: Scene) -> Iterator[Spot]:
    wanted = functions(pattern.frames)
    for process in sample.processes:
        if not _fits(process, pattern.roles):
            continue
        for thread in process.threads:
            if pattern.state and thread.state != pattern.state:
                continue
            if pattern.gil and not thread.owns_gil:
                continue
            if any(each.isdisjoint(scene.functions[id(thread)]) for each in wanted):
                continue
            if (frames := _matched(pattern, thread)) is not None:
                yield Spot(process, thread, frames)


def _fits(process: ProcessStacks, roles: Sequence[str]) -> bool:
    """Whether a process may have one of some roles; a fragment that tells none may have any."""
    return process.role in roles or (process.role == "other" and not process.title)


def _matched(pattern: ThreadPattern, thread: Thread) -> tuple[Frame, ...] | None:
    """The frames that fit, None where the thread does not."""
    frames = _frames(thread)
    wanted = iter(pattern.frames)
    current = next(wanted)
    found: list[Frame] = []
    for depth, frame in enumerate(frames):
        if not found and pattern.within and depth >= pattern.within:
            return None
        if is_called(frame, current):
            found.append(frame)
            following = next(wanted, None)
            if following is None:
                break
            current = following
    else:
        return None
    if pattern.without:
        joined = "|".join(pattern.without)
        if any(is_called(frame, joined) for frame in frames):
            return None
    return tuple(found)


def _is_gone(process: ProcessStacks) -> bool:
    return process.error is not None and process.error.code in GONE


def _evidence(spot: Spot) -> str:
    shown = list(spot.thread.frames[:SHOWN_FRAMES])
    shown += [frame for frame in spot.frames if frame.file and frame not in shown]
    steps = ARROW.join(_place(frame) for frame in shown)
    return f"{_label(spot.process)}, {spot.thread.name} ({spot.thread.state}): {steps}"


def _place(frame: Frame) -> str:
    file = frame.short_file.replace("\\", "/").rpartition("/")[2]
    where = file + (f":{frame.line}" if frame.line else "")
    return f"{frame.function} ({where})" if where else frame.function


def _absences(case: Case, sample: StacksSnapshot) -> Iterator[str]:
    for pattern in case.threads:
        if pattern.who == "none":
            for process in sample.processes:
                if process.role in pattern.roles:
                    yield (
                        f"{_label(process)}: no {pattern.frames[0].partition('|')[0]} "
                        f"in its {len(process.threads)} threads"
                    )
    for role in case.lacks:
        here = [process for process in sample.processes if process.role != role]
        yield f"no {role} process among: {', '.join(map(_label, here))}"
        for process in sample.processes:
            if process.role == role and process.error:
                yield f"{_label(process)}: {process.error.message}"


def _logged_line(words: str, text: str) -> str:
    """The line of a log that holds some words, or these where it was cut."""
    found = re.search(f"^.*{words}.*$", text, re.MULTILINE)
    return found[0].strip()[:LOG_SHOWN] if found else words


def _label(process: ProcessStacks) -> str:
    name = process.title.removeprefix("VLLM::") or (
        "a process" if process.role == "other" else process.role
    )
    return f"{name} {process.pid}" if process.pid else name


def _finding(hit: Hit) -> StackFinding:
    signature = hit.signature
    possible = hit.confidence == "possible"
    return StackFinding(
        code=signature.code,
        severity=Severity.INFO if possible else signature.severity,
        subject=hit.subject,
        title=signature.title,
        evidence="; ".join(hit.lines),
        next=signature.next,
        reference=signature.references[0] if signature.references else "",
        confidence=hit.confidence,
        lines=hit.lines,
        cause=signature.cause,
        sure="; ".join((*hit.short_of, signature.sure)) if hit.confidence != "sure" else "",
        references=signature.references,
        fixed_in=signature.fixed_in,
        hang=signature.hang,
    )


def _distinct(crashes: Sequence[Crash]) -> list[Crash]:
    """Each crash once: several processes and loggers tell the same one."""
    return list({(each.process, each.error, each.frames[:2]): each for each in crashes}.values())


def _crashed(crash: Crash) -> StackFinding:
    steps = ARROW.join(_place(frame) for frame in crash.frames[:SHOWN_FRAMES])
    where = crash.process or "a process"
    lines = tuple(line for line in (crash.error, steps and f"raised at: {steps}") if line)
    return StackFinding(
        code="stack.crash",
        severity=Severity.ERROR,
        subject=where,
        title=f"a crash, not a hang: {crash.error or 'an exception'}",
        evidence="; ".join(lines),
        next="vllmops logs shows what came before it; vllmops restart",
        confidence="sure" if crash.error else "likely",
        lines=lines,
        sure="" if crash.error else "the last line of the traceback, which tells the exception",
        hang=False,
    )


def _stopped(process: ProcessStacks) -> StackFinding:
    finding = STOPPED.at(_label(process), f"state T; kill -CONT {process.pid} lets it go on")
    return StackFinding(
        **msgspec.structs.asdict(finding),
        confidence="sure",
        lines=(finding.evidence,),
        cause="somebody sent it SIGSTOP, or SIGTSTP by Ctrl-Z",
    )


def _verdict(found: Sequence[StackFinding], facts: Mapping[str, str]) -> str:
    if any(each.hang and each.confidence != "possible" for each in found):
        return "hang"
    if any(each.code == "stack.crash" for each in found):
        return "crash"
    if any(not each.hang for each in found):
        return "idle"
    if facts.get("progress") == "moving":
        return "working"
    return "maybe" if found else "unknown"


def _seen(process: ProcessStacks) -> Seen:
    busy = [thread for thread in process.threads if not _waiting(thread)]
    shown = busy or [thread for thread in process.threads if thread.name == "MainThread"]
    doing = tuple(
        f"{thread.name} ({thread.state}): "
        + ARROW.join(_place(frame) for frame in _telling(thread.frames))
        for thread in shown[:SHOWN_FRAMES]
        if thread.frames
    )
    if process.error:
        doing = (f"not read: {process.error.message}",)
    return Seen(process.role, process.pid, process.title, len(process.threads), doing)


def _waiting(thread: Thread) -> bool:
    """Whether it only waits for something to do."""
    return not thread.frames or (
        thread.state == "idle"
        and thread.frames[0].function.rpartition(".")[2] in WAITING
        and not TELLING.search(thread.frames[0].short_file)
    )


def _telling(frames: Sequence[Frame]) -> Sequence[Frame]:
    inner = frames[:2]
    return [*inner, *[f for f in frames[2:] if TELLING.search(f.short_file)][: SHOWN_FRAMES - 2]]


def _notes(pasted: Pasted, *, idle: bool) -> Iterator[str]:
    if len(pasted.samples) == 1 and not idle:
        yield (
            "one dump: it can't tell a loop that goes nowhere from work; three of them, some "
            "seconds apart and in one file, can"
        )
    moved = list(dict.fromkeys(_moved(pasted.samples)))
    if moved:
        yield f"at other places from one sample to the next: {', '.join(moved)}"
    for process in pasted.samples[-1].processes if pasted.samples else ():
        if process.error:
            yield f"{_label(process)} was not read: {process.error.message}"
    yield from dict.fromkeys(p.note for s in pasted.samples for p in s.processes if p.note)


def _moved(samples: Sequence[StacksSnapshot]) -> Iterator[str]:
    """The processes whose threads did something else in another sample."""
    before: dict[tuple[object, ...], list[tuple[str, int | None]]] = {}
    for sample in samples:
        for process in sample.processes:
            for thread in process.threads:
                key = Spot(process, thread, ()).key
                places = _places(thread)
                if before.setdefault(key, places) != places:
                    yield _label(process)
