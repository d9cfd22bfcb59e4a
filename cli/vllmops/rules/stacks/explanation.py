"""What processes are stuck in; pure, from stacks and the catalogue of signatures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...model.findings import Finding, Rule, Severity
from ...model.pasted_stacks import CrashTraceback, PastedStacks
from ...model.ranks import Placement
from ...model.stacks import Frame, ProcessStacks, StacksSnapshot, ThreadStack
from ...support.lazy_patterns import compile_lazily
from .hypotheses import TIMED_OUT_LINE, find_hypotheses, get_signature
from .progress_facts import parse_log_facts, parse_metrics_facts
from .signature_matching import (
    ARROW,
    RANKS,
    SHOWN_FRAMES,
    DiagnosisInput,
    SignatureMatch,
    ThreadMatch,
    format_frame,
    format_process_name,
    is_core_dump,
    list_frame_lines,
    match_signature,
)
from .signatures import Confidence, load_signatures
from .thread_phases import OTHERS
from .tool_reports import has_compiler_process, parse_gpu_state
from .wait_chains import find_hang_id

# Files that show what a thread does, for stacks that match no signature.
LIBRARIES = compile_lazily(r"vllm|triton|torch|xgrammar|llguidance|lmcache|nixl|flashinfer|ray")
COMPILE = "jit-or-lock"
CONNECTOR = "kv-connector-wait"
MOST_SHOWN = 3  # hypotheses: more help nobody
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

STOPPED = Rule(
    "process.stopped",
    Severity.ERROR,
    "a signal stopped a process",
    "kill -CONT PID resumes it",
)


class StackFinding(Finding, frozen=True, kw_only=True):
    """A finding from stacks.

    Args:
        confidence: ``possible``, ``likely`` or ``sure``.
        lines: the evidence, line by line.
        cause: why it happens.
        confirmation: what would make it sure; empty if it is sure.
        references: public reports and pull requests.
        fixed_in: version of vLLM; empty if none is known.
        hang: whether something is stuck.
        victims: the processes that wait for the subject, and are not the cause.
        phase: what the thread at the root was doing; empty if no frame tells.
        waits_for: what it waits for.
        work: what the same stacks mean if nothing is stuck.
    """

    confidence: Confidence
    lines: tuple[str, ...]
    victims: tuple[str, ...] = ()
    phase: str = ""
    waits_for: str = ""
    work: str = ""
    cause: str = ""
    confirmation: str = msgspec.field(default="", name="sure")
    references: tuple[str, ...] = ()
    fixed_in: str = ""
    hang: bool = True


class ProcessSummary(Placement, frozen=True, kw_only=True):
    """One process in short: shown if no signature matches.

    Args:
        role, pid, title: of the process.
        threads: how many.
        doing: where its busy threads are, or why it was not read.
    """

    role: str
    pid: int
    title: str
    threads: int
    doing: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True):
    """What stacks show.

    Args:
        verdict: ``hang``, ``crash``, ``idle``, ``working`` (tokens are produced), ``maybe`` (a
            signature matches that work matches, too) or ``unknown``.
        findings: worst first.
        seen: every process of the last sample.
        samples: how many.
        facts: what was known besides the stacks.
        notes: what limits the certainty.
    """

    verdict: str
    findings: tuple[StackFinding, ...]
    seen: tuple[ProcessSummary, ...]
    samples: int
    facts: dict[str, str]
    notes: tuple[str, ...]


def explain_stacks(
    pasted_stacks: PastedStacks, facts: Mapping[str, str] | None = None
) -> Explanation:
    """Say what is stuck.

    Args:
        pasted_stacks: stacks, from a text or from a live server.
        facts: what else is known, by the names in `progress_facts.FACTS`; they count more
            than those from a log in the text.
    """
    if pasted_stacks.sections:
        return _merge_explanations(
            [explain_stacks(section, facts) for section in pasted_stacks.sections]
        )
    log = "".join(pasted_stacks.text.split())
    seen = {"gpu": state} if (state := parse_gpu_state(pasted_stacks.text)) else {}
    told = parse_metrics_facts(pasted_stacks.text) | parse_log_facts(log)
    scene = DiagnosisInput(pasted_stacks, {**seen, **told, **(facts or {})}, log)
    last = pasted_stacks.samples[-1].processes if pasted_stacks.samples else ()
    stopped = [process for process in last if process.stopped]
    # If a process is stopped by a signal, all others wait for it.
    matches = [
        hit
        for signature in load_signatures()
        if (hit := match_signature(signature, scene))
        # A compiler that runs is work.
        and not (signature.id == COMPILE and has_compiler_process(pasted_stacks.text))
    ]
    hits = [] if stopped else _select_best_matches(matches, find_hypotheses(scene))
    crashes = _deduplicate_crashes(pasted_stacks.crashes)
    ended = [*_match_tracebacks(crashes, pasted_stacks.text)]
    codes = {hit.signature.id for hit in ended}
    hits = ended + [hit for hit in hits if hit.signature.id not in codes]
    others = [crash for crash in crashes if not find_hang_id(crash)]
    if ended:  # it ends the other processes, too
        others = [crash for crash in others if not AFTERMATH.search(crash.error)]
    elif (
        hits
        and any(AFTERMATH.search(crash.error) for crash in others)
        and _has_reported_hang(scene)
    ):
        # What ended the wait is cut off: the traceback shows where it was, and no crash.
        others = [crash for crash in others if not AFTERMATH.search(crash.error)]
    findings = [*map(_make_crash_finding, others), *map(_make_stopped_finding, stopped)]
    findings += map(_make_finding, hits)
    findings.sort(key=lambda finding: (-finding.severity.rank, -RANKS.index(finding.confidence)))
    verdict = _classify_findings(findings, scene.facts)
    return Explanation(
        verdict=verdict,
        findings=tuple(findings),
        seen=tuple(map(_make_process_summary, last)),
        samples=len(pasted_stacks.samples),
        facts=dict(scene.facts),
        notes=tuple(_make_notes(pasted_stacks, idle=verdict == "idle")),
    )


def _merge_explanations(parts: Sequence[Explanation]) -> Explanation:
    """One explanation from those of what several persons wrote: the most certain findings first."""
    by_code: dict[str, StackFinding] = {}
    for finding in (finding for part in parts for finding in part.findings):
        known = by_code.get(finding.code)
        if not known or RANKS.index(known.confidence) < RANKS.index(finding.confidence):
            by_code[finding.code] = finding
    ordered = sorted(
        by_code.values(),
        key=lambda finding: (-finding.severity.rank, -RANKS.index(finding.confidence)),
    )
    verdicts = [part.verdict for part in parts]
    return Explanation(
        verdict=next((word for word in VERDICTS if word in verdicts), "unknown"),
        findings=tuple(ordered[:MOST_SHOWN]),
        seen=tuple(seen for part in parts for seen in part.seen),
        samples=max(part.samples for part in parts),
        facts={name: value for part in parts for name, value in part.facts.items()},
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


# The worst first.
VERDICTS = ("hang", "crash", "maybe", "working", "idle", "unknown")


def _select_best_matches(
    matches: Sequence[SignatureMatch], general_matches: Sequence[SignatureMatch]
) -> list[SignatureMatch]:
    """The hits to show: a hang comes before an idle server, and both before what is possible.

    Args:
        matches: signatures that match.
        general_matches: what the phases and waits of the threads say, the most probable first. A
            signature that says the same adds its evidence.
    """
    by_id = {hit.signature.id: hit for hit in matches}
    joined = [_merge_matches(hit, by_id.get(hit.signature.id)) for hit in general_matches]
    best = {hit.signature.id: hit for hit in joined}
    matches = [
        best.get(hit.signature.id) or _remove_waiting_processes(hit, general_matches[:1])
        for hit in matches
    ]
    strong = [hit for hit in matches if hit.confidence != "possible"]
    # What the process at the root waits for tells more than that somebody waits for it.
    named = {hit.signature.id for hit in strong}
    strong += [
        hit
        for hit in joined
        if hit.confidence != "possible"
        and hit.signature.id not in named
        and hit.waits_for not in OTHERS.values()
        and not named.isdisjoint(hit.signature.hides)
    ]
    hangs = [hit for hit in strong if hit.signature.hang]
    hidden = {name for hit in hangs or strong or matches for name in hit.signature.hides}
    if not strong:
        hidden -= best.keys()
    elif not hangs:
        # A main thread at rest is no proof while another one of the process waits for something.
        # But a connector's threads live as long as the process, so a lost transfer looks idle.
        lost = [hit for hit in joined if hit.signature.id == CONNECTOR]
        strong = strong + lost if len(lost) == len(joined) else joined
    shown = hangs or strong or [*joined, *(hit for hit in matches if hit.signature.id not in best)]
    return [hit for hit in shown if hit.signature.id not in hidden][:MOST_SHOWN]


def _remove_waiting_processes(
    match: SignatureMatch, general_matches: Sequence[SignatureMatch]
) -> SignatureMatch:
    """A signature's hit without the processes that only wait, as far as the waits tell."""
    names = set(match.subject.split(", "))
    for hit in general_matches:
        if names > set(hit.subject.split(", ")) or names <= set(hit.victims):
            return _copy_root_details(match, hit)
    return match


