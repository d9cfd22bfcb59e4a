"""The verdict of a watch: what it publishes while a server plays its part; see test_watch.py."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.model.probe import ProbeResult, judge_state
from vllmops.model.server_snapshot import Gpu, ProcessState, ThreadTimeslices
from vllmops.model.step_recording import Step, StepsRecording
from vllmops.watch.liveness import LONG_S, is_computing
from vllmops.watch.watch_loop import Watch, WatchPlan
from vllmops.watch.watch_target import ServerPhase

from .test_watch_loop import FOLDER, Scene, beat, blind, idle, make_server_sample, stuck, well

SPIN = Path(__file__).parents[1] / "rules/stacks/mm-cache-eviction-spin.txt"

WAITING = """Process 20: VLLM::EngineCore
Thread 20 (idle): "MainThread"
    poll (zmq/sugar/poll.py:106)
    acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:864)
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:971)
    get_response (vllm/v1/executor/multiproc_executor.py:440)
    step (vllm/v1/engine/core.py:674)
    run_busy_loop (vllm/v1/engine/core.py:1555)
"""


class Said(NamedTuple):
    """What was published, and when."""

    at: float
    verdict: ProbeResult


def collect_probe_results(
    scene: Scene, for_s: float = 120.0, *, swapping: bool = False
) -> list[Said]:
    words: list[Said] = []
    Watch(
        scene,
        WatchPlan(FOLDER, for_s=for_s),
        lambda _: None,
        publish=lambda verdict, _: words.append(Said(scene.time, verdict)),
        swapping=lambda: swapping,
        now=lambda: scene.time,
        wait=scene.pass_,
    ).run()
    return words


def get_result_at(words: list[Said], seconds: float) -> ProbeResult:
    """The last one until then."""
    return [item.verdict for item in words if item.at <= seconds][-1]


def make_unready_sampler(why: str, role: str = "engine") -> Any:
    def make_unready_sample(at_s: float) -> Any:
        pulses = [
            msgspec.structs.replace(
                pulse, heartbeat=msgspec.structs.replace(pulse.heartbeat, unready=why)
            )
            if pulse.role == role
            else pulse
            for pulse in stuck(20.0)(at_s).heartbeats
        ]
        return make_server_sample(at_s, heartbeats=tuple(pulses))

    return make_unready_sample


def hangs() -> Any:
    """Stacks that show for sure that a worker is stuck."""
    loop = "    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:930)\n"
    inside = "    all_reduce (torch/distributed/distributed_c10d.py:2900)\n"
    text = "".join(
        f'Process 2{rank}: VLLM::Worker_TP{rank}\nThread 2{rank} (active): "MainThread"\n{deep}'
        f"    all_reduce (vllm/distributed/parallel_state.py:520)\n{loop}"
        for rank, deep in enumerate((inside, ""))
    )
    return parse_stacks(text).samples * 3


def make_busy_worker_sampler(state: str = "R", share: float = 1.0) -> Any:
    """An engine that stands while its worker computes."""

    def make_busy_worker_sample(at_s: float) -> Any:
        found = stuck(20.0)(at_s)
        states = tuple(
            msgspec.structs.replace(process, cpu_s=share * at_s, state=state)
            if process.role == "worker"
            else process
            for process in found.processes
        )
        return msgspec.structs.replace(found, processes=states)

    return make_busy_worker_sample


def make_starved_worker_sampler(turn_s: float, share: float = 0.02) -> Any:
    """The same where others have the processors nearly all the time; it runs so long at once."""

    def make_starved_worker_sample(at_s: float) -> Any:
        ran_s = share * at_s
        turns = ThreadTimeslices(ran_s, 0.8 * at_s, int(ran_s / turn_s))
        found = make_busy_worker_sampler("S", share)(at_s)
        states = tuple(msgspec.structs.replace(state, main=turns) for state in found.processes)
        return msgspec.structs.replace(found, processes=states)

    return make_starved_worker_sample


def forward(*inner: str) -> Any:
    """Stacks of a worker that computes; an engine waits for it."""
    text = "".join(
        f'Process {pid}: {title}\nThread {pid} (active): "MainThread"\n'
        + "".join(f"    {frame}\n" for frame in frames)
        for pid, title, frames in (
            (20, "VLLM::EngineCore", ("get_response (vllm/v1/executor/multiproc_executor.py:9)",
                                      "run_busy_loop (vllm/v1/engine/core.py:9)")),
            (30, "VLLM::Worker", (*inner, "forward (vllm/model_executor/models/llama.py:9)",
                                  "execute_model (vllm/v1/worker/gpu_model_runner.py:9)",
                                  "worker_busy_loop (vllm/v1/executor/multiproc_executor.py:9)")),
        )
    )  # fmt: skip
    return parse_stacks(text).samples * 3


def make_recording(tokens: int, pid: int = 20, **fields: Any) -> StepsRecording:
    """An engine's short steps, and one of so many tokens that does not end."""
    known: dict[str, Any] = {
        "steps": 1,
        "tokens": 1,
        "requests": 1,
        "running": 1,
        "waiting": 0,
        "deferred": 0,
    }
    known |= {"kv_cache_usage": 0.1, **fields}
    done = [
        Step(number=n, began_at=n, seconds=0.02, ended=1, phase="ended", **known) for n in range(7)
    ]
    last = {**known, "tokens": tokens}
    done.append(Step(number=7, began_at=7, seconds=0.0, ended=0, phase="executing", **last))
    done = [*done[:-1] * 5, done[-1]]
    return StepsRecording(role="engine", pid=pid, steps=tuple(done))


