"""What else a text tells of a hang: NCCL's watchdog, recorder and RAS, cuda-gdb, nvidia-smi."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...support.lazy_patterns import DECIMAL, compile_lazily
from .progress_facts import STATS
from .signatures import Confidence
from .thread_phases import ThreadPosition, get_phase_title

if TYPE_CHECKING:
    from ...model.server_snapshot import RasCapture

# These are for texts without blanks, because lines may be wrapped anywhere.
WATCHDOG = (
    r"Rank(?P<rank>\d+)\]?Watchdogcaughtcollectiveoperationtimeout:"
    r"Work\w+\(SeqNum=(?P<seq>\d+),OpType=(?P<op>\w+)"
)
ENQUEUED = (
    r"Rank(?P<rank>\d+)\]?.{0,120}?lastenqueued(?:NCCL)?work:(?P<seq>\d+),"
    r"lastcompleted(?:NCCL)?work:(?P<done>\d+)"
)
LAUNCHED = r"Rank(?P<rank>\d+)haslauncheduptooperation(?P<seq>\d+)"
# Ranks of one count together, in the text with its blanks; those of a small group are named below.
TOGETHER = compile_lazily(
    r"(?m)^\W*(?P<count>\d+) ranks have launched up to operation (?P<seq>\d+)"
    r"(?P<named>(?:\n\W*Rank \d+ -- .*)*)"
)
NAMED = compile_lazily(r"Rank (\d+) -- ")
ABORTED = r"\bABORT\b|\"abort_flag\": ?true"
# The kernel of cuda-gdb's table, of a backtrace, or of its focus.
KERNELS = (
    r"Active +0x[0-9a-f]+ .*?\) +([A-Za-z_][^()]*)\(",
    r"[ \n]in ([A-Za-z_][\w:<>, ]*?)<<<\(",
    r"Switching focus to CUDA kernel.*\n(?:.*\n)?#0.*? in ([A-Za-z_][\w:]*)",
)
# A row of nvidia-smi's table, from the sign after the number of watts; and its query's.
SMI = r"W\s*/\s*(?P<limit>\d+)W\s*\|[^|]*\|\s*(?P<busy>\d+)%"
QUERY = rf"%, ?(?P<memory>\d+) ?%(?:, ?\d+)?, ?(?P<watts>{DECIMAL}) ?W"
NUMBER = compile_lazily(rf"(?<![\d.]){DECIMAL}(?= ?$)")
LONGEST = 8  # characters of a number
FEW_WATTS, BUSY, IDLE = 0.25, 90, 5  # of the limit; percent; percent
COLD_W = 30.0  # without a limit: a small board's idle
COMPILERS = ("ptxas", "cicc", "nvcc", "cc1plus", "ninja")
# A row of ps or top.
COMPILES = rf"(?m)^ *(?:\w+ +)?\d+ [^\n]*?(?<!\b[Nn]o )\b(?:{'|'.join(COMPILERS)})\b"
# Lines of a log.
TIMED_OUT = {
    "".join(line.split()): line.replace(r"to \w+ ", "")
    for line in (
        r"RPC call to \w+ timed out",
        "RayChannelTimeoutError",
        "Watchdog caught collective operation timeout",
        "No available shared memory broadcast block found",
    )
}
LATE = ("collective-stall", "collective-mismatch")
APART = ("collective-mismatch", "dp-collective-mismatch")
# vLLM's front end, every ten seconds, as long as an engine is not ready.
NOT_READY = r"Waitingfor\d+(?:\w+,\d+\w+?)?coreengineproc\(s\)tostart"
ENOUGH = 3  # lines with figures, ten seconds apart: a long prompt takes no longer
FULL = 90.0  # percent of the KV cache
LAST = 400  # characters behind the last line that counts, which may be words
MOST_TRIES = 500  # braces that may begin a document
SPREAD = 1  # operations: so far apart are ranks that work


@dataclass(frozen=True)
class TextEvidence:
    """Something that a text tells beside the stacks.

    Args:
        ids: of the catalogue, the most probable first.
        subject: the rank or the kernel that is the cause.
        line: the evidence.
        confidence: how certain the first one is.
        victims, phase, waits_for: as of `SignatureMatch`, where the text tells them.
    """

    ids: tuple[str, ...]
    subject: str
    line: str
    confidence: Confidence = "possible"
    victims: tuple[str, ...] = ()
    phase: str = ""
    waits_for: str = ""


def find_text_evidence(text: str, log: str) -> list[TextEvidence]:
    """What a text tells; empty for most texts.

    Args:
        text: as it was read.
        log: the same without blanks.
    """
    readers = dict.fromkeys(reader for words, reader in READERS if words in log)
    return [clue for reader in readers for clue in reader(text, log)]


def find_weak_evidence(text: str, facts: Mapping[str, str], *, stacks: bool) -> list[TextEvidence]:
    """What a text without clues tells: log lines, figures, and sentences.

    Args:
        text: as of `find_text_evidence`.
        facts: figures, by the names in `progress_facts.FACTS`.
        stacks: whether the text has stacks, too; words count less than these.
    """
    from . import (  # noqa: PLC0415
        prose,
        symptoms,
    )

    found: list[TextEvidence] = []
    log = "".join(prose.select_statements(text).split())
    if chain := prose.parse_wait_chain(text, facts):
        line = "; ".join(_describe_position(place) for place in (*chain.roots, *chain.victims))
        found.append(
            TextEvidence(
                chain.ids,
                ", ".join(_list_process_titles(chain.roots)),
                f"as the text says: {line}",
                victims=_list_process_titles(chain.victims),
                phase=chain.roots[0].phase.title,
                waits_for=chain.roots[0].waits_for,
            )
        )
    for words, line in TIMED_OUT.items():
        if re.search(words, log):
            ids = LATE if "collective" in line else ("worker-stuck-broadcast",)
            found.append(TextEvidence(ids, "a worker", f"log: {line}"))
            break
    starts = list(re.finditer(NOT_READY, log))
    if len(starts) >= ENOUGH and len(log) - starts[-1].end() < LAST:
        line = f"log: it has waited for the engine {len(starts)} times"
        found.append(TextEvidence(("startup-capture", "weight-load-io"), "the engine", line))
    read = len(list(STATS.finditer(log))) >= ENOUGH or "generation_tokens_total" in log
    if read and facts.get("progress") == "frozen":
        found.append(_explain_frozen_engine(facts))
    if stacks:
        return found
    said = [
        TextEvidence(
            (row.id,),
            "the server",
            f"as the text says: {row.sentence}",
            phase=get_phase_title(row.phase),
        )
        for row in symptoms.match_sentences(text)
    ]
    # Names of functions tell that ranks wait; words tell that one of them does not come.
    late = [clue for clue in said[:1] if found and found[0].ids[0] in LATE and clue.ids[0] in APART]
    return late + found + said


def _list_process_titles(positions: Sequence[ThreadPosition]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.process.title or "a process" for place in positions))


def _describe_position(position: ThreadPosition) -> str:
    names = " ← ".join(frame.function for frame in position.thread.frames)
    return f"{position.process.title or 'a process'} in {names}"


def _explain_frozen_engine(facts: Mapping[str, str]) -> TextEvidence:
    """What figures alone tell of an engine that gets no token further."""
    figures = {name: float(facts.get(name) or 0) for name in ("running", "waiting", "deferred")}
    ids: tuple[str, ...] = ("worker-stuck-broadcast", "gpu-kernel-stuck", "collective-stall")
    if not figures["running"]:
        ids = ("schedule-livelock", "admission-deadlock")
        if figures["deferred"]:
            ids = ("kv-connector-wait", *ids)
        elif float(facts.get("kv_usage") or 0) >= FULL:
            ids = ids[::-1]
    shown = ", ".join(f"{count:.0f} {name}" for name, count in figures.items() if count)
    cache = f", KV cache {facts['kv_usage']} %" if "kv_usage" in facts else ""
    line = f"figures: {shown}{cache}, and no tokens"
    return TextEvidence(ids, "the engine", line)


def has_compiler_process(text: str) -> bool:
    """Whether a table of processes in the text shows a compiler."""
    return any(map(text.__contains__, COMPILERS)) and re.search(COMPILES, text) is not None


def parse_gpu_state(text: str) -> str:
    """What nvidia-smi shows: ``spins`` (busy with few watts), ``idle``, ``works``, or nothing."""
    if "%" not in text or not any(words in f"{text}\n" for words in ("W /", " W\n", "W  /")):
        return ""
    rows = {
        _classify_gpu_load(int(row["busy"]), watts < FEW_WATTS * float(row["limit"]))
        for row in re.finditer(SMI, text)
        if (watts := _parse_preceding_number(row)) is not None
    }
    rows |= {
        _classify_gpu_load(busy, float(row["watts"]) < COLD_W)
        for row in re.finditer(QUERY, text)
        if (busy := _parse_preceding_number(row)) is not None
    }
    return next((state for state in ("spins", "works", "idle") if state in rows), "")


def _parse_preceding_number(row: re.Match[str]) -> float | None:
    """The number just before a row that matches."""
    match = NUMBER.search(row.string, max(row.start() - LONGEST, 0), row.start())
    return float(match[0]) if match else None


def _classify_gpu_load(utilization: float, is_cold: bool) -> str:
    return (
        "spins" if utilization >= BUSY and is_cold else "idle" if utilization <= IDLE else "works"
    )


def _parse_watchdog(_text: str, log: str) -> Iterator[TextEvidence]:
    """Ranks whose collective timed out: in the same operation, or not."""
    ranks = {int(row["rank"]): (int(row["seq"]), row["op"]) for row in re.finditer(WATCHDOG, log)}
    if not ranks:
        return
    shown = ", ".join(f"rank {rank}: {op} {seq}" for rank, (seq, op) in sorted(ranks.items()))
    line = f"the watchdog ended a collective: {shown}"
    if len(set(ranks.values())) > 1:
        yield TextEvidence(
            ("collective-mismatch", "collective-stall"), _format_lowest_ranks(ranks), line, "likely"
        )
    else:
        names = ", ".join(f"rank {rank}" for rank in sorted(ranks))
        yield TextEvidence(("collective-stall", "collective-mismatch"), names, line, "likely")


def _format_lowest_ranks(ranks: Mapping[int, Any]) -> str:
    least = min(ranks.values())
    return ", ".join(f"rank {rank}" for rank in sorted(ranks) if ranks[rank] == least)


def _compare_rank_counts(
    ranks: Mapping[int, int],
    count_name: str,
    *,
    aborted: bool,
    unnamed_rank_counts: Mapping[int, int] | None = None,
) -> Iterator[TextEvidence]:
    """Ranks by their number of operations: far apart is a mismatch; else they wait together.

    Args:
        ranks: the number of operations by rank.
        count_name: is counted.
        aborted: whether a communicator was aborted.
        unnamed_rank_counts: how many ranks without a name have a number of operations.
    """
    counts = {*ranks.values(), *(unnamed_rank_counts or {})}
    if not counts:
        return
    shown = ", ".join(
        [f"rank {rank}: {count}" for rank, count in sorted(ranks.items())]
        + [
            f"{number} ranks: {count}"
            for count, number in sorted((unnamed_rank_counts or {}).items())
        ]
    )
    least = min(counts)
    lowest = (
        f"{unnamed_rank_counts[least]} ranks"
        if unnamed_rank_counts and least in unnamed_rank_counts
        else _format_lowest_ranks(ranks)
    )
    line = f"{count_name}: {shown}"
    if aborted:
        line += "; after an abort the counts may have run on"
    if max(counts) - least > SPREAD:
        yield TextEvidence(("collective-mismatch", "collective-stall"), lowest, line)
    else:
        yield TextEvidence(("gpu-kernel-stuck", "collective-stall"), lowest, line)


def _parse_enqueued_work(_text: str, log: str) -> Iterator[TextEvidence]:
    ranks = {int(row["rank"]): int(row["seq"]) for row in re.finditer(ENQUEUED, log)}
    if ranks and max(ranks.values()) - min(ranks.values()) > SPREAD:
        yield from _compare_rank_counts(ranks, "last enqueued collective", aborted=False)
    elif ranks:
        line = f"the last enqueued collective has one number on {len(ranks)} ranks"
        yield TextEvidence(("collective-stall", "collective-mismatch"), "the ranks", line)


def _parse_launched_operations(text: str, log: str) -> Iterator[TextEvidence]:
    ranks = {int(row["rank"]): int(row["seq"]) for row in re.finditer(LAUNCHED, log)}
    others: dict[int, int] = {}
    for row in TOGETHER.finditer(text):
        if names := NAMED.findall(row["named"]):
            ranks |= dict.fromkeys(map(int, names), int(row["seq"]))
        else:
            others[int(row["seq"])] = int(row["count"])
    aborted = re.search(ABORTED, text) is not None
    yield from _compare_rank_counts(
        ranks, "NCCL RAS, operations", aborted=aborted, unnamed_rank_counts=others
    )


def _parse_ras_json(text: str, _log: str) -> Iterator[TextEvidence]:
    """The counts of RAS in JSON: of the communicator whose ranks differ most, else the busiest."""
    best: dict[int, int] = {}
    for document in _find_json_documents(text):
        for communicator in _list_objects(document, "communicators"):
            ranks = {
                int(rank["rank"]): sum(
                    count
                    for count in _get_collective_counts(rank).values()
                    if isinstance(count, int)
                )
                for rank in _list_objects(communicator, "ranks")
                if isinstance(rank.get("rank"), int)
            }
            if len(ranks) > 1 and _compute_count_spread(ranks) > _compute_count_spread(best):
                best = ranks
    yield from _compare_rank_counts(
        best, "NCCL RAS, operations", aborted=bool(re.search(ABORTED, text))
    )


def find_ras_evidence(captures: Sequence[RasCapture]) -> list[TextEvidence]:
    """What RAS tells of a server that makes no progress; nothing while its counts move.

    Args:
        captures: some seconds apart, the oldest first.
    """
    if len(captures) < 2:
        return []
    first, last = captures[0], captures[-1]
    log = "".join(last.text.split())
    if _list_operation_counts(first.text) != _list_operation_counts(last.text):
        return []
    rows = [*_parse_ras_json(last.text, log), *_parse_launched_operations(last.text, log)]
    aborted = re.search(ABORTED, last.text)
    still = f"the counts have stood still for {last.at_s - first.at_s:.0f} s"
    return [
        dataclasses.replace(
            clue,
            line=f"{clue.line}; {still}",
            # A spread of one occurs in proven stuck kernels, too.
            confidence="likely"
            if clue.ids[0] == "collective-mismatch" and not aborted
            else "possible",
        )
        for clue in rows
    ]


def _list_operation_counts(text: str) -> set[str]:
    """All counts of a capture, in no order."""
    operations = {str(row) for row in re.findall(LAUNCHED, "".join(text.split()))}
    operations |= {row[0] for row in TOGETHER.finditer(text)}
    for document in _find_json_documents(text):
        for communicator in _list_objects(document, "communicators"):
            for rank in _list_objects(communicator, "ranks"):
                operations.add(
                    f"{communicator.get('hash')} {rank.get('rank')} {_get_collective_counts(rank)}"
                )
    return operations


def _compute_count_spread(ranks: dict[int, int]) -> tuple[int, int]:
    values = ranks.values()
    spread = max(values, default=0) - min(values, default=0)
    return (spread if spread > SPREAD else 0, sum(values))


def _get_collective_counts(rank: dict[str, Any]) -> dict[str, Any]:
    counts = rank.get("collective_counts") or rank.get("counts") or {}
    return counts if isinstance(counts, dict) else {}


def _list_objects(document: object, key: str) -> list[dict[str, Any]]:
    value = document.get(key) if isinstance(document, dict) else None
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _find_json_documents(text: str) -> Iterator[object]:
    """The JSON objects in a text that hold communicators or a flight recorder's entries."""
    decoder, at, tries = json.JSONDecoder(), 0, 0
    while (start := text.find("{", at)) >= 0 and tries < MOST_TRIES:
        tries += 1
        try:
            document, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            at = start + 1
            continue
        yield document


