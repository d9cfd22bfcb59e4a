"""No owner's responses go for the sake of one who has more."""

from __future__ import annotations

import random

import pytest

from vllmops.responses.backend import Limits, targets


def one_by_one(owners: dict[str, int], limits: Limits) -> dict[str, int]:
    """The same, by taking from the fullest again and again."""
    left = {owner: min(held, limits.share) for owner, held in owners.items()}
    while sum(left.values()) > limits.max_size:
        left[max(left, key=lambda each: left[each])] -= 1
    return {owner: held for owner, held in left.items() if held < owners[owner]}


@pytest.mark.parametrize("seed", range(300))
def test_who_gives_up_how_many(seed: int) -> None:
    dice = random.Random(seed)
    owners = {f"o{n}": dice.randint(1, dice.choice([2, 5, 30])) for n in range(dice.randint(1, 9))}
    per_key = dice.choice([None, None, 1, 3, 50])
    limits = Limits(max_size=dice.randint(1, 40), max_per_key=per_key)
    assert targets(owners, limits) == one_by_one(owners, limits)