@pytest.mark.parametrize(
    ("looks", "stacks"),
    [
        (make_busy_worker_sampler("S", 0.02), hangs()),
        (make_starved_worker_sampler(0.00005), hangs()),
    ],
    ids=["blocked", "it only wakes up to look"],
)
def test_stacks_of_what_does_not_compute_are_a_proof(looks: Any, stacks: Any) -> None:
    words = collect_probe_results(Scene(looks, stacks=stacks))
    assert min(item.at for item in words if not item.verdict.live) <= 20 + 30


@pytest.mark.parametrize(
    ("looks", "stacks"),
    [
        (make_starved_worker_sampler(0.003), hangs()),
        (make_starved_worker_sampler(0.00005, 0.0001), hangs()),
        (make_starved_worker_sampler(0.00005, 0.0001), parse_stacks(SPIN.read_text()).samples * 3),
        (make_busy_worker_sampler("R", 0.0), parse_stacks(SPIN.read_text()).samples * 3),
        (make_busy_worker_sampler(), parse_stacks(WAITING).samples * 3),
    ],
    ids=[
        "gets little",
        "gets next to nothing",
        "seems to have a known defect, and gets next to nothing",
        "seems to have a known defect, and gets nothing",
        "an engine waits for a worker that computes",
    ],
)
def test_stacks_of_what_would_compute_are_none(looks: Any, stacks: Any) -> None:
    words = collect_probe_results(Scene(looks, stacks=stacks))
    assert not get_result_at(words, 60).ready
    assert all(item.verdict.live for item in words)


def test_a_process_that_has_left_is_none_that_computes() -> None:
    """The verdict on an engine that waits is about its workers, as they were seen last."""

    def make_exiting_process_sample(at_s: float) -> Any:
        found = stuck(20.0)(at_s)
        gone = ProcessState(role="other", pid=99, create_time=1.0, state="S")
        there = (*found.processes, *([gone] if at_s < 30 else []))
        return msgspec.structs.replace(found, processes=there)

    looks = tuple(map(make_exiting_process_sample, (26.0, 28.0, 30.0)))
    snapshot = msgspec.structs.replace(
        Scene(make_exiting_process_sample).take_snapshot(
            [], 10.0, threading.Event(), needs_all_evidence=True
        ),
        samples=looks,
    )
    names_nobody = SimpleNamespace(subject="the server")
    assert not is_computing(snapshot, names_nobody)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_step_that_is_too_long_for_its_size_is_not_live(state: str) -> None:
    seen = make_busy_worker_sampler(state, 1.0 if state == "R" else 0.0)
    gpu = Gpu(index=0, utilization=1.0)
    words = collect_probe_results(
        Scene(seen, stacks=forward(), recordings=[make_recording(10)], gpus=[gpu])
    )
    (red, *_) = [item for item in words if not item.verdict.live]
    assert red.at <= 20 + 30
    assert "step 7 with 10 tokens has not ended" in red.verdict.reason


