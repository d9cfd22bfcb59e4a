"""The heartbeat, on real files that go wrong."""

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from vllmops.agent.hooks import vllm_objects
from vllmops.agent.recording import heartbeat, step_recorder
from vllmops.agent.recording.heartbeat import HeartbeatWriter
from vllmops.agent.state import engine
from vllmops.agent.transport import unix_socket
from vllmops.model.agent_state import BEAT_BYTES, Heartbeat

from ...support.waiting import until


def beat(sequence: int, now: float) -> Heartbeat:
    return Heartbeat(monotonic=now, sequence=sequence, pid=1, start_ticks=2, role="engine")


def test_always_the_same_length(tmp_path: Path) -> None:
    heart = HeartbeatWriter(tmp_path / "1.beat", beat)
    for sequence in (0, 10**15, 3):
        heart.write_heartbeat(sequence)
        content = heart.path.read_bytes()
        assert len(content) == BEAT_BYTES
        assert content.rstrip().endswith(b"}")


def test_a_beat_that_is_too_long_goes_without_the_oldest_request(tmp_path: Path) -> None:
    def make_long_heartbeat(sequence: int, now: float) -> Heartbeat:
        return msgspec.structs.replace(
            beat(sequence, now), oldest_request_id="x" * 2000, unready="draining"
        )

    heart = HeartbeatWriter(tmp_path / "1.beat", make_long_heartbeat)
    heart.write_heartbeat(7)
    shown = msgspec.json.decode(heart.path.read_bytes(), type=Heartbeat)
    assert (shown.sequence, shown.unready, shown.oldest_request_id) == (7, "draining", "")


def test_half_of_a_surrogate_pair_stops_no_heartbeat(tmp_path: Path) -> None:
    """JSON can hold it, so a client's request can have it as its id."""

    def odd(sequence: int, now: float) -> Heartbeat:
        return msgspec.structs.replace(beat(sequence, now), oldest_request_id="cmpl-\ud800-ü")

    heart = HeartbeatWriter(tmp_path / "1.beat", odd)
    heart.write_heartbeat(7)
    shown = msgspec.json.decode(heart.path.read_bytes(), type=Heartbeat)
    assert (shown.sequence, shown.oldest_request_id) == (7, "cmpl-\\ud800-ü")


def test_a_beat_is_never_cut(tmp_path: Path) -> None:
    def longer(sequence: int, now: float) -> Heartbeat:
        unready = "x" * 2000 if sequence else ""
        return msgspec.structs.replace(beat(sequence, now), unready=unready)

    heart = HeartbeatWriter(tmp_path / "1.beat", longer)
    heart.write_heartbeat(0)
    heart.write_heartbeat(1)
    assert msgspec.json.decode(heart.path.read_bytes(), type=Heartbeat).sequence == 0


def test_a_client_s_long_request_id_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(name: str) -> str:
        processor = SimpleNamespace(request_states={name: None})
        client = SimpleNamespace(output_processor=processor)
        monkeypatch.setattr(vllm_objects, "find_latest", lambda _: client)
        return engine.find_oldest_request_id()

    one, other = (oldest(f"chatcmpl-{'x' * 600}-{end}") for end in ("0a", "0b"))
    assert len(one) == len(other) == 64
    assert one != other
    assert oldest("chatcmpl-1") == "chatcmpl-1"


def test_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_INTERVAL_S", 0.01)
    heart = HeartbeatWriter(tmp_path / "1.beat", beat)
    heart.start()
    first = heart.path.read_bytes()
    until(lambda: heart.path.read_bytes() != first)
    heart.stop()


def test_a_full_disk_is_survived() -> None:
    heart = HeartbeatWriter(Path("/dev/full"), beat)
    with pytest.raises(OSError, match="No space left"):
        os.pwrite(heart.fd, b"x", 0)
    heart.write_heartbeat(1)


def test_a_removed_directory_is_survived(tmp_path: Path) -> None:
    heart = HeartbeatWriter(tmp_path / "agents.beat", beat)
    shutil.rmtree(tmp_path)
    heart.write_heartbeat(1)


def test_a_beat_that_can_not_be_made_is_survived(tmp_path: Path) -> None:
    def raise_attribute_error(sequence: int, now: float) -> Heartbeat:
        raise AttributeError("another shape")

    heart = HeartbeatWriter(tmp_path / "1.beat", raise_attribute_error)
    heart.write_heartbeat(1)
    assert heart.path.read_bytes() == b""


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "1.beat").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        HeartbeatWriter(tmp_path / "1.beat", beat)


class Scheduler:
    """What `Progress` looks at of vLLM's."""

    def __init__(self) -> None:
        self.running: list[SimpleNamespace] = []
        self.waiting: list[SimpleNamespace] = []
        self.current_step = 0
        self.num_waiting_for_streaming_input = 0


