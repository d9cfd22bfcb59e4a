"""Which signatures of the catalogue some stacks match, and how certain that is."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...model.pasted_stacks import PastedStacks
from ...model.ranks import choose_process_title
from ...model.stacks import Frame, ProcessStacks, StacksSnapshot, ThreadStack
from .progress_facts import matches_condition
from .signatures import (
    Confidence,
    Signature,
    SignatureCase,
    ThreadPattern,
    matches_frame_pattern,
    parse_function_names,
    strip_qualifiers,
)
from .thread_phases import find_thread_position, is_computing_frame

RANKS: tuple[Confidence, ...] = ("possible", "likely", "sure")
SHOWN_FRAMES = 6
ARROW = " < "  # from a frame to its caller
LOG_SHOWN = 200
GONE = {"stacks.gone", "stacks.zombie"}
# The other figures are the same in a server that works.
PROOF = {"progress", "still"}


class DiagnosisInput:
    """All that is known of a server.

    Args:
        pasted_stacks: the stacks.
        facts: figures, by the names in `progress_facts.FACTS`.
        log: the text around the stacks, without blanks.

    Attributes:
        threads: those of each sample, by its ``id``.
    """

    def __init__(self, pasted_stacks: PastedStacks, facts: Mapping[str, str], log: str) -> None:
        self.pasted_stacks = pasted_stacks
        self.facts = facts
        self.log = log
        self.threads = {id(sample): _ThreadIndex(sample) for sample in pasted_stacks.samples}


class _ThreadIndex:
    """The threads of a sample, by their functions: most have none of a pattern's."""

    def __init__(self, sample: StacksSnapshot) -> None:
        self.all_threads = [
            (process, thread) for process in sample.processes for thread in process.threads
        ]
        self.having: defaultdict[str, set[int]] = defaultdict(set)
        for number, (_, thread) in enumerate(self.all_threads):
            for name in _list_function_names(thread):
                self.having[name].add(number)

    def select_threads(
        self, names: Sequence[frozenset[str]]
    ) -> list[tuple[ProcessStacks, ThreadStack]]:
        """The threads that are in a function of each set, in their order."""
        numbers: set[int] | None = None
        for any_of in names:
            calling = set[int]().union(*(self.having.get(name, ()) for name in any_of))
            numbers = calling if numbers is None else numbers & calling
            if not numbers:
                return []
        return [self.all_threads[number] for number in sorted(numbers or ())]


@dataclass(frozen=True)
class ThreadMatch:
    """A thread that matches a pattern, and the frames that do."""

    process: ProcessStacks
    thread: ThreadStack
    frames: tuple[Frame, ...]

    @property
    def thread_key(self) -> tuple[object, ...]:
        """The thread, in any sample; threads of a process without id and name are the same."""
        return (self.process.pid or self.process.title, self.thread.tid or self.thread.name)


@dataclass(frozen=True)
class SignatureMatch:
    """A signature that matches.

    Args:
        signature: of the catalogue.
        confidence: how certain it is.
        lines: the evidence.
        subject: the processes with the threads that match.
        uncertainties: why it is no more than possible.
        victims: the processes that wait for the subject.
        phase: what the thread at the root was doing.
        waits_for: what that thread waits for.
    """

    signature: Signature
    confidence: Confidence
    lines: tuple[str, ...]
    subject: str
    uncertainties: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    phase: str = ""
    waits_for: str = ""


def match_signature(signature: Signature, diagnosis_input: DiagnosisInput) -> SignatureMatch | None:
    """The most certain of a signature's cases that match; None if none does."""
    hits = [
        hit for case in signature.cases if (hit := _match_case(signature, case, diagnosis_input))
    ]
    return max(hits, key=lambda hit: RANKS.index(hit.confidence), default=None)


