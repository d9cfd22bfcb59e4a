"""What `stacks explain` and `stacks dump --explain` read and show."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...collect.stacks import pasted_text
from ...model import snapshot_files
from ...model.findings import Severity
from ...model.pasted_stacks import PastedStacks
from ...model.ranks import choose_process_title
from ...model.stacks import DumpOptions, StacksSnapshot
from ...rules.stacks import explanation as judge
from ...rules.stacks.progress_facts import FACTS, PACES
from ...rules.stacks.signature_matching import ARROW
from ...support import output
from ...support.errors import ExitCode, VllmopsError, make_usage_error
from ...support.files import STDIN, format_input_name, is_gzip, read_input
from ...support.numbers import MOST, parse_number
from ...support.output import FoldedLines, IndentedLine, Result
from ..findings_view import STYLES as SEVERITIES
from ..findings_view import choose_exit_code

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...servers.discovery import Server


STYLES = {"hang": "bold red", "crash": "bold red", "idle": "green", "working": "green"}
MOST_BYTES, MOST_LINES = 16 << 20, 200_000
HINT = "vllmops stacks dump --save stuck.json, or py-spy dump --pid PID for each of its processes"
CONTROL = bytes(set(range(9)) | {11} | set(range(14, 27)))
BINARY_SHARE = 0.02


def explain_file(file: Path | None, fact: Sequence[str], fail_on: Severity) -> Result:
    """What `stacks explain` shows of a file.

    Args:
        file: stacks in any form, or a bundle; None for standard input.
        fact: what else is known, each as ``NAME=VALUE``.
        fail_on: the command fails if a finding has this severity or a higher one.

    Raises:
        VllmopsError: as `parse_facts`, `load_stacks` and `explain_bundle` do; ``stacks.not-found``
            if the file tells nothing.
    """
    known = parse_facts(fact)
    if file is not None and is_gzip(file):
        return make_explanation_result(explain_bundle(file, known), fail_on)
    pasted = load_stacks(file)
    explanation = judge.explain_stacks(pasted, known)
    if not pasted.samples and not pasted.crashes and not explanation.findings:
        where = format_input_name(file or Path(STDIN))
        raise VllmopsError("stacks.not-found", f"{where} contains no stacks", HINT)
    return make_explanation_result(explanation, fail_on)


def explain_bundle(file: Path, known_facts: dict[str, str]) -> judge.Explanation:
    """The explanation of the stacks in a bundle.

    Args:
        file: the bundle.
        known_facts: facts that override the figures in the bundle.

    Raises:
        VllmopsError: as `bundle_file.load_bundle` does, or ``stacks.not-found``.
    """
    from ...bundle import bundle_file  # noqa: PLC0415 - slow to import, and needed for a bundle only
    from ...rules import diagnosis  # noqa: PLC0415 - the same
    from ...rules.progress import PATIENCE_S  # noqa: PLC0415 - the same

    snapshot = bundle_file.load_bundle(file)
    explanation = diagnosis.explain_snapshot(snapshot)
    if explanation is None:
        reasons = [unseen.reason for unseen in snapshot.gaps if unseen.part.startswith("stacks")]
        raise VllmopsError(
            "stacks.not-found",
            f"{file} contains no stacks: {(*reasons, 'none were taken')[0]}",
            f"vllmops doctor {file} shows what the bundle contains",
        )
    if known_facts:
        figures = diagnosis.collect_facts(snapshot.samples, PATIENCE_S)
        explanation = judge.explain_stacks(
            PastedStacks(snapshot.stacks, complete=True), {**figures, **known_facts}
        )
    return explanation


def make_explanation_result(
    explanation: judge.Explanation, fail_on: Severity, *, failed: bool = False
) -> Result:
    """What the commands show of an explanation; with ``failed`` the exit code is 1 anyway."""
    code = ExitCode.FAILED if failed else choose_exit_code(explanation.findings, fail_on)
    return Result(explanation, lambda: render_explanation(explanation), code)


def explain_server(
    server: Server,
    options: DumpOptions,
    *,
    timeout_s: float,
    samples: int,
    interval_s: float,
    save: Path | None,
    fail_on: Severity,
    quiet: bool,
) -> Result:
    """What `stacks dump --explain` shows of a server: dumps with pauses, figures before and after.

    Raises:
        VllmopsError: ``pyspy.missing`` or ``file.not-written``.
    """
    from ...collect.stacks import pyspy  # noqa: PLC0415 - the same
    from ...observe.server_snapshot import observe_server  # noqa: PLC0415 - slow to import, and not needed for a file
    from ...rules import diagnosis  # noqa: PLC0415 - the same

    began = time.monotonic()
    taken: list[StacksSnapshot] = []
    journal: snapshot_files.Journal | None = None
    with output.Progress(time.time(), quiet=quiet) as progress:
        lasts_s = (samples - 1) * interval_s
        progress.update(f"{server.label}: watching its stacks for {lasts_s:g} s")
        looks = [observe_server(server, began)]
        for index in range(samples):
            time.sleep(max(began + index * interval_s - time.monotonic(), 0.0))
            snapshot = pyspy.dump_stacks(
                server.processes, options, timeout_s=timeout_s, server=server.name
            )
            taken.append(snapshot)
            # Each dump is on disk before the next is taken: the evidence survives what comes.
            if journal:
                journal.append(snapshot)
                if journal.failure:
                    raise journal.failure
            elif save:
                journal = snapshot_files.Journal(save, snapshot)
        looks.append(observe_server(server, began))
    if save:
        output.print_to_stderr(
            f"saved to {save}" + (", local variables included" if options.locals else "")
        )
    explanation = diagnosis.explain_samples(taken, looks)
    failed = any(process.error for process in taken[-1].processes)
    answer = make_explanation_result(explanation, fail_on, failed=failed)
    data = {**msgspec.structs.asdict(explanation), "processes": taken[-1].processes}
    return Result(data, answer.text, answer.exit_code)


def explain_snapshot(snapshot: StacksSnapshot, fail_on: Severity) -> Result:
    """What `stacks dump --explain` shows of stacks from a core file."""
    explanation = judge.explain_stacks(PastedStacks((snapshot,)))
    data = {**msgspec.structs.asdict(explanation), "processes": snapshot.processes}
    return replace(make_explanation_result(explanation, fail_on), data=data)


def parse_facts(assignments: Sequence[str]) -> dict[str, str]:
    """The values of ``--fact`` by name.

    Raises:
        VllmopsError: ``usage``.
    """
    values = {}
    for word in assignments:
        name, sign, value = word.partition("=")
        known = name in FACTS and sign
        right = value in {"frozen", "moving"} if name in PACES else is_number(value)
        if not known or not right:
            raise make_usage_error(
                f"{word!r} is not a fact that vllmops knows, or its value is not valid",
                f"--fact NAME=VALUE; the names are {', '.join(FACTS)}",
            )
        values[name] = value
    return values


def is_number(value: str) -> bool:
    with contextlib.suppress(ValueError):
        parse_number(value, 0, MOST)
        return True
    return False


def load_stacks(file: Path | None) -> PastedStacks:
    """The stacks in a file, or in standard input.

    Raises:
        VllmopsError: as `read_input` does; ``usage`` if standard input is a terminal;
            ``stacks.empty``, ``stacks.binary`` or ``file.too-large``.
    """
    if file is None and sys.stdin is not None and sys.stdin.isatty():
        raise make_usage_error(
            "stacks explain needs a FILE, or stacks on standard input",
            "vllmops stacks explain FILE",
        )
    source = file or Path(STDIN)
    where, content = format_input_name(source), read_input(source, MOST_BYTES)
    if not content.strip():
        raise VllmopsError("stacks.empty", f"{where} is empty", HINT)
    text = decode_text(content)
    if text is None:
        raise VllmopsError("stacks.binary", f"{where} is binary, not text", HINT)
    if text.count("\n") > MOST_LINES:
        raise VllmopsError("file.too-large", f"{where} has more than {MOST_LINES:,} lines", HINT)
    return pasted_text.parse_stacks(text, file.name if file else "")


def decode_text(content: bytes) -> str | None:
    """The text, in UTF-8 or as Windows writes it in UTF-16; None for binary content."""
    if content[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return content.decode("utf-16", errors="replace")
    # A recording of a terminal has some control characters; a binary file has many.
    if len(content) - len(content.translate(None, CONTROL)) > BINARY_SHARE * len(content):
        return None
    return content.decode(errors="replace")


def render_explanation(explanation: judge.Explanation) -> Sequence[RenderableType]:
    """An explanation for a person."""
    return [FoldedLines(tuple(render_explanation_lines(explanation)))]


def render_explanation_lines(explanation: judge.Explanation) -> Iterator[IndentedLine]:
    """The verdict, each finding, and what the processes do if no signature fits for sure."""
    yield IndentedLine(0, format_headline(explanation), STYLES.get(explanation.verdict, "yellow"))
    for finding in explanation.findings:
        yield IndentedLine(0, "")
        yield from render_finding(finding)
    if explanation.verdict in {"unknown", "maybe"} and explanation.seen:
        yield IndentedLine(0, "")
        yield IndentedLine(0, "What the processes do:", "bold")
        for process in explanation.seen:
            name = choose_process_title(process.title, process.role, process)
            where = f"{name} {process.pid}" if process.pid else name
            yield IndentedLine(2, f"{where}: {process.threads} threads")
            for doing in process.doing or ("all threads wait for work",):
                yield from render_evidence(doing, 4)
    if explanation.notes:
        yield IndentedLine(0, "")
    for note in explanation.notes:
        yield IndentedLine(0, f"note: {note}")


def format_headline(explanation: judge.Explanation) -> str:
    match explanation.verdict:
        case "hang":
            return "The server hangs. The cause is known."
        case "crash":
            return "The server crashed. It does not hang."
        case "working":
            return "The server works: its log shows that tokens are produced."
        case "idle":
            return "The server is idle. Nothing is stuck."
        case "maybe":
            what = "these stacks fit" if explanation.samples else "this text fits"
            return f"The server may hang or work: {what} both."
    return "No known signature matches."


def render_finding(finding: judge.StackFinding) -> Iterator[IndentedLine]:
    """One finding: what, where, why, the evidence line by line, and what to do next."""
    title = f"{finding.severity}: {finding.title} [{finding.code}]"
    yield IndentedLine(0, title, SEVERITIES[finding.severity])
    yield IndentedLine(2, f"where: {finding.subject}")
    if finding.victims:
        yield IndentedLine(2, f"waiting for it: {', '.join(finding.victims)}")
    if finding.phase:
        yield IndentedLine(2, f"while: {finding.phase}")
    if finding.waits_for:
        yield IndentedLine(2, f"waits for: {finding.waits_for}")
    yield IndentedLine(2, f"confidence: {finding.confidence}")
    if finding.cause:
        yield IndentedLine(2, f"cause: {finding.cause}")
    yield IndentedLine(2, "seen:")
    for line in finding.lines:
        yield from render_evidence(line, 4)
    if finding.work:
        yield IndentedLine(2, f"if it is work: {finding.work}")
    if finding.confirmation:
        yield IndentedLine(2, f"to be sure: {finding.confirmation}")
    yield IndentedLine(2, f"next: {finding.next_step}", "bold")
    if finding.fixed_in:
        yield IndentedLine(2, f"fixed in: vLLM {finding.fixed_in}")
    for reference in finding.references:
        yield IndentedLine(2, f"see: {reference}")


def render_evidence(evidence: str, indent: int) -> Iterator[IndentedLine]:
    """A line of evidence; the frames of a stack each on a line of its own."""
    head, sign, rest = evidence.partition("): ")
    if not sign or ARROW not in rest:
        yield IndentedLine(indent, evidence)
        return
    yield IndentedLine(indent, f"{head}):")
    for step in rest.split(ARROW):
        yield IndentedLine(indent + 2, step, "dim")