def test_progress_is_tokens_not_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's own takes a model; the live tests look at it.
    scheduler = Scheduler()
    monkeypatch.setattr(
        vllm_objects, "find_latest", lambda kind: scheduler if kind == "scheduler" else None
    )
    progress = engine.ProgressTracker()
    assert progress.observe_scheduler(100.0) == (0, 0, 0, 0.0)
    assert progress.observe_scheduler(200.0)[3] == 0.0, "nobody waits"
    request = SimpleNamespace(request_id="a", num_computed_tokens=5)
    scheduler.waiting.append(request)
    assert progress.observe_scheduler(201.0) == (0, 0, 1, 0.0)
    scheduler.current_step = 1000
    assert progress.observe_scheduler(211.0) == (1000, 0, 1, 10.0), "steps that schedule nothing"
    scheduler.running.append(scheduler.waiting.pop())
    assert progress.observe_scheduler(212.0)[3] == 0.0, "it is scheduled"
    assert progress.observe_scheduler(213.0)[3] == 1.0
    request.num_computed_tokens += 1
    assert progress.observe_scheduler(214.0)[3] == 0.0, "it got a token"
    scheduler.running.clear()
    assert progress.observe_scheduler(300.0)[3] == 0.0


def test_requests_that_arrive_and_give_up_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load there is always somebody."""
    scheduler, tokens = Scheduler(), 0
    monkeypatch.setattr(
        vllm_objects, "find_latest", lambda kind: scheduler if kind == "scheduler" else None
    )
    monkeypatch.setattr(step_recorder, "count_computed_tokens", lambda _: tokens)
    progress = engine.ProgressTracker()
    progress.observe_scheduler(100.0)
    for second in range(20):
        scheduler.waiting = [
            SimpleNamespace(request_id=f"{second} {n}") for n in range(second % 3 + 1)
        ]
        assert progress.observe_scheduler(200.0 + second)[3] == second
    tokens = 1
    assert progress.observe_scheduler(220.0)[3] == 0.0
    scheduler.waiting.clear()
    assert progress.observe_scheduler(230.0)[3] == 0.0
    scheduler.waiting.append(SimpleNamespace(request_id="late"))
    assert progress.observe_scheduler(240.0)[3] == 0.0, "it has just come"
    assert progress.observe_scheduler(241.0)[3] == 1.0


def test_a_session_whose_user_says_nothing_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    monkeypatch.setattr(vllm_objects, "find_latest", lambda _: scheduler)
    progress = engine.ProgressTracker()
    scheduler.waiting.append(SimpleNamespace(request_id="talk"))
    scheduler.num_waiting_for_streaming_input = 1
    assert progress.observe_scheduler(100.0) == (0, 0, 1, 0.0)
    assert progress.observe_scheduler(200.0) == (0, 0, 1, 0.0)
    scheduler.waiting.append(SimpleNamespace(request_id="ask"))
    assert progress.observe_scheduler(201.0)[3] == 0.0
    assert progress.observe_scheduler(211.0)[3] == 10.0


def test_turns_tell_a_blocked_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = engine.EventLoopMonitor()
    assert turns.measure_blocked_s(1.0) is None, "no front end here"

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(engine, "require_front_end", lambda: (None, loop))
        assert turns.measure_blocked_s(10.0) == 0.0
        assert turns.measure_blocked_s(25.0) == 15.0, "nothing has run between the two"
        await asyncio.sleep(0.01)
        assert turns.measure_blocked_s(26.0) == 0.0
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert turns.measure_blocked_s(30.0) is None, "the loop is closed"


def test_an_engine_client_of_another_shape_leaves_the_rest_of_a_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = SimpleNamespace(output_handler=object(), vllm_config=SimpleNamespace())
    monkeypatch.setattr(
        vllm_objects, "find_latest", lambda kind: client if "client" in kind else None
    )
    beat = unix_socket.make_heartbeat(1, 1.0)
    assert (beat.pid, beat.loop_s) == (os.getpid(), None)


def test_a_beat_that_can_not_be_made_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_INTERVAL_S", 0.01)
    beats = 0

    def raise_attribute_error(sequence: int, now: float) -> Heartbeat:
        nonlocal beats
        beats += 1
        raise AttributeError("another shape")

    heart = HeartbeatWriter(tmp_path / "1.beat", raise_attribute_error)
    heart.start()
    until(lambda: beats >= 5)
    heart.stop()
    assert [item.message for item in caplog.records if "another shape" in item.message] != []
    assert sum("another shape" in item.message for item in caplog.records) == 1
