"""Encoder-decoder cache entries are freed in the step that allocates them (vLLM #32789)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .patch import Patch
from .probe_objects import ScratchRequest


def has_defect(module: ModuleType) -> bool:
    manager = module.EncoderDecoderCacheManager(cache_size=100)
    manager.allocate(ScratchRequest(), 0)
    return bool(manager.get_freed_mm_hashes())


def apply_patch(module: ModuleType) -> None:
    module.EncoderDecoderCacheManager.get_freed_mm_hashes = get_freed_mm_hashes


def get_freed_mm_hashes(self: Any) -> list[str]:
    """The entries that the worker may free: those of the step before.

    The worker frees before it runs the model. An entry that is reported in its own step does not
    exist there yet, so it would never be freed.
    """
    ready = vars(self).get("_vllmops_to_free", [])
    self._vllmops_to_free, self.freed = self.freed, []
    return list(ready)


PATCH = Patch(
    id="encoder-decoder-free-order",
    upstream="https://github.com/vllm-project/vllm/pull/32789",
    title="encoder outputs of Whisper-like models are never freed on the worker",
    hit="Servers of Whisper and other encoder-decoder models: GPU memory grows with every "
    "request until it is exhausted. In vLLM up to 0.14.0.",
    changes="EncoderDecoderCacheManager.get_freed_mm_hashes() reports an entry one step after its "
    "allocation, as in vLLM 0.14.1.",
    modules=("vllm.v1.core.encoder_cache_manager",),
    present=has_defect,
    apply=apply_patch,
)