def _parse_gpu_watts(text: str, _log: str) -> Iterator[TextEvidence]:
    if parse_gpu_state(text) == "spins":
        line = "nvidia-smi: the GPU is busy with few watts, so one kernel spins"
        yield TextEvidence(("gpu-kernel-stuck", "collective-stall"), "the GPU", line)


def _parse_kernel_names(text: str, _log: str) -> Iterator[TextEvidence]:
    found = (name.strip() for kernel in KERNELS for name in re.findall(kernel, text))
    if names := list(dict.fromkeys(found)):
        shown = ", ".join(names)
        yield TextEvidence(
            ("gpu-kernel-stuck", "launch-queue-full"),
            f"kernel {shown}",
            f"cuda-gdb shows the kernel {shown}",
        )


def _parse_flight_recorder(text: str, _log: str) -> Iterator[TextEvidence]:
    """PyTorch's flight recorder: the first collective that has not ended."""
    for document in _find_json_documents(text):
        entries = _list_objects(document, "entries")
        pending = [e for e in entries if e.get("state") in {"scheduled", "started"}]
        if pending and "collective_seq_id" in pending[0]:
            first = pending[0]
            line = (
                f"flight recorder: {first.get('profiling_name', 'a collective')} "
                f"{first['collective_seq_id']} is {first['state']} and has not ended"
            )
            yield TextEvidence(
                ("collective-stall", "collective-mismatch"), "the rank of the record", line
            )


# The words that a text without blanks has if the reader can find something.
READERS: tuple[tuple[str, Callable[[str, str], Iterator[TextEvidence]]], ...] = (
    ("Watchdogcaughtcollective", _parse_watchdog),
    ("lastenqueued", _parse_enqueued_work),
    ("launcheduptooperation", _parse_launched_operations),
    ('"communicators"', _parse_ras_json),
    ('"collective_seq_id"', _parse_flight_recorder),
    ("Active0x", _parse_kernel_names),
    ("<<<(", _parse_kernel_names),
    ("%,0%", _parse_gpu_watts),
    ("W|", _parse_gpu_watts),
    ("SwitchingfocustoCUDAkernel", _parse_kernel_names),
)
