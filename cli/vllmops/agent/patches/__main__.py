"""Patches the vLLM of this environment in a process that serves nothing, and prints the result.

``python -m vllmops.agent.patches`` prints a `ProcessPatches` on the last line of its output.
"""

from __future__ import annotations

import importlib
import sys

import msgspec

from . import registry


def main() -> None:
    registry.install()
    importlib.import_module("vllm")
    for patch in registry.PATCHES.values():
        for name in patch.modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Each vLLM version has only some of these modules.
                if not name.startswith(str(error.name)):
                    raise
    answer = msgspec.structs.replace(registry.states(verify=True), role="here")
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
