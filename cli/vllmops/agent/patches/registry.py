"""Probes, applies and verifies the patches of this process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from types import ModuleType

from ...errors import VllmopsError
from ...protocol.patches import ProcessPatches, State, Verdict
from .. import account
from ..adapters import features, places
from ..identity import role
from ..imports import when_imported
from ..objects import problems, report, unfit
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
        f"there is no patch {patch!r}; the patches are {', '.join(PATCHES)}",
        "vllmops patches list",
    )


def off() -> set[str]:
    """The patches that ``VLLMOPS_NO_PATCH`` names."""
    return set(os.environ.get(OFF, "").replace(",", " ").split())


def install(withheld: Mapping[str, str] | None = None) -> None:
    """Probe and patch each module of vLLM's as soon as it is imported; idempotent.

    Args:
        withheld: patches that are not applied even where the defect is present, and why.
    """
    _withheld.update(withheld or {})
    for name in sorted(off() - PATCHES.keys()):
        report(f"{OFF} names an unknown patch: {name}")
    for patch in PATCHES.values():
        present = list(filter(None, map(places.existing, patch.modules)))
        for name in present:
            when_imported(name, partial(judge, patch))
        if not present:
            reason = f"this vLLM has no module {' or '.join(patch.modules)}"
            _verdicts[patch.id, ""] = Verdict(id=patch.id, state=State.FAILED, reason=reason)


def judge(patch: Patch, module: ModuleType) -> None:
    """Apply one patch to one module where needed; an error is reported, never raised."""
    global _spent_s  # noqa: PLW0603
    key = patch.id, module.__name__
    # In newer versions this is a package, whose modules are patched by their own names.
    if hasattr(module, "__path__") or key in _verdicts:
        return
    began = time.perf_counter()
    try:
        verdict = judged(patch, module)
    except Exception as error:
        reason = f"{module.__name__} has an unknown shape: {error!r}"
        verdict = Verdict(id=patch.id, state=State.FAILED, reason=reason)
    _spent_s += time.perf_counter() - began
    if verdict is None:
        return
    _verdicts[key] = verdict
    if verdict.state is State.FAILED:
        unfit(f"the patch {patch.id} is not applied: {verdict.reason}")


def judged(patch: Patch, module: ModuleType) -> Verdict | None:
    """The state of a patch in a module after applying it; None if the module lacks the class."""
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
        return verdict(state=State.FAILED, reason="the defect is still present after the patch")
    return verdict(state=State.APPLIED)


def states(*, verify: bool = False) -> ProcessPatches:
    """Every patch of this process.

    Args:
        verify: whether to probe again.
    """
    verdicts: dict[str, list[Verdict]] = {}
    for (name, module), verdict in list(_verdicts.items()):
        verdicts.setdefault(name, []).append(probed(verdict, module) if verify else verdict)
    return ProcessPatches(
        pid=os.getpid(),
        role=role(),
        vllm_version=features.version(),
        patches=[merged(verdicts[name]) for name in PATCHES if name in verdicts],
        seconds=_spent_s,
        problems=tuple(problems),
        cpu_s=account.cpu_s(),
        repairs=dict(account.repairs),
    )


def probed(verdict: Verdict, module: str) -> Verdict:
    """A verdict with the result of a new probe."""
    try:
        present = PATCHES[verdict.id].present(sys.modules[module])
    except Exception as error:
        reason = verdict.reason or f"the probe failed: {error!r}"
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