def _merge_matches(general_match: SignatureMatch, match: SignatureMatch | None) -> SignatureMatch:
    """One hit from a general answer and the signature that says the same."""
    if match is None or RANKS.index(match.confidence) < RANKS.index(general_match.confidence):
        return general_match
    return _copy_root_details(match, general_match)


def _copy_root_details(match: SignatureMatch, general_match: SignatureMatch) -> SignatureMatch:
    """A signature's hit with the root, victims and phase of a general answer."""
    return dataclasses.replace(
        match,
        subject=general_match.subject,
        victims=general_match.victims,
        phase=general_match.phase,
        waits_for=general_match.waits_for,
    )


def _make_finding(hit: SignatureMatch) -> StackFinding:
    signature = hit.signature
    possible = hit.confidence == "possible"
    return StackFinding(
        code=signature.code,
        severity=Severity.INFO if possible else signature.severity,
        subject=hit.subject,
        title=signature.title,
        evidence="; ".join(hit.lines),
        next_step=signature.next_step,
        page=signature.code,
        reference=signature.references[0] if signature.references else "",
        confidence=hit.confidence,
        lines=hit.lines,
        victims=hit.victims,
        phase=hit.phase,
        waits_for=hit.waits_for,
        work=signature.work if hit.confidence != "sure" else "",
        cause=signature.cause,
        confirmation="; ".join((*hit.uncertainties, signature.confirmation))
        if hit.confidence != "sure"
        else "",
        references=signature.references,
        fixed_in=signature.fixed_in,
        hang=signature.hang,
    )


