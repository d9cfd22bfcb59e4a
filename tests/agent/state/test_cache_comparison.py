"""The two looks, with stand-ins for vLLM's client and engine; tests/live has the real ones."""

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import msgspec
import pytest

from vllmops.agent.hooks.request_gate import Arrival, Gate
from vllmops.agent.state import cache_comparison, engine
from vllmops.model.cache_comparison import CompareRequest
from vllmops.model.caches import ProcessCaches, WorkerEncoderCache

from ...support.waiting import until


class Core:
    """An engine, as far as the utility needs one."""

    def __init__(self) -> None:
        self.model_executor: Any = SimpleNamespace(collective_rpc=lambda ask: [ask(worker())])


def worker() -> Any:
    tensor = SimpleNamespace(nbytes=8, device="cpu")
    runner = SimpleNamespace(encoder_cache={"a": tensor})
    return SimpleNamespace(worker=SimpleNamespace(model_runner=runner, rank=3))


class Client:
    """An engine client whose engine answers some calls, and no later one."""

    def __init__(self) -> None:
        self.answers = 2
        self.calls = 0
        self.core = Core()
        self.engine_core = self
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 2)

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        self.calls += 1
        if self.calls > self.answers:
            await asyncio.Event().wait()
        return [getattr(self.core, method)(*args)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(cache_comparison, "gate", made)
    return made


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    loop, made = asyncio.new_event_loop(), Client()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = Core  # type: ignore[attr-defined]
    cache_comparison.hook_engine(module)
    monkeypatch.setattr(engine, "require_front_end", lambda: (made, loop))
    yield made
    # What is cancelled ends some turns of the loop later.
    until(lambda: asyncio.run_coroutine_threadsafe(count_tasks(), loop).result(60) == 1)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def count_tasks() -> int:
    return len(asyncio.all_tasks())


def request(timeout_s: float = 60) -> CompareRequest:
    return CompareRequest(apart_s=0.05, timeout_s=timeout_s)


def hurry(monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    """Have its pauses pass so many seconds for each one: its deadline comes soon, and exactly."""
    passed_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal passed_s
        passed_s += pace * seconds
        time.sleep(seconds)

    clock = SimpleNamespace(
        time=lambda: time.time() + passed_s,
        monotonic=lambda: time.monotonic() + passed_s,
        sleep=sleep,
    )
    monkeypatch.setattr(cache_comparison, "time", clock)


def test_two_looks_at_both_sides(client: Client) -> None:
    found = cache_comparison.compare_caches(request())
    assert len(found.samples) == client.calls == 2
    assert found.settled
    assert found.waited_s >= 0.05
    last = found.samples[-1]
    assert (last.engine_requests, last.rendering, last.problems) == (2, 0, [])
    _, process = last.engines
    (outputs,) = process.caches
    assert isinstance(outputs, WorkerEncoderCache)
    assert (outputs.keys, outputs.rank, outputs.bytes) == (["a"], 3, 8)


def test_the_second_look_waits_for_who_was_on_the_way_at_the_first(
    client: Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, later = (Arrival(0.0, rendering=True) for _ in range(2))
    gate.arrivals.add(early)
    wait = cache_comparison.wait_until_handed_over

    def handed_over(pending: set[Arrival], deadline: float) -> bool:
        gate.arrivals.add(later)
        threading.Timer(0.3, gate.arrivals.discard, (early,)).start()
        return wait(pending, deadline)

    monkeypatch.setattr(cache_comparison, "wait_until_handed_over", handed_over)
    found = cache_comparison.compare_caches(request())
    assert found.settled
    assert found.waited_s > 0
    assert [item.rendering for item in found.samples] == [1, 1]


def test_comparison_does_not_wait_forever_for_an_arriving_request(
    client: Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.arrivals.add(Arrival(0.0, rendering=True))
    hurry(monkeypatch, 100)
    found = cache_comparison.compare_caches(request(120))
    assert len(found.samples) == 2
    assert not found.settled


@pytest.mark.parametrize("looks", [0, 1])
def test_an_engine_that_does_not_answer_leaves_nothing_behind(
    client: Client, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.answers = looks
    hurry(monkeypatch, 2000)  # the deadline is over once it has looked
    found = cache_comparison.compare_caches(request(60 if looks else 0.5))
    assert (len(found.samples), found.front_after) == (looks, None)


def test_a_late_call_does_nothing() -> None:
    (shown,) = cache_comparison.observe_engine_caches(SimpleNamespace(), time.time() - 1)
    assert str(shown).startswith("the engine answers after the deadline")


def test_a_worker_that_can_not_be_read_is_told() -> None:
    core = Core()
    core.model_executor.collective_rpc = lambda ask: [ask(worker()), ask(object())]
    own, one, other = cache_comparison.observe_engine_caches(core, time.time() + 60)
    assert isinstance(own, bytes)
    assert isinstance(one, bytes)
    assert isinstance(other, str)
    assert other.startswith("a worker can't be read: ")


def test_an_executor_that_has_failed_is_told() -> None:
    core = Core()
    del core.model_executor.collective_rpc
    (shown,) = cache_comparison.observe_engine_caches(core, time.time() + 60)
    assert str(shown).startswith("the engine can't be read: ")


def test_a_worker_needs_no_agent() -> None:
    """As cloudpickle sends it: by value, so that no lookup in the worker can fail."""
    sent = cloudpickle.dumps(
        cache_comparison.make_worker_function(), protocol=pickle.HIGHEST_PROTOCOL
    )
    answer = cloudpickle.loads(sent)(worker())
    (cache,) = msgspec.msgpack.decode(answer, type=ProcessCaches).caches
    assert isinstance(cache, WorkerEncoderCache)
    # Imported by its name only once it runs, and caught.
    assert b"vllmops.agent.state.cache_comparison" in sent


def test_handing_over_is_told_and_failing_to(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[bool] = []

    class AsyncLLM:
        async def add_request(self, number: int) -> int:
            if number < 0:
                raise ValueError("too long")
            return number

    monkeypatch.setattr(gate, "mark_reached_engine", lambda: handed.append(True))
    module = ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = AsyncLLM  # type: ignore[attr-defined]
    cache_comparison.hook_front_end(module)
    cache_comparison.hook_front_end(module)
    assert asyncio.run(AsyncLLM().add_request(7)) == 7
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(AsyncLLM().add_request(-1))
    assert handed == [True, True]
