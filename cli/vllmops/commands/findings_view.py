"""The option ``--fail-on``, and how commands show findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..model.findings import Finding, Severity, find_worst_severity
from ..support.errors import ExitCode
from ..support.output import style_text

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {Severity.INFO: "", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}

FailOn = Annotated[
    Severity, typer.Option(help="Exit with code 1 if a finding has this severity or a higher one.")
]


def choose_exit_code(findings: Iterable[Finding], fail_on: Severity) -> ExitCode:
    """FAILED if a finding has the severity ``fail_on`` or a higher one, else OK."""
    highest = find_worst_severity(findings)
    return ExitCode.FAILED if highest is not None and highest.rank >= fail_on.rank else ExitCode.OK


def render_findings(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """The findings for a person, some lines for each."""
    for finding in findings:
        style = STYLES[finding.severity]
        yield style_text(f"{finding.severity}: {finding.title} [{finding.code}]", style)
        yield f"  where: {finding.subject}"
        yield f"  seen: {finding.evidence}"
        yield f"  next: {finding.next_step}"
        if finding.reference:
            yield f"  see: {finding.reference}"
