"""A ``Request`` and its block hasher reference each other (vLLM #34183)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from .patch import Patch

NAME = "get_hash_new_full_blocks"
TRIES = 3


def has_defect(module: ModuleType) -> bool:
    # A garbage collection at that moment would hide the cycle; three in a row are unlikely.
    return any(has_reference_cycle(module) for _ in range(TRIES))


def has_reference_cycle(module: ModuleType) -> bool:
    """Whether a request stays alive without references to it."""
    return weakref.ref(make_scratch_request(module))() is not None


def make_scratch_request(module: ModuleType) -> Any:
    """A request with a block hasher."""
    cls = module.Request
    given: dict[str, Any] = {
        "request_id": "vllmops-probe",
        "prompt_token_ids": [0],
        "sampling_params": module.SamplingParams(max_tokens=1),
        "pooling_params": None,
        "block_hasher": no_hashes,
    }
    if "eos_token_id" in inspect.signature(cls).parameters:
        given["eos_token_id"] = None
    return cls(**given)


def no_hashes(request: Any) -> list[Any]:  # noqa: ARG001
    """A block hasher that makes no hashes."""
    return []


def apply_patch(module: ModuleType) -> None:
    bound = vars(make_scratch_request(module)).get(NAME)
    if bound is not no_hashes and not isinstance(bound, partial):
        raise TypeError("this reference cycle is unknown")
    setattr(module.Request, NAME, property(get_hasher, set_hasher))


def get_hasher(self: Any) -> Callable[[], list[Any]] | None:
    """The hasher bound to its request; made on each access, so the request does not hold it."""
    bound = vars(self).get(NAME)
    if isinstance(bound, partial):  # a request from before the patch
        set_hasher(self, bound)
        bound = vars(self).get(NAME)
    return None if bound is None else partial(bound, self)


def set_hasher(self: Any, bound_hasher: Callable[[], list[Any]] | None) -> None:
    """Keep the hasher without the request that ``partial(block_hasher, self)`` binds."""
    vars(self)[NAME] = bound_hasher.func if isinstance(bound_hasher, partial) else bound_hasher


PATCH = Patch(
    id="request-hash-cycle",
    upstream="https://github.com/vllm-project/vllm/pull/34183",
    title="a finished Request stays until a gen-2 garbage collection",
    hit="Servers of images, audio or video with prefix caching: each finished request keeps its "
    "inputs, megabytes each, and EngineCore grows by gigabytes. In vLLM up to 0.15.1.",
    changes="Request.get_hash_new_full_blocks is bound when it is called, so that a request does "
    "not hold itself; the hashes are the same.",
    modules=("vllm.v1.request",),
    present=has_defect,
    apply=apply_patch,
)
