"""What counts as proven: three looks that show the same, while the engine tries in vain."""

from __future__ import annotations

import pytest

from vllmops.collect.agents.proven_states import LEAST_STEPS, HealCase, select_proven_cases
from vllmops.collect.machine.processes import Process
from vllmops.model.healing import HealProof
from vllmops.model.roles import Role

ENGINE, OTHER = Process(Role.ENGINE, 12, 1), Process(Role.ENGINE, 13, 1)


def case(steps: int | None, *, same: str = "a", process: Process = ENGINE) -> HealCase:
    return HealCase(process, HealProof(subject="one", evidence="", progress_key=same, rises=steps))


FAR, FURTHER = LEAST_STEPS, 2 * LEAST_STEPS


@pytest.mark.parametrize(
    ("looks", "count"),
    [
        ([[case(0)], [case(FAR)], [case(FURTHER)]], 1),
        ([[case(None)], [case(None)], [case(None)]], 1),
        ([[case(0)], [case(FAR)], [case(FURTHER - 1)]], 0),  # it works on something
        ([[case(0)], [case(0)], [case(0)]], 0),  # it takes no step: nothing was tried
        ([[case(None)], [], [case(None)]], 0),
        ([[], [case(None)], [case(None)]], 0),
        ([[case(None)], [case(None)], []], 0),
        ([[case(None)], [case(None, same="b")], [case(None)]], 0),  # it got further
        ([[case(None)], [case(None)], [case(None, process=OTHER)]], 0),
        ([3 * [case(None)], [case(None)], [case(None)]], 1),
        ([], 0),
    ],
)
def test_only_cases_in_all_samples_are_proven(looks: list[list[HealCase]], count: int) -> None:
    assert len(select_proven_cases(looks)) == count
