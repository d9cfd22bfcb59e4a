"""Finds the modules in which this vLLM defines what the agent hooks, without importing them.

Versions move classes and leave a compatibility shim behind, or a package that imports them. vLLM
itself may never import the old module then, and a hook that waits for it would wait forever. The
source files say where a class is now, and reading them costs far less than an import.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = "vllm"
# A shim of vLLM's: it replaces itself by another module, or delegates to it.
SHIM = re.compile(r"""^\w+\s*=\s*\w+\.import_module\(\s*["'](vllm\.[\w.]+)["']""", re.MULTILINE)
IMPORTS = re.compile(r"^from[ ]+([\w.]+)[ ]+import[ ]+(\([^)]*\)|[^(\n]*)", re.MULTILINE)
SHIM_BYTES = 4096
HOPS = 8  # that lead from an old place to the new one


class Symbol(NamedTuple):
    """Something of vLLM's.

    Args:
        name: of a class, a function or a variable.
        modules: that have it, one of them in each version, the newest first.
    """

    name: str
    modules: tuple[str, ...]


# Weights and layers of models, in older and newer code: none of the places are there.
LAYERS: Final = ("vllm.model_executor", "vllm.runtime.modeling")
RESPONSES: Final = "vllm.entrypoints.openai.responses"
PLACES: Final = {
    # The class whose constructor all multimodal caches share.
    "mm-cache": Symbol(
        "BaseMultiModalCache",
        ("vllm.multimodal.cache.base", "vllm.multimodal.cache"),  # up to 0.30
    ),
    "lru": Symbol("LRUCache", ("vllm.utils.cache",)),
    "config": Symbol("VllmConfig", ("vllm.config.vllm", "vllm.config")),
    "scheduler": Symbol("Scheduler", ("vllm.v1.core.sched.scheduler",)),
    "encoder-cache": Symbol("EncoderCacheManager", ("vllm.v1.core.encoder_cache_manager",)),
    "executor": Symbol("Executor", ("vllm.v1.executor.abstract",)),
    "engine-client": Symbol("AsyncLLM", ("vllm.v1.engine.async_llm",)),
    "engine-core": Symbol("EngineCore", ("vllm.v1.engine.core",)),
    "worker": Symbol("WorkerBase", ("vllm.v1.worker.worker_base",)),
    "request": Symbol("Request", ("vllm.v1.request",)),
    "responses": Symbol(
        "OpenAIServingResponses",
        (f"{RESPONSES}.serving", "vllm.entrypoints.openai.serving_responses"),  # up to 0.14
    ),
    "responses-routes": Symbol("router", (f"{RESPONSES}.api_router",)),
    "responses-protocol": Symbol("ResponsesRequest", (f"{RESPONSES}.protocol",)),
    "errors": Symbol(
        "ErrorResponse",
        (
            "vllm.entrypoints.serve.engine.protocol",
            "vllm.entrypoints.openai.engine.protocol",  # up to 0.28
        ),
    ),
    "generation-error": Symbol(
        "GenerationError",
        ("vllm.exceptions", "vllm.entrypoints.openai.engine.protocol"),  # up to 0.28
    ),
    "metrics": Symbol("get_prometheus_registry", ("vllm.v1.metrics.prometheus",)),
    "route-decorators": Symbol("load_aware_call", ("vllm.entrypoints.serve.utils.api_utils",)),
}


def is_inspection_module(module: str) -> bool:
    """Whether a process that runs a module only inspects a model's class, and ends."""
    return module.startswith(LAYERS) and module.endswith(".models.registry")


@cache
def find_symbol_module(kind: str) -> str | None:
    """The module that defines one of `PLACES`; None if this vLLM has it in none of its places."""
    place = PLACES[kind]
    return next(
        filter(None, (find_defining_module(name, place.name) for name in place.modules)), None
    )


def find_loaded_class(kind: str) -> Any | None:
    """The class of one of `PLACES`; None where its module is not imported or has no such class."""
    module = sys.modules.get(find_symbol_module(kind) or "")
    return vars(module).get(PLACES[kind].name) if module else None


def find_defining_module(module: str, name: str) -> str | None:
    """The module that defines a name, starting from one that has it."""
    for _ in range(HOPS):
        if find_source_root() is None:
            return module
        text = read_source(module)
        if text is None:
            return None
        if shim := find_shim_target(text):
            module = shim
        elif re.search(rf"^[ ]*(class|def)\s+{name}\b|^{name}\s*[:=]", text, re.MULTILINE):
            return module
        elif origin := find_import_origin(text, name):
            package = module if is_package(module) else module.rpartition(".")[0]
            module = resolve_name(origin, package)
        else:
            return None
    return None


@cache
def find_existing_module(module: str) -> str | None:
    """A module of vLLM's, or the one for which it is a shim; None if this vLLM has none."""
    if find_source_root() is None:
        return module
    for _ in range(HOPS):
        if (text := read_source(module)) is None:
            return None
        if not (shim := find_shim_target(text)):
            return module
        module = shim
    return None


def find_shim_target(text: str) -> str | None:
    """The module for which a source is a shim."""
    match = SHIM.search(text) if len(text) < SHIM_BYTES else None
    return match[1] if match else None


def find_import_origin(text: str, name: str) -> str | None:
    """The module from which a source imports a name; relative as it is written there."""
    for origin, names in IMPORTS.findall(text):
        if re.search(rf"\b{name}\b", names) and origin.startswith((ROOT, ".")):
            return str(origin)
    return None


def is_package(module: str) -> bool:
    return (path := find_source_file(module)) is not None and path.name == "__init__.py"


def read_source(module: str) -> str | None:
    """The source of a module of vLLM's; None if there is no such file."""
    path = find_source_file(module)
    return path.read_text("utf-8", "replace") if path else None


def find_source_file(module: str) -> Path | None:
    place = find_source_root()
    if place is None:
        return None
    stem = place.joinpath(*module.split(".")[1:])
    return next(filter(Path.is_file, (stem.with_suffix(".py"), stem / "__init__.py")), None)


@cache
def find_source_root() -> Path | None:
    """The folder of vLLM's source; None if there is none, or only compiled files."""
    package = sys.modules.get(ROOT)
    spec = getattr(package, "__spec__", None) if package else find_spec(ROOT)
    origin = Path(spec.origin) if spec and spec.origin else None
    return origin.parent if origin and origin.is_file() and origin.suffix == ".py" else None
