"""The recording of steps, in real processes that are killed; the scheduler is a stand-in."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from vllmops.agent.recording import step_recorder
from vllmops.collect.agents.agent_client import open_agent
from vllmops.collect.agents.agent_files import read_heartbeat
from vllmops.model import step_recording
from vllmops.observe import step_recordings
from vllmops.rules.step_history import describe_recording_end
from vllmops.servers.discovery import Server

from ...support.children import Child, Spawn
from ...support.waiting import until

# vLLM's own takes a model; the live tests look at it.
SCHEDULER = """
import os, time, types
from vllmops.agent.hooks import vllm_objects as objects
from vllmops.agent.recording import step_recorder as recorder
from vllmops.agent.transport import unix_socket as service
recorder.SLOW_S = 60.0  # on a busy machine any write may take long
class Output:
    def __init__(self, requests, tokens):
        self.num_scheduled_tokens = dict.fromkeys(range(requests), 1)
        self.total_num_scheduled_tokens = tokens
class Scheduler:
    def __init__(self):
        self.current_step = 4700
        self.running, self.waiting, self.skipped_waiting = [1, 2, 3], [4], [5, 6]
        self.kv_cache_manager = types.SimpleNamespace(usage=0.5)
    def get_request_counts(self):
        return len(self.running), len(self.waiting) + len(self.skipped_waiting)
    def schedule(self, throttle_prefills=False):
        self.current_step += 1
        return Output(3, 512)
    def update_from_output(self, scheduler_output, model_runner_output):
        return {}
module = types.ModuleType("scheduler")
module.Scheduler = Scheduler
recorder.hook_scheduler(module)
recorder.hook_scheduler(module)
s = Scheduler()
def step(apart=0.02):
    time.sleep(apart)
    s.update_from_output(s.schedule(), None)
"""


@pytest.fixture
def engine(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> Child:
    child: Child = spawn()
    monkeypatch.setenv("VLLMOPS_HOME", str(child.home))
    child.run(SCHEDULER)
    return child


def list_recordings(child: Child) -> list[Path]:
    return sorted(child.home.glob(f"agents/*{step_recording.SUFFIX}"))


def after(child: Child) -> step_recording.StepsRecording:
    child.kill()
    kept = step_recordings.find_recordings_by_pid(str(child.process.pid))
    (found,) = (one for one in kept if one.pid == child.process.pid)
    assert not found.alive
    return found


def test_a_killed_engine_tells_its_last_steps(engine: Child) -> None:
    engine.run("for _ in range(5): step()")
    engine.run("time.sleep(0.02); s.schedule()")
    found = after(engine)
    assert [step.number for step in found.steps] == [4701, 4702, 4703, 4704, 4705, 4706]
    assert [step.is_complete for step in found.steps] == [True] * 5 + [False]
    last = found.open_step
    assert last is not None
    assert (last.number, last.phase, last.tokens, last.requests) == (4706, "executing", 512, 3)
    assert (last.running, last.waiting, last.deferred, last.kv_cache_usage) == (3, 1, 2, 0.5)
    assert abs(last.began_at - time.time()) < 60


def test_a_hang_inside_the_scheduler_is_told(engine: Child) -> None:
    engine.run("step()")
    engine.run(
        "module.Scheduler = type('Slow', (), {'schedule': lambda self: time.sleep(600),"
        " 'update_from_output': None, 'current_step': 9}); recorder.hook_scheduler(module);"
        " slow = module.Scheduler(); time.sleep(0.02)"
    )
    engine.send("slow.schedule()")
    until(
        lambda: (
            (open_ := step_recordings.read_live_recording(engine.process).open_step)
            and open_.number == 10
        )
    )
    last = after(engine).open_step
    assert last is not None
    assert (last.number, last.phase, last.tokens) == (10, "scheduling", 0)


def test_steps_that_overlap(engine: Child) -> None:
    """vLLM schedules the next step before it takes the output of the one before."""
    engine.run("first = s.schedule(); time.sleep(0.02); second = s.schedule()")
    engine.run("s.update_from_output(first, None)")
    engine.run("recorder.flush_recording(); recorder.flush_recording()")
    found = after(engine)
    assert [(step.number, step.is_complete) for step in found.steps] == [
        (4701, True),
        (4702, False),
    ]


def test_the_end_of_a_step_is_written_with_what_follows(engine: Child) -> None:
    """While requests are pending that is the next step, else a heartbeat, or nothing."""
    engine.run(
        "beat, recorder.flush_recording = recorder.flush_recording, int"
    )  # no heartbeat comes in between
    engine.run("step(); time.sleep(0.02); s.schedule()")
    assert [
        step.is_complete for step in step_recordings.read_live_recording(engine.process).steps
    ] == [
        True,
        False,
    ]
    engine.run("time.sleep(0.02); s.update_from_output(s.schedule(), None)")
    assert [
        step.is_complete for step in step_recordings.read_live_recording(engine.process).steps
    ] == [
        True,
        False,
        False,
    ]
    assert [step.is_complete for step in open_agent(engine.process).fetch_recording().steps] == [
        True,
        False,
        True,
    ]
    engine.run("recorder.flush_recording = beat")
    until(lambda: step_recordings.read_live_recording(engine.process).steps[-1].is_complete)
    engine.run(
        "s.running, s.waiting, s.skipped_waiting = [], [], []; recorder._recorder.open_steps = {}"
    )
    engine.run(
        "recorder._recorder.previous_unwritten_steps = recorder; step()"
    )  # a heartbeat has nothing to write
    assert step_recordings.read_live_recording(engine.process).steps[-1].is_complete


OTHER = """
import sys, threading
sys.setswitchinterval(60)  # only who lets go of the GIL loses it
turns = []
def other():
    while True:
        time.sleep(0)
        turns.append(1)
