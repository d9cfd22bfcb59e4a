"""The general answer: what may be stuck, from where threads are and who waits for whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ...model.stacks import ProcessStacks, StacksSnapshot, ThreadStack
from ...support.lazy_patterns import compile_lazily
from .signature_matching import (
    PROOF,
    RANKS,
    SHOWN_FRAMES,
    DiagnosisInput,
    SignatureMatch,
    ThreadMatch,
    describe_thread,
    explain_too_few_samples,
    format_process_name,
    has_line_numbers,
    list_frame_lines,
)
from .signatures import Confidence, Signature, load_signatures
from .thread_phases import NOWHERE, ThreadPosition
from .tool_reports import (
    TIMED_OUT,
    TextEvidence,
    find_ras_evidence,
    find_text_evidence,
    find_weak_evidence,
    has_compiler_process,
)
from .wait_chains import (
    COLLECTIVES,
    WaitChain,
    find_decisive_position,
    find_gil_holders,
    find_wait_chain,
)

# Work moves on from these within seconds; on the device and in a collective it looks the same.
HOST_BOUND = {
    "build-lock",
    "module-load",
    "transfer",
    "tool-parser",
    "grammar",
    "structure",
}
# What the ranks do together takes both places to see.
TOGETHER = {"differ", "differ-dp", "elsewhere", "absent", "absent-dp", "not-entered"}
# Samples that agree are enough without a figure or a log line.
ENOUGH = 3
TIMED_OUT_LINE = compile_lazily("|".join(TIMED_OUT))


def find_hypotheses(diagnosis_input: DiagnosisInput) -> list[SignatureMatch]:
    """What may be stuck, the most probable first; nothing where tokens are produced."""
    if diagnosis_input.facts.get("progress") == "moving":
        return []
    hits = [
        hit
        for clue in find_text_evidence(diagnosis_input.pasted_stacks.text, diagnosis_input.log)
        for hit in _make_evidence_matches(clue)
    ]
    samples = diagnosis_input.pasted_stacks.samples
    for sample in reversed(samples):
        if chain_ := find_wait_chain(sample, diagnosis_input.facts):
            if chain_.roots[0].wait == "compile" and has_compiler_process(
                diagnosis_input.pasted_stacks.text
            ):
                continue
            hits += _make_chain_matches(chain_, samples, diagnosis_input)
            break
    if not hits:
        # A traceback that breaks off tells less than the words around it.
        served = any(_is_server_process(p) for sample in samples for p in sample.processes)
        stacks = served or any(crash.error for crash in diagnosis_input.pasted_stacks.crashes)
        weaker = find_weak_evidence(
            diagnosis_input.pasted_stacks.text, diagnosis_input.facts, stacks=stacks
        )
        hits += [hit for clue in weaker for hit in _make_evidence_matches(clue)]
    if diagnosis_input.facts.get("progress") == "frozen":
        hits += [
            hit
            for clue in find_ras_evidence(diagnosis_input.pasted_stacks.ras)
            for hit in _make_evidence_matches(clue)
        ]
    best: dict[str, SignatureMatch] = {}
    for hit in hits:
        name = hit.signature.id
        best[name] = _merge_matches(best[name], hit) if name in best else hit
    return list(best.values())


def _is_server_process(process: ProcessStacks) -> bool:
    """Whether stacks are of a process of vLLM or SGLang, and not of a test or another program."""
    return process.role != "other" or find_decisive_position(process).phase != NOWHERE


def _merge_matches(hit: SignatureMatch, other_hit: SignatureMatch) -> SignatureMatch:
    """One hit with the evidence of two that say the same, and the higher confidence."""
    surer = max(hit, other_hit, key=lambda hit_: RANKS.index(hit_.confidence))
    named = min(hit, other_hit, key=lambda hit_: _compute_vagueness(hit_.subject))
    return dataclasses.replace(
        named,
        confidence=surer.confidence,
        uncertainties=surer.uncertainties,
        lines=tuple(dict.fromkeys((*hit.lines, *other_hit.lines))),
    )


def _compute_vagueness(subject: str) -> int:
    """How little a subject tells: a process whose stack is there tells more than "the GPU"."""
    return 2 if subject == "the server" else 1 if subject.startswith("the ") else 0


def _make_evidence_matches(evidence: TextEvidence) -> Iterator[SignatureMatch]:
    """What a log line or a figure says of itself."""
    for index, name in enumerate(evidence.ids):
        yield SignatureMatch(
            get_signature(name),
            "possible" if index else evidence.confidence,
            (evidence.line,),
            evidence.subject,
            victims=evidence.victims,
            phase=evidence.phase,
            waits_for=evidence.waits_for,
            uncertainties=("two captures some seconds apart that do not move make it likely",)
            if evidence.confidence == "possible"
            else (),
        )


def get_signature(name: str) -> Signature:
    """The catalogue's entry."""
    return next(signature for signature in load_signatures() if signature.id == name)


