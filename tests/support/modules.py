"""Modules of vLLM by their files, for tests and benchmarks: without all that its import brings."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from types import ModuleType


def locate_installed_vllm() -> Path:
    """The folder that has the package of the installed vLLM.

    Raises:
        RuntimeError: there is none.
    """
    spec = util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vLLM is not installed: pip install -e '.[cpu,dev]'")
    return Path(spec.origin).parents[1]


def lru_module(folder: Path) -> ModuleType:
    """``vllm.utils.cache`` of the vLLM in a folder, loaded anew."""
    path = folder / "vllm/utils/cache.py"
    spec = util.spec_from_file_location("vllm.utils.cache", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} can't be loaded")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
