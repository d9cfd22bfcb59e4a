"""Installed versions that are known to hang: types and reader of ``package_versions.toml``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import msgspec

from ..model.findings import Finding, Rule, Severity
from ..model.package_versions import MACHINE
from . import toml_tables

BAD_VERSION = Rule(
    "versions.known-bad",
    Severity.WARNING,
    "an installed version is known to hang",
    "install another version",
)


class BadVersionRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions of one package that are known to hang; see ``package_versions.toml``."""

    package: str
    versions: str
    title: str
    next_step: str = msgspec.field(name="next")
    references: tuple[str, ...]
    machine: str = ""
    nodes: bool = False


class PackageTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    row: tuple[BadVersionRange, ...]


@functools.cache
def load_bad_versions() -> tuple[BadVersionRange, ...]:
    """The table."""
    return toml_tables.load_table("package_versions.toml", PackageTable).row


def find_bad_versions(versions: Mapping[str, str], *, nodes: int = 1) -> Iterator[BadVersionRange]:
    """The rows that hold for what is installed.

    Args:
        versions: by name, as `model.package_versions` has them.
        nodes: on how many the server runs.
    """
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - slow, and seldom needed

    for row in load_bad_versions():
        there = versions.get(row.package)
        elsewhere = row.machine and row.machine != versions.get(MACHINE)
        if there is None or elsewhere or (row.nodes and nodes < 2):
            continue
        try:
            if SpecifierSet(row.versions).contains(there, prereleases=True):
                yield row
        except ValueError:  # it is none, or has thousands of digits
            continue


def check_versions(versions: Mapping[str, str], *, nodes: int = 1) -> Iterator[Finding]:
    """A finding for each row that holds; as `find_bad_versions`."""
    for row in find_bad_versions(versions, nodes=nodes):
        subject = f"{row.package} {versions[row.package]}"
        finding = BAD_VERSION.make_finding(subject, f"{row.title}; {', '.join(row.references)}")
        yield msgspec.structs.replace(finding, next_step=row.next_step, reference=row.references[0])