threading.Thread(target=other, daemon=True).start()
def meanwhile():
    before = len(turns)
    for _ in range(100):
        s.update_from_output(s.schedule(), None)
    return len(turns) - before
"""


def test_the_gil_is_kept(engine: Child) -> None:
    """Or the thread that sends the outputs of the last step runs first, and the worker waits."""
    engine.run("step()")
    engine.run(OTHER)
    engine.run("assert meanwhile() == 0")


# A disk that stands for a moment can't be had on every machine.
SLOW = """
import threading
recorder.SLOW_S = 0.25
real, writers = recorder._pwrite, []
def slow(*given):
    writers.append(threading.current_thread().name)
    time.sleep(0.3)
    return real(*given)
"""


def test_a_slow_write_is_the_only_one_that_the_engine_waits_for(engine: Child) -> None:
    engine.run("step()")
    engine.run(SLOW)
    engine.run("recorder._pwrite = slow; step()")
    written = engine.run("[step() for _ in range(5)]; out = writers.count('MainThread')")
    assert int(written) == 1
    numbers = list(range(4701, 4708))
    assert [step.number for step in open_agent(engine.process).fetch_recording().steps] == numbers
    engine.run("recorder.flush_recording(); recorder.flush_recording(); recorder.flush_recording()")
    assert [step.number for step in after(engine).steps] == numbers


def test_on_a_file_system_of_the_network_the_engine_writes_nothing(engine: Child) -> None:
    engine.run("recorder.LOCAL = (); recorder._pwrite = None; step(); step()")
    assert "not recorded" not in engine.run("out = objects.problems")
    assert [step.number for step in open_agent(engine.process).fetch_recording().steps] == [
        4701,
        4702,
    ]
    until(
        lambda: (
            [step.is_complete for step in step_recordings.read_live_recording(engine.process).steps]
            == [True, True]
        )
    )


def test_which_file_systems_are_of_this_machine(tmp_path: Path) -> None:
    assert step_recorder.is_local_filesystem(tmp_path)
    assert step_recorder.is_local_filesystem(Path("/dev/shm"))
    assert not step_recorder.is_local_filesystem(Path("/proc"))
    assert not step_recorder.is_local_filesystem(tmp_path / "nowhere")


def test_fast_steps_share_a_record(engine: Child) -> None:
    engine.run("for _ in range(3000): step(0)")
    engine.run("recorder.flush_recording(); recorder.flush_recording()")
    found = after(engine)
    assert sum(step.steps for step in found.steps) == 3000
    assert len(found.steps) < 1500
    assert all(step.is_complete for step in found.steps)
    assert found.steps[-1].number + found.steps[-1].steps - 1 == 7700


def test_record_of_several_steps_keeps_the_largest_usage(engine: Child) -> None:
    """The last step of a request schedules nothing, and its KV blocks are free."""

    def together() -> list[step_recording.Step]:  # a busy machine may take its time between them
        engine.run(
            "s.kv_cache_manager.usage = 0.5; step(); s.kv_cache_manager.usage = 0.0; step(0)"
        )
        engine.run("recorder.flush_recording(); recorder.flush_recording()")
        return [
            step
            for step in step_recordings.read_live_recording(engine.process).steps
            if step.steps == 2
        ]

    (found,) = until(together)
    assert found.kv_cache_usage == pytest.approx(0.5, abs=0.001)


def test_the_agent_tells_them_too(engine: Child) -> None:
    assert open_agent(engine.process).fetch_recording().head is None
    engine.run("step()")
    answer = open_agent(engine.process).fetch_recording()
    assert [step.number for step in answer.steps] == [4701]
    (path,) = list_recordings(engine)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_exception_of_vllm_passes_and_the_step_stays_open(engine: Child) -> None:
    engine.run("Output.total_num_scheduled_tokens = property(lambda self: 1 / 0)")
    out = engine.run(
        "Scheduler.update_from_output.__wrapped__\ntry:\n s.update_from_output(1, 2, 3)\n"
        "except TypeError as error: out = str(error)"
    )
    assert "positional argument" in out


def test_a_scheduler_of_another_shape_is_left_alone(engine: Child) -> None:
    out = engine.run(
        "Scheduler.get_request_counts = lambda self: 'odd'; out = type(s.schedule()).__name__"
    )
    assert out == "Output"
    assert "not recorded" in engine.run("out = objects.problems")
    assert engine.run("step(); out = recorder._recorder") == "None"


OWN = """
from vllmops.agent.state import engine
class Own(Scheduler):  # as of --scheduler-cls
    def update_from_output(self, *given):
        {update}
        request.num_computed_tokens += 8