def _match_case(
    signature: Signature, case: SignatureCase, diagnosis_input: DiagnosisInput
) -> SignatureMatch | None:
    pasted = diagnosis_input.pasted_stacks
    facts = _select_case_facts(case, diagnosis_input.facts)
    samples = _select_usable_samples(case, pasted)
    if facts is None or not samples or _has_extra_process(case, pasted.samples[-1]):
        return None
    spots = _find_persistent_matches(case, samples, diagnosis_input)
    if spots is None:
        return None
    logs = [
        words for words in signature.logs if re.search(words.replace(" ", ""), diagnosis_input.log)
    ]
    corroborated = bool(logs) or not PROOF.isdisjoint(facts)
    doubts = tuple(_list_doubts(case, pasted, len(samples), spots, corroborated=corroborated))
    if signature.hang and not (pasted.complete or corroborated):
        doubts += tuple(_explain_missing_roles(case, samples[-1]))
    lines = [_describe_thread_match(spot) for spot in spots]
    lines += _describe_absences(case, samples[-1])
    if len(samples) > 1:
        lines.append(f"the same in {len(samples)} of {len(pasted.samples)} samples")
    lines += [f"log: {_find_log_line(words, pasted.text)}" for words in logs]
    lines += [f"{name} is {value}" for name, value in facts.items()]
    return SignatureMatch(
        signature,
        "possible"
        if doubts
        else _classify_confidence(case, len(samples), corroborated=corroborated),
        tuple(lines),
        ", ".join(dict.fromkeys(format_process_name(spot.process) for spot in spots)),
        doubts,
        phase=next((title for spot in spots if (title := _find_phase_title(spot))), ""),
    )


def _find_phase_title(thread_match: ThreadMatch) -> str:
    return find_thread_position(thread_match.process, thread_match.thread).phase.title


def _select_case_facts(case: SignatureCase, facts: Mapping[str, str]) -> dict[str, str] | None:
    """The facts that a case names; None if one contradicts it, or one that it needs is missing."""
    known = {name: facts[name] for name in case.facts if name in facts}
    contradicted = not all(
        matches_condition(value, case.facts[name]) for name, value in known.items()
    )
    return None if contradicted or not facts.keys() >= set(case.needs) else known


def _select_usable_samples(
    case: SignatureCase, pasted_stacks: PastedStacks
) -> list[StacksSnapshot]:
    """The samples that can show a case: those with a process of each role that it needs.

    One process may have been dumped once and the others three times. None are enough where the
    case is about the GIL and needs more: in most dumps of a process at work some thread holds it.
    """
    needed = [pattern.roles for pattern in case.threads if pattern.quantifier == "some"]
    samples = [
        sample
        for sample in pasted_stacks.samples
        if all(
            any(_can_have_role(process, roles) for process in sample.processes) for roles in needed
        )
    ]
    about_gil = any(pattern.gil for pattern in case.threads)
    return [] if about_gil and len(samples) < case.samples else samples


def _has_extra_process(case: SignatureCase, sample: StacksSnapshot) -> bool:
    """Whether a process lives that must be missing."""
    return any(process.role in case.lacks and not _is_gone(process) for process in sample.processes)


def _classify_confidence(case: SignatureCase, samples: int, *, corroborated: bool) -> Confidence:
    """How certain a case without doubts is: one rank up if a fact, a log or more samples agree."""
    more = corroborated or (case.samples == 1 and samples >= 3)
    return RANKS[min(RANKS.index(case.confidence) + more, len(RANKS) - 1)]


def _list_doubts(
    case: SignatureCase,
    pasted_stacks: PastedStacks,
    samples: int,
    thread_matches: Sequence[ThreadMatch],
    *,
    corroborated: bool,
) -> Iterator[str]:
    """Why a case is no more than possible."""
    if samples < case.samples and not corroborated:
        yield explain_too_few_samples(pasted_stacks, samples, max(3, case.samples))
    frozen = any(pattern.frozen for pattern in case.threads)
    if (
        frozen
        and samples > 1
        and not corroborated
        and not all(has_line_numbers(spot.thread) for spot in thread_matches)
    ):
        yield "the dumps have no line numbers, so they can't tell whether the thread moves"
    if case.needs_corroboration and not corroborated:
        yield "stacks alone can't tell this from work: a figure or a log line must agree"
    if case.complete and not (pasted_stacks.complete or corroborated):
        yield "some of the server's processes may be missing here"
    if any(spot.process.role == "other" for spot in thread_matches):
        yield "the dump does not show which process it is of"
    if any(pattern.quantifier != "some" for pattern in case.threads) and _is_truncated_dump(
        pasted_stacks
    ):
        yield "some threads seem to be missing here"


