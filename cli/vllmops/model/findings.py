"""The result of a diagnosis: findings with stable codes, and their rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad a finding is: for information, may cause problems, broken."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it should be.

    Args:
        code: a stable word, such as ``mm-cache.ghost-keys``.
        severity: how bad it is.
        subject: what it is about, such as ``P1 mm-lru of engine 123``.
        title: what is wrong, in one line.
        evidence: what was seen, with figures.
        next_step: what to do.
        page: the name that ``vllmops help`` takes for its page: its code.
        reference: a public report or pull request; empty without one.
    """

    code: str
    severity: Severity
    subject: str
    title: str
    evidence: str
    next_step: str = msgspec.field(name="next")
    page: str
    reference: str = ""


@dataclass(frozen=True)
class Rule:
    """A kind of finding. The fields are those of `Finding`."""

    code: str
    severity: Severity
    title: str
    next_step: str
    reference: str = ""

    def make_finding(self, subject: str, evidence: str, next_step: str = "") -> Finding:
        """A finding of this kind; `next_step` is what to do here, if not what the kind says."""
        return Finding(
            code=self.code,
            severity=self.severity,
            subject=subject,
            title=self.title,
            evidence=evidence,
            next_step=next_step or self.next_step,
            page=self.code,
            reference=self.reference,
        )


def find_worst_severity(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity among findings; None without findings."""
    severities = (finding.severity for finding in findings)
    return max(severities, key=lambda severity: severity.rank, default=None)
