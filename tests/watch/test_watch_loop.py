"""The loop of a watch: its time, and what it looks at, are made up here.

tests/commands/test_watch.py watches real processes, tests/live real hangs.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmops.actions.action import Outcome
from vllmops.actions.cache_repair import RepairReport
from vllmops.actions.healing import HealResult
from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.commands.watch import render_event
from vllmops.model.agent_state import Heartbeat
from vllmops.model.cache_repairs import CacheChange, CacheDefect, CacheRepair, ProcessRepair
from vllmops.model.caches import CacheSample, CacheSnapshot, LruCache, ProcessCaches
from vllmops.model.server_snapshot import (
    Gpu,
    Machine,
    ProcessHeartbeat,
    ProcessState,
    ServerSample,
    ServerSnapshot,
    ThreadTimeslices,
)
from vllmops.model.stacks import DumpOptions, Frame, ProcessStacks, StacksSnapshot, ThreadStack
from vllmops.model.step_recording import StepsRecording
from vllmops.model.vllm_metrics import Metrics
from vllmops.model.watch_events import WatchEvent
from vllmops.rules.progress import Stall
from vllmops.servers.discovery import Server
from vllmops.servers.record import InstanceRecord, InstanceState
from vllmops.support.errors import VllmopsError
from vllmops.watch.watch_loop import DOUBT_S, HEALS, MENDING_S, Watch, WatchPlan
from vllmops.watch.watch_target import ServerPhase

PIDS = {"api": 10, "engine": 20, "worker": 30}
FOLDER = Path("bundles")
Look_ = Callable[[float], ServerSample]


def beat(role: str, **fields: Any) -> ProcessHeartbeat:
    shown = Heartbeat(monotonic=1.0, sequence=1, pid=PIDS[role], start_ticks=1, role=role, **fields)
    return ProcessHeartbeat(role=role, pid=PIDS[role], age_s=0.5, heartbeat=shown)


def make_server_sample(at_s: float, still_s: float = 0.0, **fields: Any) -> ServerSample:
    waiting = 1 if still_s else 0
    pulses = (
        beat("api", engine_requests=waiting, loop_s=0.0),
        beat("engine", running=0, waiting=waiting, still_s=still_s, current_step=7),
        beat("worker"),
    )
    states = tuple(
        ProcessState(role=role, pid=pid, create_time=1.0, state="S") for role, pid in PIDS.items()
    )
    return ServerSample(at_s=at_s, **{"heartbeats": pulses, "processes": states, **fields})


def well(at_s: float) -> ServerSample:
    return make_server_sample(at_s)


def stuck(since_s: float, until_s: float = float("inf")) -> Look_:
    """An engine that stands from one moment to another."""
    return lambda at_s: make_server_sample(
        at_s, at_s - since_s if since_s <= at_s < until_s else 0.0
    )


def blind(at_s: float) -> ServerSample:
    """A server without agents whose gauge says that a request runs."""
    return make_server_sample(at_s, heartbeats=(), metrics=Metrics(running=1, tokens=5))


def idle() -> StacksSnapshot:
    """An engine that waits for requests, as py-spy shows it."""
    names = (
        "Condition.wait",
        "Queue.get",
        "EngineCoreProc._process_input_queue",
        "EngineCoreProc.run_busy_loop",
    )
    inside = ("process_input_sockets", "process_output_sockets")

    def thread(name: str, *functions: str) -> ThreadStack:
        frames = tuple(Frame(f, "/x/vllm/core.py", "vllm/core.py", 1) for f in functions)
        return ThreadStack(name, "idle", owns_gil=False, tid=None, frames=frames)

    threads = (thread("MainThread", *names), *(thread(f"{n}", "poll", n) for n in inside))
    process = ProcessStacks(
        role="engine", pid=20, create_time=1.0, title="VLLM::EngineCore", threads=threads
    )
    return StacksSnapshot(captured_at=1.0, seconds=0.1, options=DumpOptions(), processes=(process,))


class Scene:
    """A server that plays a part; time passes where somebody waits.

    Args:
        looks: what is seen at a time.
        phases: from when on it is where; up at first.
        takes_s: how long evidence takes.
        stacks, recordings, gpus: as in the evidence.
        ghosts: whether a cache has a ghost key.
        disk_full: whether evidence can't be written.
    """

    def __init__(
        self,
        looks: Look_ = well,
        phases: dict[float, ServerPhase] | None = None,
        takes_s: float = 5.0,
        stacks: Sequence[StacksSnapshot] = (),
        *,
        ghosts: bool = False,
        disk_full: bool = False,
        final: bool = False,
        failed: bool = False,
        curable: bool = False,
        recordings: Sequence[StepsRecording] = (),
        gpus: Sequence[Gpu] = (),
    ) -> None:
        self.gpus = tuple(gpus)
        self.recordings = tuple(recordings)
        self.curable = curable
        self.server = Server(name="demo", processes=(), port=8000, model="m")
        self.looks = looks
        self.phases = phases or {}
        self.takes_s = takes_s
        self.stacks = tuple(stacks)
        self.ghosts = ghosts
        self.disk_full = disk_full
        self.is_final = final
        self.has_failed = failed
        self.note = ""
        self.down_reason = "it failed: why" if failed else "stopping"
        self.time = 0.0
        self.asked: list[float] = []
        self.captured: list[float] = []
        self.done: list[str] = []
        self.lost: list[Outcome] = []

    def read_phase(self) -> ServerPhase:
        past = [phase for at, phase in self.phases.items() if at <= self.time]
        return past[-1] if past else ServerPhase.UP

    def take_sample(self, *, ask: bool) -> ServerSample:
        if ask:
            self.asked.append(self.time)
        return self.looks(self.time)

    def prepare_evidence(self) -> None:
        """Nothing here takes long."""

    def take_snapshot(
        self,
        samples: Sequence[ServerSample],
        patience_s: float,
        stop: threading.Event,
        *,
        needs_all_evidence: bool,
    ) -> ServerSnapshot:
        self.captured.append(self.time)
        self.time += self.takes_s
        caches = CacheSnapshot(server="demo", samples=[sample(ghosts=self.ghosts)] * 3)
        return ServerSnapshot(
            taken_at=1.0,
            vllmops="1",
            server="demo",
            samples=(*samples, self.looks(self.time)),
            caches=caches,
            stacks=self.stacks,
            recordings=self.recordings,
            machine=Machine(memory_total=4, memory_available=4, gpus=self.gpus),
        )

    def save_evidence(self, folder: Path) -> Path:
        if self.disk_full:
            raise VllmopsError("bundle.not-written", "the disk is full", "choose another place")
        self.done.append("save")
        return folder / f"{len(self.done)}.tar.gz"

    def repair_caches(self) -> RepairReport:
        self.done.append("repair")
        change = CacheChange(defect=CacheDefect.GHOST_KEYS, count=2)
        fixed = CacheRepair(name="LRU", side="P1", changes=[change])
        process = ProcessRepair(role="engine", pid=20, dry_run=False, caches=[fixed], seconds=0.1)
        self.ghosts, self.looks = False, well
        return RepairReport([process], [], CacheSnapshot(server="demo", samples=[]))

    def heal_server(self, *, only_without_stall: bool = False) -> HealResult:
        self.done.append("sweep" if only_without_stall else "heal")
        if only_without_stall:
            self.time += 3.0  # as long as a busy server may take for three looks
            return HealResult(self.lost, [], [])
        if not self.curable:
            return HealResult([], [], [])
        self.looks = well
        one = Outcome(
            action="admission",
            process="engine 20",
            subject="a",
            evidence="too large",
            done=True,
            did="x",
        )
        return HealResult([one], [], [])

    def run_sweep(self, work: Callable[[], HealResult]) -> Future[HealResult]:
        done: Future[HealResult] = Future()
        done.set_result(work())
        return done

    def restart(self) -> None:
        self.done.append("restart")

    def pass_(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds


def sample(*, ghosts: bool) -> CacheSample:
    cache = LruCache(
        kind="mm-lru",
        side="P1",
        name="LRU",
        digest="",
        order_only=["gone"] if ghosts else [],
        pinned_keys=[],
        pinned_only=[],
        entries=0,
        bytes=0,
        sum_bytes=0,
        capacity_bytes=9,
        hits=0,
        queries=0,
    )
    process = ProcessCaches(role="engine", pid=20, parent=10, caches=[cache], unfinished_requests=1)
    return CacheSample(taken_at=1.0, processes=[process], gaps=[], quiet=False)


def run_watch(scene: Scene, for_s: float = 120.0, **plan: Any) -> list[WatchEvent]:
    """What a watch of it tells."""
    shown: list[WatchEvent] = []
    whole = WatchPlan(FOLDER, for_s=for_s, **plan)
    diary = Watch(
        scene,
        whole,
        shown.append,
        now=lambda: scene.time,
        wait=scene.pass_,
        call_in_background=scene.run_sweep,
    ).run()
    assert list(diary.events) == shown
    return shown


def kinds(shown: Sequence[WatchEvent]) -> list[str]:
    return [item.event for item in shown]


def test_a_healthy_server_causes_no_events() -> None:
    scene = Scene()
    assert run_watch(scene, for_s=600) == []
    assert scene.time == 600
    assert (scene.asked, scene.captured) == ([0.0], [])


def test_a_stall_is_captured_told_and_told_to_be_over() -> None:
    scene = Scene(stuck(20.0, until_s=60.0))
    stalled, recovered = shown = run_watch(scene)
    assert kinds(shown) == ["stalled", "recovered"]
    assert 30 <= scene.captured[0] <= 34
    assert scene.done == ["save"]
    assert (stalled.number, stalled.code, stalled.subject) == (1, "engine.no-progress", "engine 20")
    assert stalled.bundle == "bundles/1.tar.gz"
    assert "1 waiting requests, no token for" in stalled.evidence
    assert stalled.next_step
    assert (stalled.server, stalled.url, stalled.model) == ("demo", "http://127.0.0.1:8000", "m")
    # With the time that the evidence took.
    assert 15 <= stalled.seconds <= 20
    assert recovered.number == 1
    assert 40 <= recovered.seconds <= 42
    assert recovered.text == f"demo makes progress again after {recovered.seconds:.0f} s"


def test_a_stall_names_the_rank_that_is_stuck_and_who_waits_for_it() -> None:
    """Of two ranks one sleeps before the collective that the other is in."""
    loop = "    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:930)\n"
    inside = "    all_reduce (torch/distributed/distributed_c10d.py:2900)\n"
    text = "".join(
        f'Process 2{rank}: VLLM::Worker_TP{rank}\nThread 2{rank} (active): "MainThread"\n{deep}'
        f"    all_reduce (vllm/distributed/parallel_state.py:520)\n{loop}"
        for rank, deep in enumerate((inside, ""))
    )
    stalled, *_ = run_watch(Scene(stuck(20.0), stacks=parse_stacks(text).samples * 3))
    assert (stalled.subject, stalled.victims) == ("Worker_TP1 21", ("Worker_TP0 20",))
    assert "  waiting for it: Worker_TP0 20" in render_event(stalled)


def test_each_stall_is_captured_once() -> None:
    def twice(at_s: float) -> ServerSample:
        return stuck(200.0)(at_s) if at_s >= 200 else stuck(20.0, until_s=150.0)(at_s)

    scene = Scene(twice)
    shown = run_watch(scene, for_s=600)
    assert kinds(shown) == ["stalled", "recovered", "stalled"]
    assert [item.number for item in shown] == [1, 1, 2]
    assert len(scene.captured) == 2


def test_a_stall_that_ends_during_its_capture_is_still_reported() -> None:
    scene = Scene(stuck(0.0, until_s=12.0), takes_s=20.0)
    assert kinds(run_watch(scene)) == ["stalled", "recovered"]


def test_once_ends_with_the_first_stall() -> None:
    scene = Scene(stuck(20.0))
    assert kinds(run_watch(scene, once=True)) == ["stalled"]
    assert scene.time < 40
    scene = Scene()
    assert run_watch(scene, for_s=60, once=True) == []
    assert scene.time == 60


def test_a_full_disk_is_told_and_watching_goes_on() -> None:
    scene = Scene(stuck(20.0, until_s=60.0), disk_full=True)
    trouble, stalled, recovered = shown = run_watch(scene, restart=True)[:3]
    assert kinds(shown) == ["trouble", "stalled", "trouble"]
    assert "the disk is full" in trouble.text
    assert trouble.next_step
    assert stalled.bundle == ""
    assert "not restarted" in recovered.text
    assert scene.done == []


def test_a_restart_only_when_asked_for_and_after_the_evidence() -> None:
    scene = Scene(stuck(20.0))
    run_watch(scene)
    assert scene.done == ["save"]
    scene = Scene(stuck(20.0))
    assert kinds(run_watch(scene, restart=True)) == ["stalled", "restarting"]
    assert scene.done == ["save", "restart"]


def test_no_restart_of_what_goes_on_while_the_evidence_is_taken() -> None:
    scene = Scene(stuck(10.0, until_s=24.5), takes_s=12.0)
    assert kinds(run_watch(scene, restart=True)) == ["stalled", "recovered"]
    assert scene.done == ["save"]


@pytest.mark.parametrize("how", ["goes on", "was restarted", "stops"])
def test_no_restart_of_what_has_changed_while_a_receiver_took_its_time(how: str) -> None:
    scene = Scene(stuck(20.0))
    record = InstanceRecord(
        name="demo",
        model="m",
        command=(),
        environment={},
        directory="/",
        host="127.0.0.1",
        port=8000,
        detached=True,
        created_at=1.0,
        state=InstanceState.READY,
        run="1",
    )
    scene.server = dataclasses.replace(scene.server, record=record)
    shown: list[WatchEvent] = []

    def flush() -> None:
        scene.time += 25.0
        if how == "goes on":
            scene.looks = well
        elif how == "was restarted":
            new = msgspec.structs.replace(record, run="2")
            scene.server = dataclasses.replace(scene.server, record=new)
        else:
            scene.phases = {0.0: ServerPhase.AWAY}

    Watch(
        scene,
        WatchPlan(FOLDER, for_s=90, restart=True),
        shown.append,
        flush=flush,
        now=lambda: scene.time,
        wait=scene.pass_,
    ).run()
    assert kinds(shown)[:3] == ["stalled", "restarting", "trouble"]
    assert "not restarted" in shown[2].text
    assert scene.done == ["save"]


def test_events_are_flushed_before_a_restart() -> None:
    scene = Scene(stuck(20.0))
    plan = WatchPlan(FOLDER, for_s=60, restart=True)
    Watch(
        scene,
        plan,
        lambda event: scene.done.append(event.event),
        flush=lambda: scene.done.append("flush"),
        now=lambda: scene.time,
        wait=scene.pass_,
    ).run()
    assert scene.done == ["save", "stalled", "restarting", "flush", "restart"]


def test_a_repair_that_the_evidence_proves() -> None:
    scene = Scene(stuck(20.0), ghosts=True)
    shown = run_watch(scene, repair=True, restart=True)
    # It goes on, so there is nothing to restart.
    assert kinds(shown) == ["stalled", "repaired", "recovered"]
    assert scene.done == ["save", "repair"]
    assert shown[1].text == "demo: engine 20: 2 ghost keys repaired"
    assert "mm-cache.ghost-keys" in shown[0].findings
    # Not without being asked, nor without a proof.
    for scene, request in ((Scene(stuck(20.0), ghosts=True), False), (Scene(stuck(20.0)), True)):
        assert kinds(run_watch(scene, repair=request)) == ["stalled"]
        assert scene.done == ["save"]


def test_a_repair_that_does_not_help_is_followed_by_a_restart() -> None:
    scene = Scene(stuck(20.0), ghosts=True)
    repair = scene.repair_caches

    def in_vain() -> RepairReport:
        report = repair()
        scene.looks = stuck(20.0)
        return report

    scene.repair_caches = in_vain  # type: ignore[method-assign]
    began = scene.time
    assert kinds(run_watch(scene, repair=True, restart=True)) == [
        "stalled",
        "repaired",
        "restarting",
    ]
    assert scene.done == ["save", "repair", "restart"]
    assert scene.time - began > MENDING_S


def test_a_stall_is_healed_once_its_evidence_is_kept() -> None:
    scene = Scene(stuck(20.0), curable=True)
    events = run_watch(scene, heal=True, restart=True)
    assert kinds(events) == ["stalled", "healed", "recovered"]
    assert scene.done == ["save", "heal"]
    assert events[1].text == "demo: admission, engine 20, a: too large; x"


def test_failed_healing_is_retried_or_followed_by_a_restart() -> None:
    scene = Scene(stuck(20.0))
    assert kinds(run_watch(scene, for_s=600, heal=True)) == [
        "stalled",
        "healed",
        "healed",
        "healed",
    ]
    assert scene.done == ["save", "heal", "heal", "heal"]
    scene = Scene(stuck(20.0))
    run_watch(scene, heal=True, restart=True)
    assert scene.done[:3] == ["save", "heal", "restart"]


def uploads(looks: Look_) -> Look_:
    """A server as elsewhere, in which at any time a slow upload has been for some seconds."""

    def make_upload_sample(at_s: float) -> ServerSample:
        api, *others = looks(at_s).heartbeats
        taking = msgspec.structs.replace(api.heartbeat, monotonic=at_s, rendering_s=5.0 + at_s % 4)
        return make_server_sample(
            at_s, heartbeats=(msgspec.structs.replace(api, heartbeat=taking), *others)
        )

    return make_upload_sample


def test_a_stall_is_over_however_slow_the_uploads_are_that_go_on() -> None:
    stalled, recovered = shown = run_watch(Scene(uploads(stuck(20.0, until_s=50.0))))
    assert kinds(shown) == ["stalled", "recovered"]
    assert stalled.code == "engine.no-progress"
    assert 30 <= recovered.seconds <= 34


def test_an_upload_that_began_before_a_stall_does_not_prolong_it() -> None:
    def half_open(at_s: float) -> ServerSample:
        api, *others = stuck(20.0, until_s=50.0)(at_s).heartbeats
        taking = msgspec.structs.replace(
            api.heartbeat, monotonic=at_s, rendering_s=max(at_s - 19, 0)
        )
        return make_server_sample(
            at_s, heartbeats=(msgspec.structs.replace(api, heartbeat=taking), *others)
        )

    shown = run_watch(Scene(half_open))
    assert kinds(shown) == ["stalled", "recovered"]
    assert 30 <= shown[1].seconds <= 34


def test_a_long_step_of_another_engine_does_not_prolong_a_stall() -> None:
    def make_two_engines_sample(at_s: float) -> ServerSample:
        other = Heartbeat(
            monotonic=1.0, sequence=1, pid=21, start_ticks=1, role="engine", running=1, still_s=4.0
        )
        pulse = ProcessHeartbeat(role="engine", pid=21, age_s=0.5, heartbeat=other)
        return make_server_sample(
            at_s, heartbeats=(*stuck(20.0, until_s=50.0)(at_s).heartbeats, pulse)
        )

    assert kinds(run_watch(Scene(make_two_engines_sample))) == ["stalled", "recovered"]


def test_a_heartbeat_that_stops_during_a_stall_does_not_end_it() -> None:
    def make_silent_engine_sample(at_s: float) -> ServerSample:
        api, engine, worker = stuck(20.0)(at_s).heartbeats
        age_s = at_s - 40 if at_s > 43 else 0.5
        engine = msgspec.structs.replace(engine, age_s=age_s)
        return make_server_sample(at_s, heartbeats=(api, engine, worker))

    assert kinds(run_watch(Scene(make_silent_engine_sample))) == ["stalled"]


def test_a_short_loss_of_contact_is_no_recovery() -> None:
    """As a server on another machine, while the gateway before it restarts."""

    def make_outage_sample(at_s: float) -> ServerSample:
        shown = stuck(20.0, until_s=70.0)(at_s)
        if not 40 <= at_s < 48:
            return shown
        states = (msgspec.structs.replace(item, state="?") for item in shown.processes)
        return make_server_sample(at_s, heartbeats=(), processes=tuple(states))

    stalled, recovered = shown = run_watch(Scene(make_outage_sample))
    assert kinds(shown) == ["stalled", "recovered"]
    assert 50 <= recovered.seconds <= 54
    assert stalled.number == recovered.number


def test_a_request_that_is_proven_to_be_stuck_before_the_engine_is_a_stall_as_long_as_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_stuck_request_sample(at_s: float) -> ServerSample:
        age_s = at_s - 20 if 20 <= at_s < 60 else 5.0 + at_s % 4
        taking = beat("api", engine_requests=0, loop_s=0.0, rendering_s=age_s).heartbeat
        taking = msgspec.structs.replace(taking, monotonic=at_s)
        pulse = ProcessHeartbeat(role="api", pid=PIDS["api"], age_s=0.5, heartbeat=taking)
        return make_server_sample(at_s, heartbeats=(pulse, *well(at_s).heartbeats[1:]))

    monkeypatch.setattr(Stall, "is_confirmed", lambda *_: True)
    stalled, recovered = shown = run_watch(Scene(make_stuck_request_sample), for_s=65)
    assert kinds(shown) == ["stalled", "recovered"]
    assert stalled.code == "api.no-progress"
    assert 39 <= recovered.seconds <= 43


def make_progress_sample(at_s: float) -> ServerSample:
    """An engine that gets on."""
    pulses = (
        beat("api", engine_requests=2, loop_s=0.0),
        beat("engine", running=2, waiting=0, still_s=0.0),
    )
    return make_server_sample(at_s, heartbeats=pulses)


def test_a_request_that_is_lost_while_others_go_on_is_healed_without_a_stall() -> None:
    scene = Scene(make_progress_sample)
    assert kinds(run_watch(scene, for_s=60)) == []
    assert scene.done == []
    run_watch(scene, for_s=60, heal=True)
    assert set(scene.done) == {"sweep"}
    assert 4 <= len(scene.done) <= 6
    scene = Scene(uploads(make_progress_sample))
    run_watch(scene, for_s=60, heal=True)
    assert scene.done.count("sweep") >= 4
    scene = Scene(make_progress_sample)
    scene.lost = [Outcome(action="zombies", process="engine 20", subject="a", evidence="one-sided",
                          done=False, did="x", reason="it is still there")]  # fmt: skip
    shown = run_watch(scene, for_s=3600, heal=True)
    assert set(kinds(shown)) == {"healed"}
    assert len(shown) < 10  # what can't be healed is not told again and again
    idle = Scene()
    run_watch(idle, for_s=600, heal=True)
    assert idle.done == []


def test_a_sweep_that_waits_for_an_agent_delays_no_check() -> None:
    class Slow(Scene):
        """An agent that does not answer for 15 s."""

        def run_sweep(self, work: Callable[[], HealResult]) -> Future[HealResult]:
            self.done.append("sweep")
            return running

        def take_sample(self, *, ask: bool) -> ServerSample:
            if self.time > 27 and not running.done():
                running.set_result(HealResult([], [], []))
            return super().take_sample(ask=ask)

    running: Future[HealResult] = Future()
    scene = Slow(lambda at_s: make_progress_sample(at_s) if at_s < 12 else stuck(12.0)(at_s))
    run_watch(scene, for_s=40, heal=True)
    assert scene.captured
    assert scene.captured[0] <= 12 + 14
    assert scene.done.count("sweep") == 1  # none beside one that runs
    assert "heal" in scene.done


def test_a_look_that_takes_long_delays_the_next_one_by_no_more() -> None:
    class Slow(Scene):
        """Its API server is blocked, so that ``/health`` times out."""

        def take_sample(self, *, ask: bool) -> ServerSample:
            self.time += 2.0 if ask else 0.0
            return super().take_sample(ask=ask)

    scene = Slow(stuck(20.0))
    run_watch(scene)
    assert scene.captured[0] < 34


def test_a_server_that_stalls_again_and_again_is_healed_as_long_as_that_helps() -> None:
    class Again(Scene):
        """Each time it is healed it stalls a minute later."""

        def heal_server(self, *, only_without_stall: bool = False) -> HealResult:
            found, self.looks = super().heal_server(), stuck(self.time + 60)
            return found

    scene = Again(stuck(20.0), curable=True)
    shown = run_watch(scene, for_s=2400, heal=True)
    assert scene.done.count("heal") > HEALS
    assert "trouble" not in kinds(shown)


def test_without_agents_an_idle_engine_is_left_in_peace() -> None:
    scene = Scene(blind, stacks=[idle()] * 3)
    assert run_watch(scene, for_s=3600) == []
    # One look at its stacks, and the metrics seldom.
    assert len(scene.captured) == 1
    assert len(scene.asked) < 3600 / 15 + 30


def test_without_agents_a_stall_is_one_unless_stacks_contradict() -> None:
    scene = Scene(blind)
    (stalled,) = run_watch(scene)
    assert (stalled.event, stalled.subject) == ("stalled", "the server")


def mute(since_s: float, until_s: float, waited: float) -> Look_:
    """An API server whose heartbeat does not come from one moment to another.

    Args:
        since_s, until_s: the moments.
        waited: the share of time in which others have its processor.
    """

    def make_late_heartbeat_sample(at_s: float) -> ServerSample:
        late_s = at_s - since_s if since_s <= at_s < until_s else 0.5
        found = make_server_sample(at_s)
        pulses = (msgspec.structs.replace(found.heartbeats[0], age_s=late_s), *found.heartbeats[1:])
        states = tuple(
            msgspec.structs.replace(state, main=ThreadTimeslices(0.0, waited * at_s, 0))
            for state in found.processes
        )
        return msgspec.structs.replace(found, heartbeats=pulses, processes=states)

    return make_late_heartbeat_sample


@pytest.mark.parametrize(
    ("until_s", "waited", "told"),
    [(500.0, 0.0, True), (500.0, 0.9, True), (44.0, 0.0, False), (70.0, 0.9, False)],
    ids=["for good", "others have its processor for good", "for a while", "others had it"],
)
def test_a_heartbeat_that_is_late_is_no_proof(until_s: float, waited: float, told: bool) -> None:
    """It has come when the evidence is there, or the machine had no time for it."""
    scene = Scene(mute(30.0, until_s, waited))
    codes = [event.code for event in run_watch(scene, for_s=200)]
    assert codes == (["process.no-python"] if told else [])


def test_doubts_cost_no_more_than_a_look_a_minute() -> None:
    # Each time another request is the oldest, and stays for a while.
    def slow(at_s: float) -> ServerSample:
        api = beat("api", engine_requests=0, loop_s=0.0, rendering_s=8.0 + at_s % 20)
        return make_server_sample(
            at_s, heartbeats=(api, beat("engine", running=0, waiting=0, still_s=0.0))
        )

    scene = Scene(slow, takes_s=1.0)
    assert run_watch(scene, for_s=600) == []
    assert 2 <= len(scene.captured) <= 600 / DOUBT_S + 1


def test_a_compiler_that_shows_in_the_evidence() -> None:
    def make_compiling_sample(at_s: float) -> ServerSample:
        known = at_s < 200 and scene.asked and scene.asked[-1] == at_s
        known = known or (scene.captured and at_s < 200)
        return msgspec.structs.replace(stuck(0.0)(at_s), compilers=("nvcc",) if known else ())

    scene = Scene(make_compiling_sample)
    (stalled,) = run_watch(scene, for_s=300, interval_s=15.0, checks=1)
    assert stalled.event == "stalled"
    assert scene.time >= 200


def test_a_server_that_goes_and_comes() -> None:
    phases = {
        40.0: ServerPhase.AWAY,
        50.0: ServerPhase.OVER,
        100.0: ServerPhase.AWAY,
        120.0: ServerPhase.UP,
    }
    scene = Scene(stuck(20.0, until_s=60.0), phases)
    assert kinds(run_watch(scene)) == ["stalled", "away", "ended", "away", "ready"]
    assert len(scene.captured) == 1


def test_a_server_that_fails_leaves_evidence() -> None:
    scene = Scene(well, {40.0: ServerPhase.OVER}, final=True, failed=True)
    (failed,) = run_watch(scene)
    assert (failed.event, failed.bundle) == ("failed", "bundles/1.tar.gz")
    assert "it failed: why" in failed.text
    assert scene.time < 50
    scene = Scene(well, {40.0: ServerPhase.OVER}, final=True)
    assert kinds(run_watch(scene)) == ["ended"]


def test_a_node_that_does_not_answer_is_told_once() -> None:
    def cut(at_s: float) -> ServerSample:
        scene.note = "node 10.0.0.2 does not answer" if at_s > 10 else ""
        return well(at_s)

    scene = Scene(cut)
    (shown,) = run_watch(scene)
    assert (shown.event, shown.text) == ("trouble", "demo: node 10.0.0.2 does not answer")


def test_events_contain_no_prompts_and_keys() -> None:
    scene = Scene(well, {40.0: ServerPhase.OVER}, final=True, failed=True)
    scene.down_reason = (
        "ValueError: The prompt 'tell PLANTED a story' of api_key=PLANTED is too long"
    )
    (failed,) = run_watch(scene)
    assert "PLANTED" not in repr(failed)
    assert failed.text.endswith("The prompt [redacted] of api_key=[redacted] is too long")


def test_a_stall_that_a_restart_ends_is_not_told_to_recover() -> None:
    phases = {40.0: ServerPhase.AWAY, 60.0: ServerPhase.UP}
    scene = Scene(stuck(20.0, until_s=50.0), phases)
    assert kinds(run_watch(scene, restart=True)) == ["stalled", "restarting", "away", "ready"]


def test_a_suspension_of_the_watch_is_no_stall() -> None:
    scene = Scene(
        lambda at_s: make_server_sample(at_s, heartbeats=HANDED if at_s < 8 or at_s > 60 else CALM)
    )
    wait = scene.pass_

    def sleepy(seconds: float) -> None:
        wait(seconds if scene.time < 8 or scene.time > 60 else 55.0)

    scene.pass_ = sleepy  # type: ignore[method-assign]
    run_watch(scene, for_s=80)
    # What was seen before counts no more.
    assert not [at for at in scene.captured if at < 70]


CALM = (beat("api", engine_requests=0), beat("engine", running=0, waiting=0, still_s=0.0))
HANDED = (beat("api", engine_requests=2), beat("engine", running=0, waiting=0, still_s=0.0))


def test_it_can_be_stopped_at_any_time() -> None:
    stop = threading.Event()
    scene = Scene(stuck(20.0))
    watch = Watch(
        scene,
        WatchPlan(FOLDER),
        lambda _: stop.set(),
        stop=stop,
        now=lambda: scene.time,
        wait=scene.pass_,
    )
    assert watch.run().incident_count == 1
    assert scene.done == ["save"]


@pytest.mark.parametrize("verdict", ["idle", "nothing"])
def test_idle_stacks_refute_a_stall_seen_in_metrics(verdict: str) -> None:
    scene = Scene(blind, stacks=[idle()] * 3 if verdict == "idle" else ())
    assert bool(run_watch(scene)) == (verdict != "idle")


def test_a_look_that_fails_ends_no_watch() -> None:
    """Whatever it raises: a stall after that is told as any other."""

    def odd(at_s: float) -> ServerSample:
        if at_s < 30:
            raise RuntimeError("can't start new thread")
        return stuck(40.0)(at_s)

    shown = run_watch(Scene(odd))
    assert kinds(shown) == ["trouble", "stalled"]
    assert "can't start new thread" in shown[0].text
