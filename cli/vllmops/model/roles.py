"""What a process does in a server, and the titles that tell it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Role(StrEnum):
    """What a process does in a server."""

    LAUNCHER = "launcher"  # the parent of several API servers, or of engines alone
    API = "api"
    ENGINE = "engine"
    WORKER = "worker"
    COORDINATOR = "coordinator"
    OTHER = "other"


# vLLM loads no plug-in into other processes; the launcher of several API servers has no caches.
ROLES = (Role.API, Role.ENGINE, Role.WORKER)

# Titles as vLLM sets them with setproctitle; on the kernel's side they are cut to 15 characters.
TITLES = {
    "VLLM::APIServer": Role.API,
    "VLLM::EngineCore": Role.ENGINE,
    "VLLM::Worker": Role.WORKER,
    "VLLM::DPCoordinator": Role.COORDINATOR,
    # Ray's, of vLLM's actors; while one works, its method follows.
    "ray::RayWorkerProc": Role.WORKER,
    "ray::RayWorkerWrapper": Role.WORKER,
    "ray::EngineCoreActor": Role.ENGINE,
    "ray::DPMoEEngineCoreActor": Role.ENGINE,
}


def find_title_role(arguments: Sequence[str]) -> Role | None:
    """The role in a process title, None for a command line without a title."""
    first = arguments[0] if arguments else ""
    return next((role for title, role in TITLES.items() if first.startswith(title)), None)
