"""Patches the vLLM of this environment in a process that serves nothing, and prints the result.

``python -m vllmops.agent.patches`` prints a `ProcessPatches` on the last line of its output.
"""

from __future__ import annotations

import importlib
import sys

import msgspec

from ..hooks import vllm_objects
from ..versions import module_locations
from . import registry


def main() -> None:
    importlib.import_module("vllm")
    vllm_objects.report_compatibility()
    registry.install_patches()
    for patch in registry.PATCHES.values():
        for name in filter(None, map(module_locations.find_existing_module, patch.modules)):
            importlib.import_module(name)
    answer = msgspec.structs.replace(registry.observe_patches(verify=True), role="here")
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
