"""Slots of encoder-decoder models are freed at every step, and again at the end."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .patch import Patch
from .probe_objects import ScratchRequest

MARK = "__vllmops__"


def has_defect(module: ModuleType) -> bool:
    manager, request = module.EncoderDecoderCacheManager(cache_size=100), ScratchRequest()
    manager.allocate(request, 0)
    # As the scheduler does: after each step that computed something, and at the end.
    manager.free_encoder_input(request, 0)
    manager.free_encoder_input(request, 0)
    manager.free(request)
    return bool(manager.num_free_slots != manager.cache_size)


def apply_patch(module: ModuleType) -> None:
    cls = module.EncoderDecoderCacheManager
    if hasattr(cls.allocate, MARK):
        return
    take, give = cls.allocate, cls.free_encoder_input
    clear = getattr(cls, "reset", None)  # since vLLM 0.16

    def allocate(self: Any, request: Any, input_id: int) -> None:
        # A preempted request allocates again what it still holds.
        free_encoder_input(self, request, input_id)
        take(self, request, input_id)
        get_held_inputs(self).add((request.request_id, input_id))

    def free_encoder_input(self: Any, request: Any, input_id: int) -> None:
        key = (request.request_id, input_id)
        if key in get_held_inputs(self):
            get_held_inputs(self).remove(key)
            give(self, request, input_id)

    setattr(allocate, MARK, True)
    cls.allocate, cls.free_encoder_input = allocate, free_encoder_input
    if clear is not None:

        def reset(self: Any) -> None:
            get_held_inputs(self).clear()
            clear(self)

        cls.reset = reset


def get_held_inputs(manager: Any) -> set[tuple[str, int]]:
    """The inputs that hold slots, by request id and index."""
    inputs: set[tuple[str, int]] = vars(manager).setdefault("_vllmops_held", set())
    return inputs


PATCH = Patch(
    id="encoder-decoder-slots",
    upstream="none: reported by vllmops",
    title="encoder-decoder cache slots are freed more often than taken",
    hit="Servers of Whisper and other encoder-decoder models: the count of free slots exceeds "
    "the capacity, so the limit on encoder outputs limits nothing. In every vLLM up to 0.33.",
    changes="EncoderDecoderCacheManager frees the slots of each input only once.",
    modules=("vllm.v1.core.encoder_cache_manager",),
    present=has_defect,
    apply=apply_patch,
    # Earlier allocations are unknown to it, and would never be freed.
    live=False,
)
