"""How commands show findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..diagnose.findings import Finding, Severity

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {Severity.INFO: "", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}


def lines(found: Sequence[Finding]) -> Iterator[RenderableType]:
    """Some lines for each finding."""
    from rich.text import Text  # noqa: PLC0415

    for finding in found:
        style = STYLES[finding.severity]
        yield Text(f"{finding.severity}: {finding.title} [{finding.code}]", style)
        yield Text(f"  where: {finding.subject}")
        yield Text(f"  seen: {finding.evidence}")
        yield Text(f"  next: {finding.next}")
        if finding.reference:
            yield Text(f"  see: {finding.reference}")
