"""Where a vLLM defines what is hooked, on trees of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllmops.agent.versions import module_locations


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the source of vLLM: ``tree(name="text")``, with a dot for each double underscore."""

    def make(**modules: str) -> None:
        for name, text in {"__init__": "", **modules}.items():
            path = tmp_path.joinpath(*name.replace("__init__", "init").split("__"))
            path = path.with_name(path.name.replace("init", "__init__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(module_locations, "find_source_root", lambda: tmp_path)
    module_locations.find_existing_module.cache_clear()
    yield make
    module_locations.find_existing_module.cache_clear()


ALIAS = """import importlib
import sys

_real = importlib.import_module({})
sys.modules[__name__] = _real
"""


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ({"cache": "class Cache:"}, "vllm.cache"),
        ({"cache": "if fast:\n    class Cache(Base): ..."}, "vllm.cache"),
        ({"cache": "Cache = make()"}, "vllm.cache"),
        ({"cache": "class Cached: ...\n# Cache"}, None),
        ({}, None),
        # A shim, on one line and on several, and one that leads to another.
        ({"cache": ALIAS.format("'vllm.new'"), "new": "class Cache: ..."}, "vllm.new"),
        ({"cache": ALIAS.format('\n    "vllm.new"\n'), "new": "class Cache: ..."}, "vllm.new"),
        (
            {
                "cache": ALIAS.format("'vllm.new'"),
                "new": ALIAS.format("'vllm.newer'"),
                "newer": "class Cache: ...",
            },
            "vllm.newer",
        ),
        ({"cache": ALIAS.format("'vllm.gone'")}, None),
        ({"cache": ALIAS.format("'vllm.cache'")}, None),
        # A package or a module that imports it.
        (
            {
                "cache__init": "from .base import (\n    Base,\n    Cache,\n)",
                "cache__base": "class Cache:",
            },
            "vllm.cache.base",
        ),
        ({"cache": "from vllm.base import Cache as Cache", "base": "class Cache:"}, "vllm.base"),
        ({"cache": "from .base import Cache", "base": "class Cache:"}, "vllm.base"),
        ({"cache": "from other import Cache"}, None),
    ],
)
def test_find_defining_module_follows_aliases_and_imports(
    tree: Callable[..., None], modules: dict[str, str], found: str | None
) -> None:
    tree(**modules)
    assert module_locations.find_defining_module("vllm.cache", "Cache") == found


def test_modules_of_patches_follow_shims_alone(tree: Callable[..., None]) -> None:
    tree(old=ALIAS.format("'vllm.new'"), new="", users="from .new import Cache")
    assert module_locations.find_existing_module("vllm.old") == "vllm.new"
    assert module_locations.find_existing_module("vllm.users") == "vllm.users"
    assert module_locations.find_existing_module("vllm.none") is None


def test_without_sources_a_module_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_locations, "find_source_root", lambda: None)
    module_locations.find_existing_module.cache_clear()
    assert module_locations.find_existing_module("vllm.any") == "vllm.any"
    assert module_locations.find_defining_module("vllm.any", "Any") == "vllm.any"
    module_locations.find_existing_module.cache_clear()
