"""What is a stall and what is none; the looks are made up, tests/live has real hangs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllmops.model.server_snapshot import ProcessHeartbeat, ServerSample
from vllmops.model.vllm_metrics import Metrics
from vllmops.rules.progress import (
    Stall,
    can_confirm_stall,
    find_stalls,
    is_making_progress,
    is_possibly_stalled,
)

from .sample_servers import PIDS, QUIET, make_healthy_sample, process, pulse

BUSY = msgspec.structs.replace(QUIET, running=2, waiting=1)


def beats(**roles: dict[str, Any]) -> tuple[ProcessHeartbeat, ...]:
    """Heartbeats of all processes; fields of a role's differ as given."""
    return tuple(pulse(role, **roles.get(role, {})) for role in PIDS)


def engine(still_s: float, **fields: Any) -> dict[str, Any]:
    """An engine whose two requests have stood still."""
    return {"running": 1, "waiting": 1, "still_s": still_s, **fields}


def repeat_sample(seconds: float, every_s: float = 2.0, **fields: Any) -> list[ServerSample]:
    """Looks that are all alike."""
    return [
        make_healthy_sample(number * every_s, **fields)
        for number in range(int(seconds / every_s) + 1)
    ]


def states(**roles: str) -> tuple[Any, ...]:
    return tuple(process(role, roles.get(role, "S")) for role in PIDS)


def test_progress_needs_fresh_heartbeats_and_recent_steps() -> None:
    assert is_making_progress(beats())
    assert is_making_progress(beats(engine=engine(1.0)))
    assert not is_making_progress(beats(engine=engine(5.0)))
    assert not is_making_progress(beats(worker={"age_s": 4.0}))
    assert not is_making_progress(beats(engine={"still_s": None}))
    assert not is_making_progress([])


def test_a_dead_process_hides_no_other_with_its_pid() -> None:
    """As another node may have one."""
    dead = msgspec.structs.replace(process("engine", "Z"), node="one")
    there = msgspec.structs.replace(pulse("engine", **engine(40.0)), node="two")
    found = find_stalls([make_healthy_sample(0.0, heartbeats=(there,), processes=(dead,))], 10.0)
    assert [stall.code for stall in found] == ["engine.no-progress"]


BLIND: dict[str, Any] = {"heartbeats": (), "metrics": BUSY}
HANDED = beats(api={"engine_requests": 3})

