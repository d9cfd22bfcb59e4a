"""Acting on modules as they are imported."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllmops.agent.hooks import import_hook
from vllmops.agent.hooks.import_hook import when_imported


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllmops_example"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "caches.py").write_text("class Cache: pass")
    (package / "broken.py").write_text("raise ImportError('no device')")
    (package / "user.py").write_text("from vllmops_example.caches import Cache; seen = Cache.mark")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        sys, "meta_path", [f for f in sys.meta_path if f is not import_hook._watcher]
    )
    for name in [name for name in sys.modules if name.startswith("vllmops_example")]:
        monkeypatch.delitem(sys.modules, name)
    import_hook._watcher.callbacks.clear()


def mark(module: ModuleType) -> None:
    module.Cache.mark = module.__name__


def test_before_anybody_else_sees_the_module() -> None:
    when_imported("vllmops_example.caches", mark)
    assert "vllmops_example" not in sys.modules
    assert importlib.import_module("vllmops_example.user").seen == "vllmops_example.caches"


def test_at_once_where_it_is_imported() -> None:
    module = importlib.import_module("vllmops_example.caches")
    when_imported("vllmops_example.caches", mark)
    assert module.Cache.mark == "vllmops_example.caches"


def test_every_act_once() -> None:
    seen: list[int] = []
    when_imported("vllmops_example.caches", lambda _: seen.append(1))
    when_imported("vllmops_example.caches", lambda _: seen.append(2))
    module = importlib.import_module("vllmops_example.caches")
    assert seen == [1, 2]
    importlib.reload(module)
    assert seen == [1, 2]


def test_a_module_that_fails_or_does_not_exist_stays_so() -> None:
    seen: list[ModuleType] = []
    for name in ("vllmops_example.broken", "vllmops_example.none"):
        when_imported(name, seen.append)
    with pytest.raises(ImportError, match="no device"):
        importlib.import_module("vllmops_example.broken")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllmops_example.none")
    assert seen == []
    assert sum(finder is import_hook._watcher for finder in sys.meta_path) == 1
