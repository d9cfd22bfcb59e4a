"""The table of versions that are known to hang."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from vllmops.model.package_versions import LIBRARIES, MACHINE, PACKAGES, collect_own_packages
from vllmops.rules.package_versions import check_versions, find_bad_versions, load_bad_versions

X86, ARM = {MACHINE: "x86_64"}, {MACHINE: "aarch64"}


@pytest.mark.parametrize(
    ("versions", "nodes", "packages"),
    [
        ({"flashinfer-python": "0.6.13"}, 1, ["flashinfer-python"]),
        ({"flashinfer-python": "0.6.13rc1"}, 1, ["flashinfer-python"]),
        ({"flashinfer-python": "0.6.15.post1"}, 1, []),
        ({"nccl": "2.28.9"}, 1, []),
        ({"nccl": "2.28.9"}, 2, ["nccl"]),
        ({"nccl": "2.30.4"}, 2, []),
        ({"torch": "2.10.0+cu129", **ARM}, 2, ["torch"]),
        ({"torch": "2.10.0+cu129", **ARM}, 1, []),
        ({"torch": "2.10.0+cu129", **X86}, 2, []),
        ({"torch": "2.11.0+cu130", **ARM}, 2, []),
        ({"rccl": "1.0.70201"}, 1, ["rccl"]),
        ({"rccl": "1.0.70101"}, 1, []),
        ({"vllm": "0.13.0", **ARM}, 1, ["vllm"]),
        ({"vllm": "0.13.0", **X86}, 1, []),
        ({"vllm": "0.14.1+cpu", **ARM}, 1, []),
        ({"flashinfer-python": "built by hand"}, 1, []),
        ({}, 2, []),
    ],
)
def test_bad_package_versions_are_found(
    versions: dict[str, str], nodes: int, packages: list[str]
) -> None:
    assert [row.package for row in find_bad_versions(versions, nodes=nodes)] == packages
    assert len(list(check_versions(versions, nodes=nodes))) == len(packages)


def test_every_row_can_hold() -> None:
    """An agent reports its package, and its versions are versions."""
    known = {*PACKAGES, "nccl", "rccl", "rocprofiler-sdk"}
    for row in load_bad_versions():
        assert row.package in known
        assert list(SpecifierSet(row.versions))
        assert all(reference.startswith("https://github.com/") for reference in row.references)


def test_the_libraries_of_a_process_are_known_by_their_files() -> None:
    maps = """7f00-7f01 r-xp 00000000 08:01 11  /opt/rocm-7.2.0/lib/librccl.so.1.0.70201
7f02-7f03 r-xp 00000000 08:01 12                 /usr/lib/librocprofiler-sdk.so.1.3.2
7f04-7f05 r-xp 00000000 08:01 13                 /usr/lib/libc.so.6
"""
    assert dict(LIBRARIES.findall(maps)) == {"rccl": "1.0.70201", "rocprofiler-sdk": "1.3.2"}


def test_this_environment_is_known() -> None:
    versions = collect_own_packages().versions
    assert versions[MACHINE]
    assert versions["vllm"]