STALLED: dict[str, tuple[list[ServerSample], list[tuple[str, str]]]] = {
    "no token for ten seconds": (
        [make_healthy_sample(0.0, heartbeats=beats(engine=engine(9.9)))],
        [("engine.no-progress", "engine 20")],
    ),
    "while others come and go, by the engine's own word": (
        [
            make_healthy_sample(
                0.0, heartbeats=beats(api={"engine_requests": 9}, engine=engine(8.0))
            ),
            make_healthy_sample(
                2.0, heartbeats=beats(api={"engine_requests": 7}, engine=engine(10.0))
            ),
        ],
        [("engine.no-progress", "engine 20")],
    ),
    "handed over, and nothing comes to the scheduler, while others come and give up": (
        [
            make_healthy_sample(
                2.0 * n,
                heartbeats=beats(api={"engine_requests": 3 + n % 2, "oldest_request_id": "a"}),
            )
            for n in range(7)
        ],
        [("engine.unreached", "engine 20")],
    ),
    "handed over, and nothing comes to the scheduler": (
        repeat_sample(10, heartbeats=HANDED),
        [("engine.unreached", "engine 20")],
    ),
    "a worker stopped": (
        [make_healthy_sample(0.0, heartbeats=beats(engine=engine(12.0), worker={"age_s": 12.0}))],
        [("engine.no-progress", "engine 20"), ("process.no-python", "worker 30")],
    ),
    "an engine stopped": (
        [
            make_healthy_sample(
                0.0, heartbeats=beats(api={"engine_requests": 1}, engine={"age_s": 12.0})
            )
        ],
        [("process.no-python", "engine 20")],
    ),
    "an engine stopped in the middle of a step": (
        [
            make_healthy_sample(
                0.0, heartbeats=beats(api={"engine_requests": 1}, engine=engine(1.0, age_s=12.0))
            )
        ],
        [("process.no-python", "engine 20")],
    ),
    "an API server stopped: nobody can come": (
        [make_healthy_sample(0.0, heartbeats=beats(api={"age_s": 11.0}))],
        [("process.no-python", "api 10")],
    ),
    "an event loop that stands": (
        # What it handed over has been answered, and nobody reads the answers.
        repeat_sample(12, heartbeats=beats(api={"loop_s": 11.0, "engine_requests": 3})),
        [("api.silent", "api 10")],
    ),
    "without agents, an API server that takes connections only": (
        repeat_sample(10, heartbeats=(), metrics=None, health=0),
        [("api.silent", "api 10")],
    ),
    "a request that stays in the front end": (
        [make_healthy_sample(0.0, heartbeats=beats(api={"rendering_s": 11.0}))],
        [("api.no-progress", "api 10")],
    ),
    "a dead engine below an API server that lives": (
        repeat_sample(10, processes=states(engine=""), heartbeats=beats(engine=engine(30.0))),
        [("process.ended", "engine 20")],
    ),
    "a dead API server above an engine that lives": (
        repeat_sample(10, processes=states(api=""), metrics=None, health=None),
        [("process.ended", "api 10")],
    ),
    "zombies": (
        repeat_sample(10, processes=states(engine="Z", worker="Z")),
        [("process.ended", "engine 20, worker 30")],
    ),
    "without agents, no counter moves": (
        repeat_sample(30, **BLIND),
        [("engine.no-progress", "the server")],
    ),
}

