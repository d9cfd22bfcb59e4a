"""What the agent can do with a vLLM, and with which versions that is tested."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

import msgspec

from . import module_locations


class Feature(NamedTuple):
    """Something that the agent does, and what it needs of vLLM.

    Args:
        title: in words.
        needs: keys of `module_locations.PLACES`.
    """

    title: str
    needs: tuple[str, ...]


RESPONSES: Final = "responses"
FEATURES: Final = {
    "caches": Feature("multimodal caches", ("mm-cache", "lru")),
    "encoder-caches": Feature("encoder caches", ("scheduler", "encoder-cache", "worker")),
    "progress": Feature("engine progress", ("scheduler", "executor", "engine-client")),
    "compare": Feature("comparison of caches", ("engine-client", "engine-core", "executor")),
    "requests": Feature(
        "requests in flight", ("scheduler", "engine-client", "engine-core", "worker")
    ),
    "memory": Feature("count of live requests", ("scheduler", "request")),
    RESPONSES: Feature(
        "stored responses, carriers",
        (
            *("responses", "responses-routes", "responses-protocol"),
            *("errors", "generation-error", "route-decorators"),
        ),
    ),
}


class VersionResults(msgspec.Struct, frozen=True):
    """What the tests found with one version.

    Args:
        has_live_run: whether a server ran with it, too.
        results: by feature or patch.
    """

    has_live_run: bool = msgspec.field(name="live")
    results: dict[str, str]


@cache
def load_tested_versions() -> dict[str, VersionResults]:
    """The table that the tests check, by version, oldest first."""
    content = files(__package__).joinpath("tested.json").read_bytes()
    return msgspec.json.decode(content, type=dict[str, VersionResults])


def find_missing_features() -> dict[str, list[str]]:
    """The features that this vLLM has another shape for, with the names that it lacks."""
    lacks = {
        feature: [
            module_locations.PLACES[kind].name
            for kind in needs
            if module_locations.find_symbol_module(kind) is None
        ]
        for feature, (_, needs) in FEATURES.items()
    }
    return {feature: names for feature, names in lacks.items() if names}


def find_vllm_version() -> str | None:
    """The version of the imported vLLM."""
    return getattr(sys.modules.get(module_locations.ROOT), "__version__", None)


def describe_untested_version(name: str | None) -> str | None:
    """A remark on a version that is newer than all that are tested; None on others."""
    newest = max(map(parse_minor_version, load_tested_versions()))
    if not name or parse_minor_version(name) <= newest:
        return None
    return f"vLLM {name} is newer than {'.'.join(map(str, newest))}, the newest tested"


def parse_minor_version(name: str) -> tuple[int, int]:
    """The first two numbers of a version; zeros where it has none."""
    match = re.match(r"(\d+)\.(\d+)", name)
    return (int(match[1]), int(match[2])) if match else (0, 0)