def explain_too_few_samples(
    pasted_stacks: PastedStacks, sample_count: int, needed_count: int
) -> str:
    """That so few samples can't tell a hang from work, and what would."""
    if is_core_dump(pasted_stacks):
        return "a core file shows one moment: only figures or the log can tell this from work"
    dumps = "one dump" if sample_count == 1 else f"{sample_count} dumps"
    return (
        f"{dumps} can't tell this from work: take {needed_count} some seconds apart into one file"
    )


def is_core_dump(pasted_stacks: PastedStacks) -> bool:
    """Whether stacks are of a process that has ended: there will be no others."""
    return any(p.source == "pystack" for sample in pasted_stacks.samples for p in sample.processes)


def _explain_missing_roles(case: SignatureCase, sample: StacksSnapshot) -> Iterator[str]:
    """The roles of which every process must match, and none is there."""
    present = {process.role for process in sample.processes}
    for pattern in case.threads:
        if pattern.quantifier == "every" and present.isdisjoint(pattern.roles):
            yield f"no {' or '.join(pattern.roles)} is here, so what it does is not known"


def _is_truncated_dump(pasted_stacks: PastedStacks) -> bool:
    """Whether a dump seems to be cut: each process has at most one thread, no ids."""
    return all(
        len(process.threads) < 2
        and all(not thread.frames or thread.tid is None for thread in process.threads)
        for process in pasted_stacks.samples[-1].processes
    )


def _find_persistent_matches(
    case: SignatureCase, samples: Sequence[StacksSnapshot], diagnosis_input: DiagnosisInput
) -> list[ThreadMatch] | None:
    """The threads that match in all samples, as in the last one; None if a pattern fails."""
    kept: list[ThreadMatch] = []
    for pattern in case.threads:
        by_sample: list[list[ThreadMatch]] = []
        for sample in samples:
            by_sample.append(list(_match_threads(pattern, sample, diagnosis_input)))
            if pattern.quantifier == "some" and not by_sample[-1]:
                return None
        match pattern.quantifier:
            case "none":
                if any(by_sample):
                    return None
            case "every":
                if not all(
                    _is_in_every_process(pattern, sample, spots)
                    for sample, spots in zip(samples, by_sample, strict=True)
                ):
                    return None
                kept += by_sample[-1]
            case "some":
                *earlier, last = by_sample
                lasting = [
                    spot
                    for spot in last
                    if all(_has_earlier_match(pattern, spot, spots) for spots in earlier)
                ]
                if not lasting:
                    return None
                kept += lasting
    return kept


def _is_in_every_process(
    pattern: ThreadPattern, sample: StacksSnapshot, thread_matches: Sequence[ThreadMatch]
) -> bool:
    """Whether every process of the pattern's roles that was read has a thread that matches."""
    matching = {id(spot.process) for spot in thread_matches}
    return all(
        id(process) in matching
        for process in sample.processes
        if process.role in pattern.roles and process.threads
    )


def _has_earlier_match(
    pattern: ThreadPattern, thread_match: ThreadMatch, earlier_matches: Sequence[ThreadMatch]
) -> bool:
    """Whether an earlier sample has the same thread; of a frozen one, at the same places."""
    return any(
        before.thread_key == thread_match.thread_key
        and (
            not pattern.frozen
            or list_frame_lines(before.thread) == list_frame_lines(thread_match.thread)
        )
        for before in earlier_matches
    )


def has_line_numbers(thread: ThreadStack) -> bool:
    """Whether a thread's Python frames have line numbers; without them it may have moved."""
    python = [frame for frame in thread.frames if frame.short_file.endswith(".py")]
    return not python or python[0].line is not None


def list_frame_lines(thread: ThreadStack) -> list[tuple[str, int | None]]:
    """Where a thread is: function and line of each frame."""
    return [(frame.function, frame.line) for frame in thread.frames]


