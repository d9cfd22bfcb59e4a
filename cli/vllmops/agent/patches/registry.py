"""Probes, applies and verifies the patches of this process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from types import ModuleType

from ...errors import Exit, VllmopsError
from ...protocol.patches import ProcessPatches, State, Verdict
from ..identity import role
from ..imports import when_imported
from ..objects import report
from . import (
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
    )
}

# The worst first: one patch can have classes in several modules.
ORDER = (State.FAILED, State.OFF, State.APPLIED, State.FIXED)

_verdicts: dict[tuple[str, str], Verdict] = {}
_withheld: dict[str, str] = {}
_spent_s = 0.0


def known(patch: str) -> Patch:
    """A patch by its id.

    Raises:
        VllmopsError: ``patch.unknown``.
    """
    if patch in PATCHES:
        return PATCHES[patch]
    raise VllmopsError(
        "patch.unknown",
        f"there is no patch {patch!r}; there are {', '.join(PATCHES)}",
        "vllmops patches list",
        exit_code=Exit.USAGE,
    )


def off() -> set[str]:
    """The patches that ``VLLMOPS_NO_PATCH`` names."""
    return set(os.environ.get(OFF, "").replace(",", " ").split())


def install(withheld: Mapping[str, str] | None = None) -> None:
    """Probe and patch each module of vLLM's as soon as it is imported; idempotent.

    Args:
        withheld: patches that are not applied though their defect is there, and why.
    """
    _withheld.update(withheld or {})
    for name in sorted(off() - PATCHES.keys()):
        report(f"{OFF} names a patch that there is not: {name}")
    for patch in PATCHES.values():
        for name in patch.modules:
            when_imported(name, partial(judge, patch))


def judge(patch: Patch, module: ModuleType) -> None:
    """Apply one patch to one module where it is needed; what fails is reported, never raised."""
    global _spent_s  # noqa: PLW0603
    key = patch.id, module.__name__
    # A package in newer versions: its modules are patched by their own names.
    if hasattr(module, "__path__") or key in _verdicts:
        return
    began = time.perf_counter()
    try:
        verdict = judged(patch, module)
    except Exception as error:
        reason = f"{module.__name__} has a shape that is not known: {error!r}"
        verdict = Verdict(id=patch.id, state=State.FAILED, reason=reason)
    _spent_s += time.perf_counter() - began
    if verdict is None:
        return
    _verdicts[key] = verdict
    if verdict.state is State.FAILED:
        report(f"the patch {patch.id} is not applied: {verdict.reason}")


def judged(patch: Patch, module: ModuleType) -> Verdict | None:
    """What becomes of a patch in a module; None where the module has nothing of it."""
    verdict = partial(Verdict, id=patch.id)
    if patch.id in off():
        return verdict(state=State.OFF)
    if (present := patch.present(module)) is None:
        return None
    if not present:
        return verdict(state=State.FIXED)
    if reason := _withheld.get(patch.id):
        return verdict(state=State.OFF, reason=reason)
    patch.apply(module)
    if patch.present(module):
        return verdict(state=State.FAILED, reason="the defect is there after it, too")
    return verdict(state=State.APPLIED)


def states(*, verify: bool = False) -> ProcessPatches:
    """Every patch of this process.

    Args:
        verify: whether to probe again.
    """
    found: dict[str, list[Verdict]] = {}
    for (name, module), verdict in list(_verdicts.items()):
        found.setdefault(name, []).append(probed(verdict, module) if verify else verdict)
    return ProcessPatches(
        pid=os.getpid(),
        role=role(),
        vllm_version=getattr(sys.modules.get("vllm"), "__version__", None),
        patches=[merged(found[name]) for name in PATCHES if name in found],
        seconds=_spent_s,
    )


def probed(verdict: Verdict, module: str) -> Verdict:
    """A verdict with what a probe says now."""
    try:
        present = PATCHES[verdict.id].present(sys.modules[module])
    except Exception as error:
        reason = verdict.reason or f"it can't be probed: {error!r}"
        return Verdict(id=verdict.id, state=verdict.state, reason=reason)
    return Verdict(id=verdict.id, state=verdict.state, reason=verdict.reason, present=present)


def merged(verdicts: list[Verdict]) -> Verdict:
    """One verdict for a patch of several modules: the worst."""
    worst = min(verdicts, key=lambda verdict: ORDER.index(verdict.state))
    probes = [verdict.present for verdict in verdicts if verdict.present is not None]
    return Verdict(
        id=worst.id,
        state=worst.state,
        reason=worst.reason,
        present=any(probes) if probes else None,
    )
