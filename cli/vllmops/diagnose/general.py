"""The general answer: what may be stuck, from where threads are and who waits for whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ..patterns import pattern
from ..protocol.stacks import ProcessStacks, StacksSnapshot, Thread
from .clues import TIMED_OUT, Clue, clues, compiles, polled, weak
from .matching import (
    PROOF,
    RANKS,
    SHOWN_FRAMES,
    Hit,
    Scene,
    Spot,
    evidence,
    has_lines,
    label,
    places,
    too_few,
)
from .places import NOWHERE, Position
from .signatures import Confidence, Signature, catalogue
from .waiting import COLLECTIVES, Chain, chain, gil_holders, telling

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
TIMED_OUT_LINE = pattern("|".join(TIMED_OUT))


def hypotheses(scene: Scene) -> list[Hit]:
    """What may be stuck, the most probable first; nothing where tokens are produced."""
    if scene.facts.get("progress") == "moving":
        return []
    hits = [hit for clue in clues(scene.pasted.text, scene.log) for hit in _hits_of(clue)]
    samples = scene.pasted.samples
    for sample in reversed(samples):
        if chain_ := chain(sample, scene.facts):
            if chain_.roots[0].wait == "compile" and compiles(scene.pasted.text):
                continue
            hits += _hits(chain_, samples, scene)
            break
    if not hits:
        # A traceback that breaks off tells less than the words around it.
        served = any(_is_of_server(p) for sample in samples for p in sample.processes)
        stacks = served or any(crash.error for crash in scene.pasted.crashes)
        weaker = weak(scene.pasted.text, scene.facts, stacks=stacks)
        hits += [hit for clue in weaker for hit in _hits_of(clue)]
    if scene.facts.get("progress") == "frozen":
        hits += [hit for clue in polled(scene.pasted.ras) for hit in _hits_of(clue)]
    best: dict[str, Hit] = {}
    for hit in hits:
        name = hit.signature.id
        best[name] = _both(best[name], hit) if name in best else hit
    return list(best.values())


def _is_of_server(process: ProcessStacks) -> bool:
    """Whether stacks are of a process of vLLM or SGLang, and not of a test or another program."""
    return process.role != "other" or telling(process).phase != NOWHERE


def _both(hit: Hit, other: Hit) -> Hit:
    """One hit with the evidence of two that say the same, and the higher confidence."""
    surer = max(hit, other, key=lambda hit_: RANKS.index(hit_.confidence))
    named = min(hit, other, key=lambda hit_: _vague(hit_.subject))
    return dataclasses.replace(
        named,
        confidence=surer.confidence,
        doubts=surer.doubts,
        lines=tuple(dict.fromkeys((*hit.lines, *other.lines))),
    )


def _vague(subject: str) -> int:
    """How little a subject tells: a process whose stack is there tells more than "the GPU"."""
    return 2 if subject == "the server" else 1 if subject.startswith("the ") else 0


def _hits_of(clue: Clue) -> Iterator[Hit]:
    """What a log line or a figure says of itself."""
    for index, name in enumerate(clue.ids):
        yield Hit(
            known(name),
            "possible" if index else clue.confidence,
            (clue.line,),
            clue.subject,
            victims=clue.victims,
            phase=clue.phase,
            waits_for=clue.waits_for,
            doubts=("two captures some seconds apart that do not move make it likely",)
            if clue.confidence == "possible"
            else (),
        )


def known(name: str) -> Signature:
    """The catalogue's entry."""
    return next(signature for signature in catalogue() if signature.id == name)


def _hits(chain_: Chain, samples: Sequence[StacksSnapshot], scene: Scene) -> Iterator[Hit]:
    agreeing = _agreeing(chain_, samples)
    confidence = _confidence(chain_, agreeing, scene)
    lines = [_evidence(root) for root in chain_.roots[:SHOWN_FRAMES]]
    if chain_.relation in TOGETHER:
        lines += [f"meanwhile {_evidence(place)}" for place in chain_.victims[:1]]
    root = chain_.roots[0]
    if root.wait == "gil":
        holders = gil_holders(root.process, root.thread)
        lines += [
            f"meanwhile {evidence(root.process, thread, thread.frames[:SHOWN_FRAMES])}"
            for thread in holders
        ]
    if agreeing > 1:
        lines.append(f"the same in {agreeing} of {len(samples)} samples")
    for index, name in enumerate(chain_.ids):
        yield Hit(
            known(name),
            "possible" if index else confidence,
            tuple(lines),
            _names(chain_.roots),
            victims=tuple(dict.fromkeys(label(victim.process) for victim in chain_.victims)),
            doubts=tuple(_doubts(chain_, agreeing, scene)) if confidence == "possible" else (),
            phase=root.phase.title,
            waits_for=root.waits_for,
        )


def _confidence(chain_: Chain, agreeing: int, scene: Scene) -> Confidence:
    """One dump is possible; dumps that agree, a figure or a log line make it likely."""
    alone = not chain_.relation and chain_.roots[0].wait in COLLECTIVES
    # Names without files, as somebody types them, of which no table says what they wait for.
    vague = chain_.roots[0].wait == "call" and not any(
        f.file for f in chain_.roots[0].thread.frames
    )
    if alone or vague or chain_.relation == "connector":
        return "possible"  # whom it waits for is not in the text; a connector's thread may rest
    proof = any(scene.facts.get(name) == "frozen" for name in PROOF)
    proof = proof or scene.facts.get("gpu") == "spins"
    agrees = proof or TIMED_OUT_LINE.search(scene.log) is not None
    host = all(root.wait in HOST_BOUND for root in chain_.roots)
    if agrees and agreeing >= ENOUGH:
        return "sure" if host else "likely"
    if agrees or (host and agreeing >= ENOUGH):
        return "likely"
    return "possible"


def _doubts(chain_: Chain, agreeing: int, scene: Scene) -> Iterator[str]:
    if agreeing < ENOUGH:
        yield too_few(scene.pasted, agreeing, ENOUGH)
    if chain_.relation in {"unseen", "remote"}:
        yield "the workers' stacks tell the rest: dump them, too"
    if not chain_.relation and chain_.roots[0].wait in COLLECTIVES:
        yield "the other ranks' stacks tell which of them is missing: dump them, too"


def _agreeing(chain_: Chain, samples: Sequence[StacksSnapshot]) -> int:
    """In how many samples every thread at the root is at the same places."""
    if not all(has_lines(root.thread) for root in chain_.roots):
        return 1
    roots = {_where(root.process, root.thread) for root in chain_.roots}
    names = {key for key, _ in roots}
    return sum(
        roots
        <= {
            _where(process, thread)
            for process in sample.processes
            for thread in process.threads
            if Spot(process, thread, ()).key in names
        }
        for sample in samples
    )


def _where(process: ProcessStacks, thread: Thread) -> tuple[object, object]:
    return Spot(process, thread, ()).key, tuple(places(thread))


def _names(roots: Sequence[Position]) -> str:
    return ", ".join(dict.fromkeys(label(root.process) for root in roots))


def _evidence(root: Position) -> str:
    frames = list(root.thread.frames[:SHOWN_FRAMES])
    if root.frame and root.frame not in frames:
        frames.append(root.frame)
    return evidence(root.process, root.thread, frames)
