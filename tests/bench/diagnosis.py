"""How often `stacks explain` is right, on a folder of labelled texts.

The folder has a text ``NAME.txt`` for each line ``NAME, source, what, truth, label, root, phase``
of its ``INDEX.tsv``, with tabs between. A label is an id of the catalogue, ``none`` for a healthy
server, or ``unknown`` where the text decides nothing; ``(accept a, b)`` in the truth names ids
that are right, too. The last two columns may be missing, or ``-`` where the text does not tell:

- root: the processes that are the cause, and no other, each as a pattern, with commas between.
- phase: the ids of ``thread_phases.toml`` that are right, with ``|`` between.

They are judged by the first answer, whatever cause it names.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.rules.stacks.explanation import Explanation, StackFinding, explain_stacks
from vllmops.rules.stacks.thread_phases import load_frame_tables
from vllmops.support import output

HEALTHY = {"none", "unknown", "idle-spin-normal"}
Z = 1.96  # 95 %
PROCESSES = re.compile(r", (?![^<>]*>)")  # the name of a kernel may have commas
WORDS = r"(?i)(?<![a-z\d])(?:{})(?![a-z\d])"
LEVELS = ("possible", "likely", "sure")


@dataclass(frozen=True)
class Case:
    """A labelled text, and what `stacks explain` says of it.

    Args:
        name: of its file.
        right: the ids that are right, the label first.
        found: the explanation.
        root: patterns of the processes that are the cause; empty if the label names none.
        phase: the titles of the phases that are right; empty if the label names none.
    """

    name: str
    right: tuple[str, ...]
    found: Explanation
    root: tuple[str, ...] = ()
    phase: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        return self.right[0]

    @property
    def answers(self) -> list[str]:
        return [finding.code.removeprefix("stack.") for finding in self.found.findings]

    def is_within(self, count: int) -> bool:
        """Whether one of the first answers is right."""
        return not set(self.right).isdisjoint(self.answers[:count])

    @property
    def is_root_right(self) -> bool:
        """Whether the first answer names the processes that are the cause, and no other."""
        if not self.found.findings:
            return False
        named = PROCESSES.split(self.found.findings[0].subject)
        return len(named) == len(self.root) and all(
            any(re.search(WORDS.format(pattern), name) for name in named) for pattern in self.root
        )

    @property
    def is_phase_right(self) -> bool:
        return bool(self.found.findings) and self.found.findings[0].phase in self.phase

    @property
    def is_false_alarm(self) -> bool:
        return self.label in HEALTHY and self.found.verdict == "hang"

    @property
    def is_wrong_hang(self) -> bool:
        """Whether it is called a hang, of another cause."""
        return self.label not in HEALTHY and self.found.verdict == "hang" and not self.is_within(1)


@dataclass
class Tally:
    """Right ones of all."""

    right: int = 0
    all: int = 0

    def add(self, right: bool) -> None:
        self.right += right
        self.all += 1

    def __str__(self) -> str:
        if not self.all:
            return "-"
        low, high = wilson(self.right, self.all)
        return f"{self.right}/{self.all} = {self.right / self.all:.2f} ({low:.2f}-{high:.2f})"


@dataclass
class ByClass:
    """What is counted of one label."""

    first: Tally = field(default_factory=Tally)
    two: Tally = field(default_factory=Tally)
    precision: Tally = field(default_factory=Tally)


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, square = right / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def cases(folder: Path) -> list[Case]:
    """The texts of a folder, each explained.

    Raises:
        OSError: a text or the index is missing.
    """
    found = []
    titles = {phase.id: phase.title for phase in load_frame_tables().phase}
    for line in (folder / "INDEX.tsv").read_text().splitlines():
        name, _, _, truth, label, *more = line.split("\t")
        root, phase = (*more, "-", "-")[:2]
        accepted = re.search(r"\(accept ([\w, -]+?)(?: too)?\)", truth)
        also = [word.strip() for word in accepted[1].split(",")] if accepted else []
        text = (folder / f"{name}.txt").read_text()
        found.append(
            Case(
                name,
                (label.strip(), *also),
                explain_stacks(parse_stacks(text, f"{name}.txt")),
                root=() if root == "-" else tuple(root.split(",")),
                phase=frozenset(titles[word] for word in phase.split("|") if word != "-"),
            )
        )
    return found


def report(folder: Path, say: Callable[[str], None] = output.print_to_stderr) -> bool:
    """Print the figures of a folder; whether no healthy text is called a hang."""
    found = cases(folder)
    hangs = [case for case in found if case.label not in HEALTHY]
    for case in found:
        if case.is_false_alarm or (case.label not in HEALTHY and not case.is_within(1)):
            kind = "false alarm" if case.is_false_alarm else "second" if case.is_within(2) else "no"
            kind = "wrong hang" if case.is_wrong_hang else kind
            say(f"{kind}: {case.name}: {case.label}; answers {', '.join(case.answers) or 'none'}")
        for what, told, right in (
            ("root", case.root, case.is_root_right),
            ("phase", case.phase, case.is_phase_right),
        ):
            if told and not right:
                say(
                    f"{what}: {case.name}: {', '.join(sorted(told))}; answers "
                    f"{_render_first_finding(case, what)}"
                )
    alarms = [case for case in found if case.is_false_alarm]
    say(f"{len(found)} texts: {len(hangs)} hangs, {len(found) - len(hangs)} others")
    say(f"first: {count(case.is_within(1) for case in hangs)}")
    say(f"within two: {count(case.is_within(2) for case in hangs)}")
    say(f"root: {count(case.is_root_right for case in hangs if case.root)}")
    say(f"phase: {count(case.is_phase_right for case in hangs if case.phase)}")
    say(f"wrong, and called a hang: {count(case.is_wrong_hang for case in hangs)}")
    say(f"false alarms: {len(alarms)} of {len(found) - len(hangs)}")
    quiet = [case.found.verdict == "maybe" for case in found if case.label in HEALTHY]
    say(f"others that may be a hang: {count(quiet)}")
    classes(found)
    calibration(found)
    return not alarms


def _render_first_finding(case: Case, what: str) -> str:
    """What the first answer says of the root or the phase."""
    first = case.found.findings[0] if case.found.findings else None
    return ((first.subject if what == "root" else first.phase) if first else "") or "none"


def count(values: Iterable[bool]) -> Tally:
    tally = Tally()
    for value in values:
        tally.add(value)
    return tally


def classes(found: Sequence[Case]) -> None:
    """Print recall and precision by label."""
    rows: defaultdict[str, ByClass] = defaultdict(ByClass)
    for case in found:
        if case.label not in HEALTHY:
            rows[case.label].first.add(case.is_within(1))
            rows[case.label].two.add(case.is_within(2))
        if case.answers and case.found.verdict != "idle":
            rows[case.answers[0]].precision.add(case.answers[0] in case.right)
    table = output.make_table("label", "recall, first", "recall, within two", "precision, first")
    for label, row in sorted(rows.items()):
        table.add_row(label, str(row.first), str(row.two), str(row.precision))
    output.print_parts(table)


def calibration(found: Sequence[Case]) -> None:
    """Print of the answers with each confidence, how many are right."""
    table = output.make_table("confidence", "right, of the first answers", "right, of all answers")
    for level in LEVELS:
        first, every = Tally(), Tally()
        for case in found:
            for index, finding in enumerate(case.found.findings):
                if finding.confidence == level and finding.hang:
                    right = is_right(case, finding)
                    every.add(right)
                    if not index:
                        first.add(right)
        table.add_row(level, str(first), str(every))
    output.print_parts(table)


def is_right(case: Case, finding: StackFinding) -> bool:
    return finding.code.removeprefix("stack.") in case.right
