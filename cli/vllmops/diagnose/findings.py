"""What a diagnosis says: findings with stable codes, and the rules they are instances of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad: worth knowing, worth a look, broken."""

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
        title: what it is, in a line.
        evidence: what was seen, with figures.
        next: what to do.
        reference: where upstream deals with it, empty where nowhere.
    """

    code: str
    severity: Severity
    subject: str
    title: str
    evidence: str
    next: str
    reference: str = ""


@dataclass(frozen=True)
class Rule:
    """A kind of finding; `at` makes one. The fields are those of `Finding`."""

    code: str
    severity: Severity
    title: str
    next: str
    reference: str = ""

    def at(self, subject: str, evidence: str) -> Finding:
        return Finding(
            self.code, self.severity, subject, self.title, evidence, self.next, self.reference
        )


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity among findings, None where there are none."""
    return max((each.severity for each in findings), key=lambda each: each.rank, default=None)
