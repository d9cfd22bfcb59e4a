"""Scratch objects for probes: the parts of a request that vLLM's cache managers read."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

SLOTS = 3


@dataclass
class ScratchRequest:
    """A request with inputs of `SLOTS` encoder slots each.

    Args:
        request_id: its name.
        hashes: of its inputs.
    """

    request_id: str = "vllmops-probe"
    hashes: tuple[str, ...] = ("vllmops-probe",)
    num_computed_tokens: int = 0
    mm_features: list[SimpleNamespace] = field(init=False)

    def __post_init__(self) -> None:
        self.mm_features = [
            SimpleNamespace(identifier=key, mm_hash=key, data=None) for key in self.hashes
        ]

    def get_num_encoder_embeds(self, input_id: int) -> int:  # noqa: ARG002
        return SLOTS

    # Its name before 0.14.
    get_num_encoder_tokens = get_num_encoder_embeds