def _make_chain_matches(
    chain_: WaitChain, samples: Sequence[StacksSnapshot], diagnosis_input: DiagnosisInput
) -> Iterator[SignatureMatch]:
    agreeing = _count_agreeing_samples(chain_, samples)
    confidence = _classify_confidence(chain_, agreeing, diagnosis_input)
    lines = [_describe_root(root) for root in chain_.roots[:SHOWN_FRAMES]]
    if chain_.relation in TOGETHER:
        lines += [f"meanwhile {_describe_root(place)}" for place in chain_.victims[:1]]
    root = chain_.roots[0]
    if root.wait == "gil":
        holders = find_gil_holders(root.process, root.thread)
        lines += [
            f"meanwhile {describe_thread(root.process, thread, thread.frames[:SHOWN_FRAMES])}"
            for thread in holders
        ]
    if agreeing > 1:
        lines.append(f"the same in {agreeing} of {len(samples)} samples")
    for index, name in enumerate(chain_.ids):
        yield SignatureMatch(
            get_signature(name),
            "possible" if index else confidence,
            tuple(lines),
            _format_process_names(chain_.roots),
            victims=tuple(
                dict.fromkeys(format_process_name(victim.process) for victim in chain_.victims)
            ),
            uncertainties=tuple(_list_doubts(chain_, agreeing, diagnosis_input))
            if confidence == "possible"
            else (),
            phase=root.phase.title,
            waits_for=root.waits_for,
        )


def _classify_confidence(
    chain_: WaitChain, agreeing: int, diagnosis_input: DiagnosisInput
) -> Confidence:
    """One dump is possible; dumps that agree, a figure or a log line make it likely."""
    alone = not chain_.relation and chain_.roots[0].wait in COLLECTIVES
    # Names without files, as somebody types them, of which no table says what they wait for.
    vague = chain_.roots[0].wait == "call" and not any(
        f.file for f in chain_.roots[0].thread.frames
    )
    if alone or vague or chain_.relation == "connector":
        return "possible"  # whom it waits for is not in the text; a connector's thread may rest
    proof = any(diagnosis_input.facts.get(name) == "frozen" for name in PROOF)
    proof = proof or diagnosis_input.facts.get("gpu") == "spins"
    agrees = proof or TIMED_OUT_LINE.search(diagnosis_input.log) is not None
    host = all(root.wait in HOST_BOUND for root in chain_.roots)
    if agrees and agreeing >= ENOUGH:
        return "sure" if host else "likely"
    if agrees or (host and agreeing >= ENOUGH):
        return "likely"
    return "possible"


def _list_doubts(
    chain_: WaitChain, agreeing: int, diagnosis_input: DiagnosisInput
) -> Iterator[str]:
    if agreeing < ENOUGH:
        yield explain_too_few_samples(diagnosis_input.pasted_stacks, agreeing, ENOUGH)
    if chain_.relation in {"unseen", "remote"}:
        yield "the workers' stacks tell the rest: dump them, too"
    if not chain_.relation and chain_.roots[0].wait in COLLECTIVES:
        yield "the other ranks' stacks tell which of them is missing: dump them, too"


def _count_agreeing_samples(chain_: WaitChain, samples: Sequence[StacksSnapshot]) -> int:
    """In how many samples every thread at the root is at the same places."""
    if not all(has_line_numbers(root.thread) for root in chain_.roots):
        return 1
    roots = {_make_position_key(root.process, root.thread) for root in chain_.roots}
    names = {key for key, _ in roots}
    return sum(
        roots
        <= {
            _make_position_key(process, thread)
            for process in sample.processes
            for thread in process.threads
            if ThreadMatch(process, thread, ()).thread_key in names
        }
        for sample in samples
    )


def _make_position_key(process: ProcessStacks, thread: ThreadStack) -> tuple[object, object]:
    return ThreadMatch(process, thread, ()).thread_key, tuple(list_frame_lines(thread))


def _format_process_names(roots: Sequence[ThreadPosition]) -> str:
    return ", ".join(dict.fromkeys(format_process_name(root.process) for root in roots))


def _describe_root(root: ThreadPosition) -> str:
    frames = list(root.thread.frames[:SHOWN_FRAMES])
    if root.frame and root.frame not in frames:
        frames.append(root.frame)
    return describe_thread(root.process, root.thread, frames)