def _match_threads(
    pattern: ThreadPattern, sample: StacksSnapshot, diagnosis_input: DiagnosisInput
) -> Iterator[ThreadMatch]:
    """The threads of a sample that match a pattern."""
    for process, thread in diagnosis_input.threads[id(sample)].select_threads(
        parse_function_names(pattern.frames)
    ):
        if not _can_have_role(process, pattern.roles):
            continue
        if pattern.state and thread.state != pattern.state:
            continue
        if pattern.gil and (not thread.owns_gil or any(map(is_computing_frame, thread.frames[:1]))):
            continue
        if (frames := _match_frames(pattern, thread)) is not None:
            yield ThreadMatch(process, thread, frames)


def _can_have_role(process: ProcessStacks, roles: Sequence[str]) -> bool:
    """Whether a process may have one of some roles; a dump without a title may be of any."""
    return process.role in roles or (process.role == "other" and not process.title)


def _match_frames(pattern: ThreadPattern, thread: ThreadStack) -> tuple[Frame, ...] | None:
    """The frames that a pattern names, innermost first; None if the thread does not match."""
    frames = _list_frames(thread)
    patterns = iter(pattern.frames)
    current = next(patterns)
    matching: list[Frame] = []
    for depth, frame in enumerate(frames):
        if not matching and pattern.max_depth and depth >= pattern.max_depth:
            return None
        if matches_frame_pattern(frame, current):
            matching.append(frame)
            following = next(patterns, None)
            if following is None:
                break
            current = following
    else:
        return None
    if pattern.excluded_frames:
        excluded = "|".join(pattern.excluded_frames)
        if any(matches_frame_pattern(frame, excluded) for frame in frames):
            return None
    return tuple(matching)


def _list_function_names(thread: ThreadStack) -> Iterator[str]:
    """The bare names of a thread's functions, and ``*``, which matches any."""
    yield "*"
    for frame in _list_frames(thread):
        yield strip_qualifiers(frame.function)


def _list_frames(thread: ThreadStack) -> tuple[Frame, ...]:
    """A thread's frames; Python names a thread after the outermost one: Thread-1 (work)."""
    if "(" not in thread.name:
        return thread.frames
    return (*thread.frames, Frame(thread.name.rpartition("(")[2].rstrip(")"), "", ""))


def _is_gone(process: ProcessStacks) -> bool:
    return process.error is not None and process.error.code in GONE


def _describe_thread_match(thread_match: ThreadMatch) -> str:
    shown = list(thread_match.thread.frames[:SHOWN_FRAMES])
    shown += [frame for frame in thread_match.frames if frame.file and frame not in shown]
    return describe_thread(thread_match.process, thread_match.thread, shown)


def describe_thread(process: ProcessStacks, thread: ThreadStack, frames: Sequence[Frame]) -> str:
    """Where a thread is, for a person."""
    return (
        f"{format_process_name(process)}, {thread.name} ({thread.state}): "
        f"{ARROW.join(map(format_frame, frames))}"
    )


def _describe_absences(case: SignatureCase, sample: StacksSnapshot) -> Iterator[str]:
    """What a case demands to be missing, and is."""
    for pattern in case.threads:
        if pattern.quantifier == "none":
            for process in sample.processes:
                if process.role in pattern.roles:
                    yield (
                        f"{format_process_name(process)}: no {pattern.frames[0].partition('|')[0]} "
                        f"in its {len(process.threads)} threads"
                    )
    for role in case.lacks:
        others = [process for process in sample.processes if process.role != role]
        yield f"no {role} process among: {', '.join(map(format_process_name, others))}"
        for process in sample.processes:
            if process.role == role and process.error:
                yield f"{format_process_name(process)}: {process.error.message}"


def _find_log_line(pattern: str, text: str) -> str:
    """The log line that holds some words; the words alone if the line was cut."""
    match = re.search(f"^.*{pattern}.*$", text, re.MULTILINE)
    return match[0].strip()[:LOG_SHOWN] if match else pattern


def format_frame(frame: Frame) -> str:
    """A frame for a person: function, file and line."""
    file = frame.short_file.replace("\\", "/").rpartition("/")[2]
    where = file + (f":{frame.line}" if frame.line else "")
    return f"{frame.function} ({where})" if where else frame.function


def format_process_name(process: ProcessStacks) -> str:
    """How findings name a process."""
    role = "a process" if process.role == "other" else process.role
    name = choose_process_title(process.title, role, process)
    return f"{name} {process.pid}" if process.pid else name
