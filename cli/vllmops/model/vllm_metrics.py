"""The part of a server's ``/metrics`` that vllmops uses."""

from __future__ import annotations

import msgspec


class Metrics(msgspec.Struct, frozen=True):
    """vLLM's counters, summed over its engines; None if this vLLM does not have the counter.

    Fields that end in ``_s`` and ``_n`` are a histogram's: seconds in all, and how many.

    Args:
        running: requests being decoded.
        waiting: requests queued.
        kv_cache_usage: share of the KV cache in use, 0 to 1; of the fullest engine.
        prefix_hits, prefix_queries: tokens.
        mm_hits, mm_queries: multimodal items.
        tokens: of prompts and answers, from the server's start.
        deferred: requests of `waiting` that can't be scheduled yet, even if the KV cache is free.
        awake: engines that do not sleep.
        preemptions: requests removed from the KV cache, to be computed again.
        finished: requests that ended, in whatever way.
        failed: those of them that ended with an error.
        answers: HTTP requests that were answered.
        errors: those of them with a status from 500 up.
        queue_s, queue_n: until a request is scheduled for the first time.
        prefill_s, prefill_n: from there to its first token.
        decode_s, decode_n: from there to its last.
        first_s, first_n: to the first token, as the API server sees it.
        between_s, between_n: from token to token, as the API server sees it.
        whole_s, whole_n: the whole request, as the API server sees it.
    """

    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    mm_hits: float | None = None
    mm_queries: float | None = None
    tokens: float | None = None
    deferred: float | None = None
    awake: float | None = None
    preemptions: float | None = None
    finished: float | None = None
    failed: float | None = None
    answers: float | None = None
    errors: float | None = None
    queue_s: float | None = None
    queue_n: float | None = None
    prefill_s: float | None = None
    prefill_n: float | None = None
    decode_s: float | None = None
    decode_n: float | None = None
    first_s: float | None = None
    first_n: float | None = None
    between_s: float | None = None
    between_n: float | None = None
    whole_s: float | None = None
    whole_n: float | None = None
