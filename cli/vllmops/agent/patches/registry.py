"""Probes, applies and verifies the patches of this process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from types import ModuleType

from ...model.patches import PatchReport, PatchState, ProcessPatches
from ...support.errors import VllmopsError
from .. import cost
from ..hooks.import_hook import when_imported
from ..hooks.vllm_objects import problems, report_problem, report_unsupported
from ..identity import detect_role
from ..versions import features, module_locations
from . import (
    broadcast_recheck,
    encoder_decoder_free_order,
    encoder_decoder_slots,
    mm_cache_reset_race,
    mm_lru_ghost_keys,
    mm_lru_stale_eviction,
    request_hash_cycle,
)
from .patch import Patch

OFF = "VLLMOPS_NO_PATCH"

PATCHES: dict[str, Patch] = {
    module.PATCH.id: module.PATCH
    for module in (
        mm_lru_ghost_keys,
        mm_lru_stale_eviction,
        encoder_decoder_free_order,
        request_hash_cycle,
        encoder_decoder_slots,
        mm_cache_reset_race,
        broadcast_recheck,
    )
}

# The worst first: one patch can have classes in several modules.
ORDER = (PatchState.FAILED, PatchState.OFF, PatchState.APPLIED, PatchState.FIXED)

_verdicts: dict[tuple[str, str], PatchReport] = {}
_withheld: dict[str, str] = {}
_spent_s = 0.0


def require_patch(patch: str) -> Patch:
    """A patch by its id.

    Raises:
        VllmopsError: ``patch.unknown``.
    """
    if patch in PATCHES:
        return PATCHES[patch]
    raise VllmopsError(
        "patch.unknown",
        f"there is no patch {patch!r}; the patches are {', '.join(PATCHES)}",
        "vllmops patches list",
    )


def read_disabled_patches() -> set[str]:
    """The patches that ``VLLMOPS_NO_PATCH`` names."""
    return set(os.environ.get(OFF, "").replace(",", " ").split())


def install_patches(withheld: Mapping[str, str] | None = None) -> None:
    """Probe and patch each module of vLLM's as soon as it is imported; idempotent.

    Args:
        withheld: patches that are not applied even where the defect is present, and why.
    """
    _withheld.update(withheld or {})
    for name in sorted(read_disabled_patches() - PATCHES.keys()):
        report_problem(f"{OFF} names an unknown patch: {name}")
    for patch in PATCHES.values():
        present = list(filter(None, map(module_locations.find_existing_module, patch.modules)))
        for name in present:
            when_imported(name, partial(patch_module, patch))
        if not present:
            reason = f"this vLLM has no module {' or '.join(patch.modules)}"
            _verdicts[patch.id, ""] = PatchReport(
                id=patch.id, state=PatchState.FAILED, reason=reason
            )


def patch_module(patch: Patch, module: ModuleType) -> None:
    """Apply one patch to one module where needed; an error is reported, never raised."""
    global _spent_s  # noqa: PLW0603
    key = patch.id, module.__name__
    # In newer versions this is a package, whose modules are patched by their own names.
    if hasattr(module, "__path__") or key in _verdicts:
        return
    began = time.perf_counter()
    try:
        verdict = apply_if_needed(patch, module)
    except Exception as error:
        reason = f"{module.__name__} has an unknown shape: {error!r}"
        verdict = PatchReport(id=patch.id, state=PatchState.FAILED, reason=reason)
    _spent_s += time.perf_counter() - began
    if verdict is None:
        return
    _verdicts[key] = verdict
    if verdict.state is PatchState.FAILED:
        report_unsupported(f"the patch {patch.id} is not applied: {verdict.reason}")


def apply_if_needed(patch: Patch, module: ModuleType) -> PatchReport | None:
    """The state of a patch in a module after applying it; None if the module lacks the class."""
    verdict = partial(PatchReport, id=patch.id)
    if patch.id in read_disabled_patches():
        return verdict(state=PatchState.OFF)
    if (present := patch.present(module)) is None:
        return None
    if not present:
        return verdict(state=PatchState.FIXED)
    if reason := _withheld.get(patch.id):
        return verdict(state=PatchState.OFF, reason=reason)
    patch.apply(module)
    if patch.present(module):
        return verdict(
            state=PatchState.FAILED, reason="the defect is still present after the patch"
        )
    return verdict(state=PatchState.APPLIED)


def observe_patches(*, verify: bool = False) -> ProcessPatches:
    """Every patch of this process.

    Args:
        verify: whether to probe again.
    """
    verdicts: dict[str, list[PatchReport]] = {}
    for (name, module), verdict in list(_verdicts.items()):
        verdicts.setdefault(name, []).append(recheck_defect(verdict, module) if verify else verdict)
    return ProcessPatches(
        pid=os.getpid(),
        role=detect_role(),
        vllm_version=features.find_vllm_version(),
        patches=[merge_verdicts(verdicts[name]) for name in PATCHES if name in verdicts],
        seconds=_spent_s,
        problems=tuple(problems),
        cpu_s=cost.measure_cpu_s(),
        repairs=dict(cost.repairs),
    )


def recheck_defect(report: PatchReport, module: str) -> PatchReport:
    """A verdict with the result of a new probe."""
    try:
        present = PATCHES[report.id].present(sys.modules[module])
    except Exception as error:
        reason = report.reason or f"the probe failed: {error!r}"
        return PatchReport(id=report.id, state=report.state, reason=reason)
    return PatchReport(id=report.id, state=report.state, reason=report.reason, present=present)


def merge_verdicts(reports: list[PatchReport]) -> PatchReport:
    """One verdict for a patch of several modules: the worst."""
    worst = min(reports, key=lambda verdict: ORDER.index(verdict.state))
    probes = [verdict.present for verdict in reports if verdict.present is not None]
    return PatchReport(
        id=worst.id,
        state=worst.state,
        reason=worst.reason,
        present=any(probes) if probes else None,
    )
