"""Which checks of a store's backend a busy machine can fail."""

from __future__ import annotations

import pytest

from vllmops_responses.store.conformance.response_checks import CHECKS

# They wait until leases and ages of half a second are over, and what is renewed must not be over.
TIMED = (
    "expires responses that were not used for long",
    "fails runs whose server has gone",
    "takes up again what ran when its server went, once, and its stream goes on",
    "stops a run that was cancelled, deleted or evicted elsewhere",
    "keeps no more of a stream than it should",
    "lets go of a conversation whose server has gone",
    "keeps no more conversations and items than it may, and for no longer",
)


def without_timed(patch: pytest.MonkeyPatch) -> None:
    """Have only the other checks made, by this process and its forks."""
    for name in TIMED:
        patch.delitem(CHECKS, name)