def _has_reported_hang(diagnosis_input: DiagnosisInput) -> bool:
    """Whether a text says that something was stuck or timed out."""
    from . import prose  # noqa: PLC0415 - slow to import, and not needed for most stacks

    told = prose.is_hang_report(prose.select_statements(diagnosis_input.pasted_stacks.text))
    return told or TIMED_OUT_LINE.search(diagnosis_input.log) is not None


def _deduplicate_crashes(crashes: Sequence[CrashTraceback]) -> list[CrashTraceback]:
    """Every crash once: several processes and loggers report the same one."""
    once = {(crash.process, crash.error, crash.frames[:2]): crash for crash in crashes}
    return list(once.values())


def _match_tracebacks(crashes: Sequence[CrashTraceback], text: str) -> Iterator[SignatureMatch]:
    """The hangs of which tracebacks are what is left, each once."""
    crashed: dict[str, CrashTraceback] = {}
    for crash in crashes:
        if name := find_hang_id(crash):
            crashed.setdefault(name, crash)
    if crashes and not crashed and (line := INPUT_THREAD.search(text)):
        crashed["input-thread-dead"] = CrashTraceback("", line[0], ())
    # Who waits for a process that crashed times out.
    real = any(not find_hang_id(crash) and not AFTERMATH.search(crash.error) for crash in crashes)
    for name, crash in crashed.items():
        if real and name != "input-thread-dead":
            continue
        cut = () if crash.error else (CUT,)
        confidence: Confidence = "possible" if cut else "likely"
        subject = crash.process or "EngineCore"
        yield SignatureMatch(
            get_signature(name), confidence, _format_traceback(crash), subject, uncertainties=cut
        )


CUT = "the last line of the traceback, which names the exception"
# Exceptions that another process's end or a shutdown causes; empty: the last line is missing.
AFTERMATH = compile_lazily(
    r"^$|EngineDead|[Cc]ancelled|EngineCore (?:encountered|failed|died)|Engine (?:core|process)"
    r"|Fatal Python error: (?:Aborted|Terminated|Quit)"  # somebody sent a signal
    r"|SystemExit|ConnectionReset|BrokenPipe|HTTPException|EOFError|KeyboardInterrupt|TimeoutError"
)
# The traceback of the input thread, in pieces that make no frame.
INPUT_THREAD = compile_lazily(
    r"Exception in thread [^\n]{0,40}process_input_sockets\)?|in process_input_sockets\b"
)