@pytest.mark.parametrize(
    ("scene", "why"),
    [
        ({"recordings": [make_recording(1150)]}, "a long prompt"),
        ({"recordings": []}, "no recording"),
        (
            {"recordings": [make_recording(10), make_recording(1150, 21)]},
            "another rank has a long prompt",
        ),
        ({"recordings": [make_recording(10, deferred=1)]}, "a transfer"),
        ({"stacks": ()}, "no stacks"),
        ({"stacks": forward("make_cubin (triton/backends/nvidia/compiler.py:1)")}, "it compiles"),
        ({"stacks": forward("load_binary (triton/compiler/compiler.py:1)")}, "it loads"),
        (
            {"stacks": forward("_execute_mm_encoder (vllm/v1/worker/gpu_model_runner.py:1)")},
            "image",
        ),
        ({"looks": make_busy_worker_sampler(share=0.05)}, "others have the processors"),
        ({"looks": make_starved_worker_sampler(0.003)}, "others have them all the time"),
        ({"looks": make_busy_worker_sampler("D", 0.0)}, "it waits for a disk"),
        ({"looks": make_busy_worker_sampler("?", 0.0)}, "it is on another machine"),
        ({"looks": make_busy_worker_sampler("?")}, "it was on another machine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_may_be_working_stays_live_for_two_minutes(
    scene: dict[str, Any], why: str
) -> None:
    known = {
        "looks": make_busy_worker_sampler(),
        "stacks": forward(),
        "recordings": [make_recording(10)],
        **scene,
    }
    words = collect_probe_results(Scene(**known), for_s=20 + LONG_S + 40)
    assert get_result_at(words, 20 + LONG_S - 5).live
    assert not get_result_at(words, 20 + LONG_S + 35).live


def test_a_stalled_engine_without_cpu_use_is_dead_within_30_s() -> None:
    words = collect_probe_results(
        Scene(
            make_busy_worker_sampler("S", 0.0), stacks=forward(), recordings=[make_recording(1150)]
        )
    )
    (red, *_) = [item for item in words if not item.verdict.live]
    assert red.at <= 20 + 30


def test_a_healthy_server_is_live_ready_and_started() -> None:
    words = collect_probe_results(Scene())
    assert {item.verdict for item in words} == {ProbeResult(live=True, ready=True, started=True)}
    assert len(words) >= 60  # each look


def test_a_proven_stall_is_not_live_once_the_evidence_is_kept() -> None:
    words = collect_probe_results(Scene(stuck(20.0, until_s=80.0), stacks=hangs()))
    (first, *_) = [item for item in words if not item.verdict.ready]
    assert first.at <= 34  # before the evidence is collected
    assert first.verdict.live
    assert "no token for" in first.verdict.reason
    (red, *_) = [item for item in words if not item.verdict.live]
    assert red.at <= 20 + 30
    assert red.verdict.evidence == "bundles/1.tar.gz"
    assert get_result_at(words, 78).live is False
    assert get_result_at(words, 90) == ProbeResult(live=True, ready=True, started=True)


def test_equal_stacks_prove_no_hang_while_processes_compute() -> None:
    """A step of a long prompt stays at one place, too; a known defect is one all the same."""

    def make_computing_sample(at_s: float) -> Any:
        seen = stuck(20.0)(at_s)
        states = tuple(
            msgspec.structs.replace(process, cpu_s=0.5 * at_s) for process in seen.processes
        )
        return msgspec.structs.replace(seen, processes=states)

    words = collect_probe_results(
        Scene(make_computing_sample, stacks=hangs()), for_s=20 + LONG_S + 40
    )
    assert not get_result_at(words, 60).ready
    assert get_result_at(words, 20 + LONG_S - 5).live
    assert not get_result_at(words, 20 + LONG_S + 35).live
    spins = parse_stacks(SPIN.read_text()).samples * 3
    words = collect_probe_results(Scene(make_computing_sample, stacks=spins))
    assert not get_result_at(words, 20 + 30).live


def test_without_evidence_or_proof_it_stays_live() -> None:
    words = collect_probe_results(Scene(stuck(20.0), stacks=hangs(), disk_full=True))
    assert all(item.verdict.live for item in words)
    assert not get_result_at(words, 60).ready
    # No proof by the stacks: a step of a long prompt looks the same.
    words = collect_probe_results(Scene(stuck(20.0)), for_s=20 + LONG_S + 40)
    assert get_result_at(words, 20 + LONG_S - 5).live
    assert not get_result_at(words, 60).ready
    assert not get_result_at(words, 20 + LONG_S + 35).live


def test_a_machine_that_swaps_proves_nothing() -> None:
    words = collect_probe_results(Scene(stuck(20.0), stacks=hangs()), for_s=400, swapping=True)
    assert all(item.verdict.live for item in words)
    assert not get_result_at(words, 60).ready


@pytest.mark.parametrize("why", ["draining", "paused", "asleep"])
def test_an_engine_that_drains_pauses_or_sleeps_is_live_but_not_ready(why: str) -> None:
    words = collect_probe_results(Scene(make_unready_sampler(why), stacks=hangs()), for_s=400)
    assert all(item.verdict.live for item in words)
    assert not any(item.verdict.ready for item in words)
    assert why in get_result_at(words, 10).reason


def test_a_store_that_refuses_is_not_ready_and_excuses_no_stall() -> None:
    why = "its store is unavailable"
    words = collect_probe_results(
        Scene(make_unready_sampler(why, "api"), stacks=hangs()), for_s=100
    )
    assert get_result_at(words, 10) == ProbeResult(live=True, ready=False, started=True, reason=why)
    assert not get_result_at(words, 90).live


def test_a_doubtful_stall_is_not_told_before_it_is_confirmed() -> None:
    scene = Scene(lambda at_s: blind(at_s) if at_s >= 20 else well(at_s), stacks=[idle()] * 3)
    assert all(item.verdict.ready for item in collect_probe_results(scene, for_s=300))


def test_a_life() -> None:
    phases = {30.0: ServerPhase.OVER}
    words = collect_probe_results(Scene(phases=phases, final=True))
    assert get_result_at(words, 10).ready
    assert get_result_at(words, 40) == ProbeResult(
        live=False, ready=False, started=False, reason="it has failed"
    )

    def loads(at_s: float) -> Any:
        if at_s >= 40:
            return well(at_s)
        return make_server_sample(at_s, heartbeats=(beat("api"), beat("engine")))

    words = collect_probe_results(Scene(loads))
    assert get_result_at(words, 30) == ProbeResult(
        live=True, ready=False, started=False, reason="it is starting: it does not answer yet"
    )
    assert get_result_at(words, 50).ready


def test_a_lost_node_is_not_ready() -> None:
    scene = Scene()
    scene.note = "node b does not answer"
    (verdict,) = {item.verdict for item in collect_probe_results(scene)}
    assert verdict == ProbeResult(
        live=True, ready=False, started=True, reason="node b does not answer"
    )


@pytest.mark.parametrize(
    ("state", "answers"),
    [
        ("starting", (True, False, False)),
        ("ready", (True, True, True)),
        ("stopping", (True, False, True)),
        ("stopped", (False, False, False)),
        ("failed", (False, False, False)),
    ],
)
def test_states(state: str, answers: tuple[bool, ...]) -> None:
    found = judge_state(state, "loading")
    assert found[:3] == answers
    assert [found.has_passed(kind) for kind in ("liveness", "readiness", "startup")] == list(
        answers
    )
    assert found.format_answer("readiness").startswith("ready" if answers[1] else "not ready: ")
