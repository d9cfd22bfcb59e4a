"""Waiting requests that hold the encoder cache."""

from __future__ import annotations

from .action import AgentAction


class HeldEncoderCache(AgentAction):
    name = "encoder-cache"
    state = "no request gets a token: requests that wait hold the encoder cache"
    does = "releases what the youngest of them hold; they ask for it again at their turn"
    risk = "the encoder may run again for their images"
    reference = "https://github.com/vllm-project/vllm/issues/31857"
