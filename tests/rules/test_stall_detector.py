"""When looks at a server amount to a stall; the looks are made up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllmops.model.server_snapshot import ServerSample
from vllmops.model.vllm_metrics import Metrics
from vllmops.rules.progress import Stall
from vllmops.rules.stall_detector import ASK_S, StallDetector

from .sample_servers import make_healthy_sample, process
from .test_progress import BLIND, HANDED, beats, engine

AGENTS: dict[str, Any] = {"metrics": None, "health": None}
ALL_WELL = beats(api={"loop_s": 0.0})


def detect_stalls(vigil: StallDetector, *looks: ServerSample) -> list[list[Stall]]:
    return [vigil.add_sample(item) for item in looks]


def stuck(at_s: float, since_s: float = 0.0, **fields: Any) -> ServerSample:
    """A look at an engine that has stood since a moment."""
    pulses = beats(api={"loop_s": 0.0, "engine_requests": 2}, engine=engine(at_s - since_s))
    return make_healthy_sample(at_s, heartbeats=pulses, **{**AGENTS, **fields})


def test_it_takes_patience_and_several_looks() -> None:
    shown = detect_stalls(StallDetector(), *(stuck(2.0 * n) for n in range(8)))
    # It stands from the second look on, and has for ten seconds at the sixth.
    assert [bool(item) for item in shown] == [False] * 5 + [True] * 3
    shown = detect_stalls(StallDetector(checks=7), *(stuck(2.0 * n) for n in range(9)))
    assert [bool(item) for item in shown] == [False] * 7 + [True] * 2
    shown = detect_stalls(
        StallDetector(patience_s=5, checks=2), *(stuck(2.0 * n) for n in range(4))
    )
    assert [bool(item) for item in shown] == [False] * 3 + [True]


def test_stall_older_than_the_detector_needs_enough_samples() -> None:
    shown = detect_stalls(StallDetector(), *(stuck(2.0 * n, since_s=-100) for n in range(6)))
    assert [bool(item) for item in shown] == [False] * 4 + [True] * 2


def test_looks_that_are_late_count_for_those_that_were_missed() -> None:
    shown = detect_stalls(StallDetector(), *(stuck(at_s) for at_s in (0.0, 2.0, 7.0, 11.0)))
    assert [bool(item) for item in shown] == [False, False, False, True]
    # Two that are far apart may have a suspended machine between them.
    shown = detect_stalls(StallDetector(), *(stuck(at_s) for at_s in (0.0, 2.0, 60.0)))
    assert [bool(item) for item in shown] == [False, False, False]


def test_a_token_in_between_begins_it_anew() -> None:
    vigil = StallDetector()
    detect_stalls(vigil, *(stuck(2.0 * n) for n in range(5)))
    assert vigil.row == 4
    assert not vigil.add_sample(stuck(10.0, since_s=10.0))
    assert (vigil.row, vigil.current_stalls) == (0, [])


def test_a_machine_that_was_suspended_comes_to_itself() -> None:
    vigil = StallDetector()
    late = beats(
        api={"engine_requests": 1, "age_s": 60}, engine={"age_s": 60}, worker={"age_s": 60}
    )
    assert not vigil.add_sample(make_healthy_sample(0.0, heartbeats=late, **AGENTS))
    assert not vigil.add_sample(make_healthy_sample(2.0, heartbeats=ALL_WELL, **AGENTS))
    assert not vigil.current_stalls


def test_a_server_that_is_well_is_asked_nothing() -> None:
    vigil = StallDetector()
    for number in range(100):
        vigil.add_sample(make_healthy_sample(2.0 * number, heartbeats=ALL_WELL, **AGENTS))
        step = vigil.plan_next_sample()
        assert (step.after_s, step.ask) == (2.0, False)


def test_it_is_asked_once_something_has_stood_for_a_while() -> None:
    vigil = StallDetector()
    asked = []
    for number in range(5):
        vigil.add_sample(stuck(2.0 * number))
        asked.append(vigil.plan_next_sample().ask)
    assert asked == [False, False, False, True, True]


def test_an_older_agent_does_not_tell_of_the_event_loop() -> None:
    vigil = StallDetector()
    asked: list[bool] = []
    for number in range(60):
        shown = {"health": 200} if asked[-1:] == [True] else {"health": None}
        vigil.add_sample(
            make_healthy_sample(2.0 * number, heartbeats=beats(), metrics=None, **shown)
        )
        asked.append(vigil.plan_next_sample().ask)
    assert 6 <= sum(asked) <= 2 * 60 / ASK_S


def test_an_api_server_that_takes_connections_only_is_asked_at_once_again() -> None:
    vigil = StallDetector()
    vigil.add_sample(make_healthy_sample(0.0, heartbeats=beats(), metrics=None, health=0))
    assert (vigil.plan_next_sample().after_s, vigil.plan_next_sample().ask) == (2.0, True)
    shown = detect_stalls(
        vigil,
        *(
            make_healthy_sample(2.0 * n, heartbeats=beats(), metrics=None, health=0)
            for n in range(1, 7)
        ),
    )
    assert [item.code for item in shown[-1]] == ["api.silent"]


def test_without_agents_it_is_asked_seldom_while_it_is_well() -> None:
    vigil = StallDetector()
    vigil.add_sample(make_healthy_sample(0.0, heartbeats=()))
    assert (vigil.plan_next_sample().after_s, vigil.plan_next_sample().ask) == (ASK_S, True)
    vigil.add_sample(make_healthy_sample(15.0, **BLIND))
    assert vigil.plan_next_sample().after_s == ASK_S
    vigil.add_sample(make_healthy_sample(30.0, **BLIND))
    assert (vigil.plan_next_sample().after_s, vigil.plan_next_sample().ask) == (2.0, True)
    shown = detect_stalls(vigil, *(make_healthy_sample(30.0 + 2 * n, **BLIND) for n in range(1, 9)))
    assert [bool(item) for item in shown] == [False] * 7 + [True]


def test_next_sample_is_soon_after_processes_end_without_agents() -> None:
    vigil = StallDetector()
    ended = tuple(
        msgspec.structs.replace(item, state="") for item in make_healthy_sample(0.0).processes
    )
    vigil.add_sample(make_healthy_sample(0.0, heartbeats=(), processes=ended))
    assert vigil.plan_next_sample().after_s == 2.0


def test_a_server_on_another_machine_that_does_not_answer_is_asked_again_soon() -> None:
    vigil = StallDetector()
    hidden = tuple(process(role, state="?") for role in ("api", "engine"))
    vigil.add_sample(make_healthy_sample(0.0, heartbeats=(), processes=hidden, **AGENTS))
    assert (vigil.plan_next_sample().after_s, vigil.plan_next_sample().ask) == (2.0, True)


def bereft(at_s: float, health: int | None = None) -> ServerSample:
    """A look at an API server whose engine and worker were killed; their heartbeats are gone."""
    dead = process("engine", state=""), process("worker", state="")
    front = beats(api={"loop_s": 0.0})[:1]
    return make_healthy_sample(
        at_s, heartbeats=front, processes=(process("api"), *dead), metrics=None, health=health
    )


def test_an_engine_that_is_gone_is_asked_about_at_once() -> None:
    vigil = StallDetector()
    vigil.add_sample(make_healthy_sample(0.0, heartbeats=ALL_WELL, **AGENTS))
    vigil.add_sample(bereft(2.0))
    assert (vigil.plan_next_sample().after_s, vigil.plan_next_sample().ask) == (2.0, True)


def test_the_dead_do_not_rise_and_are_not_looked_at_again_and_again() -> None:
    vigil = StallDetector()
    vigil.add_sample(bereft(0.0))
    shown = detect_stalls(vigil, *(bereft(2.0 * n, 503) for n in range(1, 5)))
    assert [bool(item) for item in shown] == [False, False, True, True]
    assert [item.code for item in shown[2]] == ["api.unhealthy"]


def test_dismissed_stall_is_ignored_until_it_changes() -> None:
    vigil = StallDetector()
    *_, found = detect_stalls(vigil, *(make_healthy_sample(2.0 * n, **BLIND) for n in range(17)))
    assert [item.alternative for item in found] == ["idle"]
    vigil.dismiss(found)
    assert not any(
        detect_stalls(vigil, *(make_healthy_sample(34.0 + 15 * n, **BLIND) for n in range(60)))
    )
    assert vigil.plan_next_sample().after_s == ASK_S
    changed = {**BLIND, "metrics": Metrics(running=1, tokens=7)}
    shown = detect_stalls(
        vigil, *(make_healthy_sample(1000.0 + 2 * n, **changed) for n in range(17))
    )
    assert shown[-1]
    # Back where it was, it is not known any more.
    assert detect_stalls(vigil, *(make_healthy_sample(1100.0 + 2 * n, **BLIND) for n in range(17)))[
        -1
    ]


def test_compiling_is_waited_for_however_long_it_takes() -> None:
    vigil, shown = StallDetector(), []
    for number in range(60):
        # Compilers are looked for where it is asked.
        ask = vigil.samples and vigil.plan_next_sample().ask
        shown += vigil.add_sample(stuck(2.0 * number, compilers=("cc1plus",) if ask else ()))
    assert shown == []


def test_a_fresh_start_forgets() -> None:
    vigil = StallDetector()
    detect_stalls(
        vigil, *(make_healthy_sample(2.0 * n, heartbeats=HANDED, **AGENTS) for n in range(5))
    )
    assert vigil.row
    vigil.reset()
    assert not vigil.add_sample(make_healthy_sample(10.0, heartbeats=HANDED, **AGENTS))
    assert vigil.row == 0


@pytest.mark.parametrize("patience_s", [1.0, 10.0, 120.0])
def test_it_remembers_as_much_as_it_needs(patience_s: float) -> None:
    vigil = StallDetector(patience_s=patience_s)
    shown = detect_stalls(vigil, *(make_healthy_sample(2.0 * n, **BLIND) for n in range(400)))
    assert bool(shown[-1])
    assert len(vigil.samples) <= 3 * (patience_s + ASK_S) / 2 + 1
