"""Installed versions that are known to hang: the types of ``packages.toml``, and its reader."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import msgspec

from ..protocol.packages import MACHINE
from . import toml
from .findings import Finding, Rule, Severity

BAD_VERSION = Rule(
    "versions.known-bad",
    Severity.WARNING,
    "an installed version is known to hang",
    "install another version",
)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions of one package that are known to hang; see ``packages.toml``."""

    package: str
    versions: str
    title: str
    next: str
    references: tuple[str, ...]
    machine: str = ""
    nodes: bool = False


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    row: tuple[Row, ...]


@functools.cache
def rows() -> tuple[Row, ...]:
    """The table."""
    return toml.read("packages.toml", Table).row


def bad(versions: Mapping[str, str], *, nodes: int = 1) -> Iterator[Row]:
    """The rows that hold for what is installed.

    Args:
        versions: by name, as `protocol.packages` has them.
        nodes: on how many the server runs.
    """
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - slow, and seldom needed

    for row in rows():
        there = versions.get(row.package)
        elsewhere = row.machine and row.machine != versions.get(MACHINE)
        if there is None or elsewhere or (row.nodes and nodes < 2):
            continue
        try:
            if SpecifierSet(row.versions).contains(there, prereleases=True):
                yield row
        except ValueError:  # it is none, or has thousands of digits
            continue


def findings(versions: Mapping[str, str], *, nodes: int = 1) -> Iterator[Finding]:
    """A finding for each row that holds; as `bad`."""
    for row in bad(versions, nodes=nodes):
        subject = f"{row.package} {versions[row.package]}"
        finding = BAD_VERSION.at(subject, f"{row.title}; {', '.join(row.references)}")
        yield msgspec.structs.replace(finding, next=row.next, reference=row.references[0])