FINE: dict[str, list[ServerSample]] = {
    "nothing seen yet": [],
    "idle for long": repeat_sample(600),
    "busy": [
        make_healthy_sample(
            0.0, heartbeats=beats(api={"engine_requests": 2}, engine=engine(0.0)), metrics=BUSY
        )
    ],
    "a long step": [make_healthy_sample(0.0, heartbeats=beats(engine=engine(9.0)))],
    # The agent takes no time then: see tests/agent/recording/test_heartbeat.py.
    "paused, or asleep": repeat_sample(
        60, heartbeats=beats(api={"engine_requests": 2}, engine=engine(0.0))
    ),
    "a running gauge that nobody counts down": repeat_sample(60, metrics=BUSY),
    "handed over a moment ago": repeat_sample(8, heartbeats=HANDED),
    "others each time": [
        make_healthy_sample(2.0 * number, heartbeats=beats(api={"engine_requests": 1 + number % 2}))
        for number in range(20)
    ],
    "as many each time, and another is the oldest": [
        make_healthy_sample(
            2.0 * number,
            heartbeats=beats(api={"engine_requests": 1, "oldest_request_id": str(number)}),
        )
        for number in range(20)
    ],
    "as many each time, and steps": [
        make_healthy_sample(
            2.0 * number,
            heartbeats=beats(api={"engine_requests": 1}, engine={"current_step": number}),
        )
        for number in range(20)
    ],
    "an engine that is stopped and has nothing to do": repeat_sample(
        60, heartbeats=beats(engine={"age_s": 99})
    ),
    "a beat that is late on a busy machine": [
        make_healthy_sample(0.0, heartbeats=beats(engine=engine(1, age_s=4)))
    ],
    "a beat of a process that is gone": [
        make_healthy_sample(0.0, heartbeats=beats(worker={"age_s": 50}, engine=engine(0.0))),
        make_healthy_sample(
            2.0, heartbeats=beats(worker={"age_s": 52}), processes=states(worker="")
        ),
    ],
    "compiling": [
        make_healthy_sample(0.0, heartbeats=beats(engine=engine(40.0)), compilers=("cc1plus",))
    ],
    "compiling a moment ago": [
        make_healthy_sample(0.0, heartbeats=beats(engine=engine(40.0)), compilers=("nvcc",)),
        make_healthy_sample(2.0, heartbeats=beats(engine=engine(42.0))),
    ],
    "loading: nothing listens yet": repeat_sample(300, heartbeats=(), metrics=None, health=None),
    "loading, with agents": repeat_sample(
        300, heartbeats=beats(engine={"still_s": None}), metrics=None, health=None
    ),
    "not reachable from here": repeat_sample(60, heartbeats=(), metrics=None, health=None),
    "never asked": repeat_sample(60, metrics=None, health=None),
    "a blocked moment": [make_healthy_sample(0.0, heartbeats=beats(api={"loop_s": 4.0}))],
    "a picture that comes slowly": [
        make_healthy_sample(0.0, heartbeats=beats(api={"rendering_s": 9.0}))
    ],
    "an orderly end: the engine goes first": [
        *repeat_sample(4, processes=states(engine="", worker="")),
        make_healthy_sample(6.0, processes=states(api="", engine="", worker="")),
    ],
    "an end in which the API server goes first": [
        *repeat_sample(8, processes=states(api="")),
        make_healthy_sample(10.0, processes=states(api="", engine="", worker="")),
    ],
    "all of it gone": repeat_sample(60, processes=states(api="", engine="", worker="")),
    "a helper that ended": repeat_sample(60, processes=(*states(), process("other", ""))),
    "without agents, idle": repeat_sample(300, heartbeats=()),
    "without agents, a while without a token": repeat_sample(28, **BLIND),
    "without agents, asleep": repeat_sample(
        300, heartbeats=(), metrics=msgspec.structs.replace(BUSY, awake=0)
    ),
    "without agents, a token now and then": [
        make_healthy_sample(
            2.0 * n, heartbeats=(), metrics=msgspec.structs.replace(BUSY, tokens=n // 10)
        )
        for n in range(200)
    ],
    "without agents, requests end": [
        make_healthy_sample(
            2.0 * n, heartbeats=(), metrics=msgspec.structs.replace(BUSY, finished=n // 10)
        )
        for n in range(200)
    ],
    "counters without a gauge": repeat_sample(300, heartbeats=(), metrics=Metrics(tokens=5)),
}


@pytest.mark.parametrize("name", STALLED)
def test_stalls(name: str) -> None:
    looks, expected = STALLED[name]
    assert [(item.code, item.subject) for item in find_stalls(looks)] == expected
    assert all(item.since_s >= 10 for item in find_stalls(looks))
    assert find_stalls(looks, patience_s=100) == []


@pytest.mark.parametrize("name", FINE)
def test_harmless_samples_yield_no_stall(name: str) -> None:
    assert find_stalls(FINE[name]) == []


def test_health_is_no_sign_of_life() -> None:
    assert find_stalls(
        [make_healthy_sample(0.0, heartbeats=beats(engine=engine(20.0)), health=200)]
    )


def test_a_livelock_is_told_by_its_steps() -> None:
    looks = [
        make_healthy_sample(
            2.0 * n, heartbeats=beats(engine=engine(20.0 + 2 * n, current_step=1000 * n))
        )
        for n in range(3)
    ]
    (found,) = find_stalls(looks)
    assert "steps go on" in found.evidence
    assert "steps go on" not in find_stalls(looks[-1:])[0].evidence


def test_steps_before_it_stood_still_are_no_livelock() -> None:
    looks = [
        make_healthy_sample(
            2.0 * n,
            heartbeats=beats(engine=engine(max(2.0 * n - 20, 0.0), current_step=min(n, 10))),
        )
        for n in range(20)
    ]
    (found,) = find_stalls(looks)
    assert "steps go on" not in found.evidence


def doubtful(looks: list[ServerSample]) -> Stall:
    (found,) = find_stalls(looks)
    assert found.mark
    return found


def test_idle_stacks_refute_a_stall_seen_only_in_metrics() -> None:
    found = doubtful(repeat_sample(30, **BLIND))
    verdicts = ("idle", "hang", "maybe", "unknown", None)
    assert [found.is_confirmed(verdict, ()) for verdict in verdicts] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_front_end_stall_is_confirmed_only_by_stacks() -> None:
    found = doubtful([make_healthy_sample(0.0, heartbeats=beats(api={"rendering_s": 60.0}))])
    verdicts = ("hang", "idle", "maybe", "unknown", None)
    assert [found.is_confirmed(verdict, ()) for verdict in verdicts] == [True, *[False] * 4]


def test_requests_may_be_with_a_data_parallel_engine_elsewhere() -> None:
    named = (*states()[:1], process("engine", title="VLLM::EngineCore_DP0"))
    found = doubtful(repeat_sample(10, heartbeats=HANDED, processes=named))
    assert [found.is_confirmed(verdict, ()) for verdict in ("idle", "hang")] == [False, True]


def test_a_heartbeat_that_can_not_be_written_is_no_stopped_process() -> None:
    found = doubtful([make_healthy_sample(0.0, heartbeats=beats(api={"age_s": 60.0}))])
    assert [found.is_confirmed(None, shown) for shown in ({"api 10"}, {"engine 20"})] == [
        False,
        True,
    ]


def test_marks_tell_the_same_from_another() -> None:
    def mark(at_s: float, tokens: int) -> str:
        shown = msgspec.structs.replace(BUSY, tokens=tokens)
        return doubtful(repeat_sample(at_s, heartbeats=(), metrics=shown)).mark

    assert mark(30, 1) == mark(60, 1) != mark(30, 2)

    def oldest(now: float, since_s: float) -> str:
        (own, *others) = beats(api={"rendering_s": since_s})
        beat = msgspec.structs.replace(own.heartbeat, monotonic=now)
        changed = msgspec.structs.replace(own, heartbeat=beat)
        return doubtful([make_healthy_sample(0.0, heartbeats=(changed, *others))]).mark

    assert oldest(100.0, 20.0) == oldest(130.0, 50.0) != oldest(131.0, 20.0)


def test_suspicious_before_it_is_a_stall() -> None:
    looks = repeat_sample(4, heartbeats=beats(engine=engine(3.0)))
    assert (find_stalls(looks), is_possibly_stalled(looks)) == ([], True)
    assert not is_possibly_stalled(repeat_sample(4))
    assert not is_possibly_stalled(repeat_sample(4, heartbeats=beats(engine=engine(0.0))))
    assert not is_possibly_stalled(repeat_sample(4, heartbeats=beats(api={"rendering_s": 1.0})))


def test_stall_that_more_samples_cannot_confirm_is_not_awaited() -> None:
    metrics = repeat_sample(4, heartbeats=(), metrics=BUSY)
    assert (
        is_possibly_stalled(metrics),
        can_confirm_stall(metrics, 15.0),
        can_confirm_stall(metrics, 60.0),
    ) == (
        True,
        False,
        True,
    )
    assert can_confirm_stall(repeat_sample(4, heartbeats=beats(engine=engine(3.0))), 15.0)
    assert can_confirm_stall(repeat_sample(4, heartbeats=(), metrics=BUSY, health=0), 15.0)
    assert not can_confirm_stall(repeat_sample(0, heartbeats=(), health=0), 15.0)


def test_a_server_that_drains_has_no_dead_engine() -> None:
    def make_unready_samples(unready: str) -> list[ServerSample]:
        api = pulse("api", unready=unready)
        return [
            make_healthy_sample(float(at_s), health=503, heartbeats=(api,)) for at_s in range(6)
        ]

    assert [stall.code for stall in find_stalls(make_unready_samples(""))] == ["api.unhealthy"]
    assert find_stalls(make_unready_samples("draining")) == []