def _make_crash_finding(crash: CrashTraceback) -> StackFinding:
    lines = _format_traceback(crash)
    return StackFinding(
        code="stack.crash",
        severity=Severity.ERROR,
        subject=crash.process or "a process",
        title=f"a crash, not a hang: {crash.error or 'an exception'}",
        evidence="; ".join(lines),
        next_step="vllmops logs shows what happened before; then vllmops restart",
        page="stack.crash",
        confidence="sure" if crash.error else "likely",
        lines=lines,
        confirmation="" if crash.error else CUT,
        hang=False,
    )


def _format_traceback(crash: CrashTraceback) -> tuple[str, ...]:
    """A traceback as evidence: the exception, and where it was raised."""
    steps = ARROW.join(format_frame(frame) for frame in crash.frames[:SHOWN_FRAMES])
    return tuple(line for line in (crash.error, steps and f"raised at: {steps}") if line)


def _make_stopped_finding(process: ProcessStacks) -> StackFinding:
    finding = STOPPED.make_finding(
        format_process_name(process), "state T", f"kill -CONT {process.pid} resumes it"
    )
    return StackFinding(
        **msgspec.structs.asdict(finding),
        confidence="sure",
        lines=(finding.evidence,),
        cause="somebody sent SIGSTOP, or SIGTSTP with Ctrl-Z",
    )


def _classify_findings(findings: Sequence[StackFinding], facts: Mapping[str, str]) -> str:
    if any(finding.hang and finding.confidence != "possible" for finding in findings):
        return "hang"
    if any(finding.code == "stack.crash" for finding in findings):
        return "crash"
    idle = [finding for finding in findings if not finding.hang]
    if idle and (idle[0] is findings[0] or idle[0].confidence != "possible"):
        return "idle"
    if facts.get("progress") == "moving":
        return "working"
    return "maybe" if findings else "unknown"


def _make_process_summary(process: ProcessStacks) -> ProcessSummary:
    busy = [thread for thread in process.threads if not _is_waiting_for_work(thread)]
    shown = busy or [thread for thread in process.threads if thread.name == "MainThread"]
    doing = tuple(
        f"{thread.name} ({thread.state}): "
        + ARROW.join(format_frame(frame) for frame in _select_significant_frames(thread.frames))
        for thread in shown[:SHOWN_FRAMES]
        if thread.frames
    )
    if process.error:
        doing = (f"not read: {process.error.message}",)
    return ProcessSummary(
        role=process.role,
        pid=process.pid,
        title=process.title,
        threads=len(process.threads),
        doing=doing,
        **{name: getattr(process, name) for name in Placement.__struct_fields__},
    )


def _is_waiting_for_work(thread: ThreadStack) -> bool:
    """Whether a thread only waits for work."""
    return not thread.frames or (
        thread.state == "idle"
        and thread.frames[0].function.rpartition(".")[2] in WAITING
        and not LIBRARIES.search(thread.frames[0].short_file)
    )


def _select_significant_frames(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The innermost frames, and those that show what the thread does."""
    inner = frames[:2]
    return [
        *inner,
        *[f for f in frames[2:] if LIBRARIES.search(f.short_file)][: SHOWN_FRAMES - 2],
    ]


def _make_notes(pasted_stacks: PastedStacks, *, idle: bool) -> Iterator[str]:
    if len(pasted_stacks.samples) == 1 and not idle and not is_core_dump(pasted_stacks):
        yield (
            "one dump can't tell an endless loop from work; three dumps, some seconds apart and in "
            "one file, can"
        )
    moved = list(dict.fromkeys(_find_moved_processes(pasted_stacks.samples)))
    if moved:
        yield f"did something else in another sample: {', '.join(moved)}"
    for process in pasted_stacks.samples[-1].processes if pasted_stacks.samples else ():
        if process.error:
            yield f"{format_process_name(process)} was not read: {process.error.message}"
    yield from dict.fromkeys(
        process.note
        for sample in pasted_stacks.samples
        for process in sample.processes
        if process.note
    )


def _find_moved_processes(samples: Sequence[StacksSnapshot]) -> Iterator[str]:
    """The processes with a thread that is elsewhere in another sample."""
    before: dict[tuple[object, ...], list[tuple[str, int | None]]] = {}
    for sample in samples:
        for process in sample.processes:
            for thread in process.threads:
                key = ThreadMatch(process, thread, ()).thread_key
                if before.setdefault(key, list_frame_lines(thread)) != list_frame_lines(thread):
                    yield format_process_name(process)