own, request = Own(), types.SimpleNamespace(request_id="a", num_computed_tokens=0)
own.running, own.num_waiting_for_streaming_input = [request], 0
objects.track_object("scheduler", own)
for now in range(20):
    own.update_from_output(own.schedule(), None)
    out = engine.progress.observe_scheduler(float(now))[3], recorder.count_computed_tokens(own)
"""


@pytest.mark.parametrize(
    ("update", "computed"), [("pass", None), ("super().update_from_output(*given)", 20 * 512)]
)
def test_a_scheduler_of_somebody_s_own_makes_progress(
    engine: Child, update: str, computed: int | None
) -> None:
    assert engine.run(OWN.format(update=update)) == str((0.0, computed))


def test_a_fork_leaves_the_parents_recording_alone(engine: Child) -> None:
    engine.run("step()")
    engine.run("pid = os.fork()\nif not pid: step(); os._exit(0)\nos.waitpid(pid, 0); step()")
    assert len(list_recordings(engine)) == 2
    assert [step.number for step in after(engine).steps] == [4701, 4702]


def test_the_newest_recordings_stay_for_a_day(engine: Child, tmp_path: Path) -> None:
    engine.run("step()")
    (live,) = list_recordings(engine)
    now = time.time()
    ended = [live.with_name(f"{number}-1{step_recording.SUFFIX}") for number in range(900, 912)]
    for age, path in enumerate(ended, 1):
        path.touch(0o600)
        os.utime(path, (now - 3600 * age,) * 2)
    os.utime(live, (now - 90_000,) * 2)
    fifo = live.with_name(f"1-1{step_recording.SUFFIX}")
    os.mkfifo(fifo)
    link = live.with_name(f"2-1{step_recording.SUFFIX}")
    link.symlink_to(tmp_path / "other")
    step_recorder.remove_old_recordings(live.parent)
    assert set(list_recordings(engine)) == {live, fifo, link, *ended[: step_recorder.KEPT]}
    os.utime(ended[0], (now - 90_000,) * 2)
    step_recorder.remove_old_recordings(live.parent)
    assert not ended[0].exists()
    assert not (tmp_path / "other").exists()


def test_a_reader_takes_no_other_file(engine: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.run("step()")
    (path,) = list_recordings(engine)
    pid = str(engine.process.pid)
    engine.kill()
    path.chmod(0o622)
    assert step_recordings.find_recordings_by_pid(pid) == ()
    path.chmod(0o600)
    path.rename(path.with_name(f"{pid}-12{step_recording.SUFFIX}"))
    assert step_recordings.find_recordings_by_pid(pid) == ()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        assert step_recordings.find_recordings_by_pid(pid) == ()


def test_doctor_shows_a_dead_engine(engine: Child, vllmops: Any, monkeypatch: Any) -> None:
    engine.run("step(); step(); s.schedule()")
    monkeypatch.setenv("VLLMOPS_HOME", str(engine.home))
    engine.kill()
    pid = str(engine.process.pid)
    answer = vllmops("doctor", "--history", "-t", pid)
    assert answer.code == 0, answer
    assert "never ended" in answer.out
    assert answer.out.isascii() or "─" in answer.out
    answer = vllmops("doctor", "--history", "-t", pid, "--json")
    (found,) = answer.data["recordings"]
    assert (found["pid"], found["alive"]) == (engine.process.pid, False)
    assert len(found["steps"][0]) == len(answer.data["columns"])
    assert found["open"]["phase"] == "executing"
    none = str(2**22 + 1)  # more than any pid
    assert vllmops("doctor", "--history", "-t", none).code == 5


RANK = """
from vllmops.model.ranks import ServerMembership
standing = lambda: ServerMembership(servers=("instance x",), dp_rank={rank}, ranks="DP{rank}")
recorder.find_standing = service.find_standing = standing
"""


def test_every_rank_has_a_recording_even_a_killed_one(spawn: Spawn) -> None:
    ranks = [spawn() for _ in range(3)]
    for rank, child in enumerate(ranks):
        child.run(SCHEDULER)
        # Of a rank this small stand-in has no configuration of vLLM's.
        child.run(RANK.format(rank=rank if rank < 2 else 7).replace("x", "x" * (1 + rank // 2)))
        child.run("step(); time.sleep(0.02); s.schedule()")
    first, second, stranger = ranks
    second.kill()
    stranger.kill()

    def has_membership() -> bool:
        beat = open_agent(first.process) and read_heartbeat(first.process)
        return bool(beat and beat.heartbeat.standing.servers)

    until(has_membership)
    found = step_recordings.collect_history(Server(None, (first.process,))).recordings
    assert [(one.pid, one.alive) for one in found] == [
        (first.process.pid, True),
        (second.process.pid, False),
    ]
    assert [one.head and one.head.standing.ranks for one in found] == ["DP0", "DP1"]
    assert "has not ended for" in describe_recording_end(found[0])
    assert "never ended" in describe_recording_end(found[1])
