"""Plug-ins of vLLM: those that make servers of tests cheaper, and a way to write one."""

from __future__ import annotations

from pathlib import Path

# EngineCore and its worker wait for each other in busy loops, which take two cores whole. With
# Linux 6.18 what is of another session, as a client of `serve` is, then waited for up to 9 s until
# it got a core, and with its autogroups off it did not; the kernel's commit 1319ea57529e is about
# something like it. vLLM has this switch for older versions of Python: the loops sleep for 0.1 ms.
PATIENT = """
def register():
    from vllm.distributed import utils

    utils.USE_SCHED_YIELD = False
"""
# `vllm serve` spawns the engine and the workers, and each of the three imports vLLM: 35 s of CPU.
# Forked they share the imports: 16 s. Servers with `--env SPAWNED=1` start as a user's do: a
# forked engine has no named semaphores, garbage collection that was tuned before it was made, and
# the plug-ins of its parent. A spawned one loads plug-ins in its own constructor.
FORKED = """
def register():
    import gc
    import multiprocessing
    import os
    import sys

    if os.environ.get("SPAWNED"):
        return
    gc.freeze()  # or engine and worker would go through all modules again

    def get_mp_context():
        return multiprocessing.get_context("fork")

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and hasattr(module, "get_mp_context"):
            module.get_mp_context = get_mp_context
"""


def lean(folder: Path) -> None:
    """Write both into a folder that is for ``PYTHONPATH``."""
    write(folder, "patient", PATIENT)
    write(folder, "forked", FORKED)


def write(folder: Path, name: str, module: str) -> None:
    """Write a plug-in into a folder that is for ``PYTHONPATH``.

    Args:
        folder: it need not exist.
        name: of the plug-in and its module.
        module: the text, with a function `register`.
    """
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(module)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{name} = {name}:register\n"
    (metadata / "entry_points.txt").write_text(entry)
