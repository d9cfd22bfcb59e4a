"""Finds the containers of the schedulers' and the workers' encoder caches, in any version."""

from __future__ import annotations

from typing import Any

# Of an encoder-decoder model: up to 0.14 one list, or two with our patch; later others.
PASSING = ("allocated", "to_free", "freed", "_vllmops_to_free")


def find_key_lists(manager: Any) -> list[Any] | None:
    """The lists of keys that a manager of an encoder-decoder model has; None of other managers."""
    own = vars(manager)
    return None if "cached" in own else [own[name] for name in PASSING if name in own]


def find_slots_by_key(manager: Any) -> Any | None:
    """The slots of each key; None in versions that do not count them."""
    return vars(manager).get("num_embeds_by_hash")


def find_inputs_by_request(manager: Any) -> Any | None:
    """The numbers of the inputs that each request holds; None in versions without them."""
    return vars(manager).get("request_cached_ids")


def find_outputs_by_key(worker: Any) -> Any | None:
    """A worker's encoder outputs by key, of either model runner; None without a runner or a cache.

    Ray and other executors wrap the worker; a wrapper has no model runner.
    """
    cache = getattr(vars(worker).get("model_runner"), "encoder_cache", None)
    # The V2 runner has the dictionary inside an object.
    return getattr(cache, "encoder_outputs", cache)
