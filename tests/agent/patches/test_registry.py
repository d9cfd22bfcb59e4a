"""Modules that are not as the registry knows them, and what it is told to leave alone."""

from __future__ import annotations

from types import ModuleType

import pytest

from vllmops.agent.hooks import vllm_objects
from vllmops.agent.patches import registry
from vllmops.agent.patches.registry import PATCHES, observe_patches, patch_module, require_patch
from vllmops.model.patches import PatchReport, PatchState
from vllmops.support.errors import VllmopsError

GHOSTS = PATCHES["mm-lru-ghost-keys"]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_verdicts", {})
    monkeypatch.setattr(vllm_objects, "problems", [])


def get_single_report() -> PatchReport:
    (verdict,) = observe_patches().patches
    return verdict


def test_another_shape_is_reported_and_left_alone() -> None:
    module = ModuleType("vllm.utils.cache")
    patch_module(GHOSTS, module)
    assert get_single_report().state is PatchState.FAILED
    assert "has an unknown shape" in str(get_single_report().reason)
    assert "the patch mm-lru-ghost-keys is not applied" in vllm_objects.problems[0]
    assert observe_patches(verify=True).patches[0].present is None


def test_a_patch_that_does_not_help_has_failed() -> None:
    class LRUCache:
        def __init__(self, _: int) -> None:
            self._LRUCache__order: dict[str, None] = {}

        # What touches by another name than the patch knows.
        def __getattribute__(self, name: str) -> object:
            if name == "touch":
                return lambda key: self._LRUCache__order.update({key: None})
            return object.__getattribute__(self, name)

    module = ModuleType("vllm.utils.cache")
    module.LRUCache = LRUCache  # type: ignore[attr-defined]
    patch_module(GHOSTS, module)
    assert (get_single_report().state, get_single_report().reason) == (
        PatchState.FAILED,
        "the defect is still present after the patch",
    )


def test_disabled_patch_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMOPS_NO_PATCH", "mm-lru-ghost-keys, mm-lru-stale-eviction")
    patch_module(GHOSTS, ModuleType("vllm.utils.cache"))
    assert get_single_report().state is PatchState.OFF


def test_a_name_that_is_no_patch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMOPS_NO_PATCH", "mm-lru-ghosts")
    monkeypatch.setattr(registry, "when_imported", lambda *_: None)
    registry.install_patches()
    assert vllm_objects.problems == ["VLLMOPS_NO_PATCH names an unknown patch: mm-lru-ghosts"]


def test_the_worst_of_several_modules_counts() -> None:
    applied = PatchReport(id="x", state=PatchState.APPLIED, present=False)
    failed = PatchReport(id="x", state=PatchState.FAILED, reason="why", present=True)
    assert registry.merge_verdicts([applied, failed]) == failed
    assert (
        registry.merge_verdicts([applied, PatchReport(id="x", state=PatchState.FIXED)]) == applied
    )


def test_unknown_ids() -> None:
    assert require_patch("mm-lru-ghost-keys") is GHOSTS
    with pytest.raises(VllmopsError, match="there is no patch 'x'") as caught:
        require_patch("x")
    assert caught.value.exit_code == 2
