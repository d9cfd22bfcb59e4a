"""What recording a step costs the engine's thread, against a step of the demo model."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from vllmops.agent.recording import step_recorder

from .agent import PATH
from .figure import Figure, Limit, interleave_measurements, medians
from .setting import VLLMOPS, Setting

STEPS = 5_000
REQUESTS, TOKENS = 24, 64
OUTPUT = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(range(8), 1))
OUTPUT.total_num_scheduled_tokens = len(OUTPUT.num_scheduled_tokens)


class Scheduler:
    """vLLM's without its work, so that what is measured is the recording alone."""

    def __init__(self) -> None:
        self.current_step = 0
        self.running, self.waiting, self.deferred_waiting = [*range(8)], [*range(8)], [*range(8)]
        self.kv_cache_manager = SimpleNamespace(usage=0.5)

    def schedule(self) -> Any:
        self.current_step += 1
        return OUTPUT

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return scheduler_output, model_runner_output


def measure(setting: Setting) -> Iterator[Figure]:
    rounds = 4 if setting.short else 40
    bare, hooked = type("Bare", (Scheduler,), {})(), type("Scheduler", (Scheduler,), {})()
    module = ModuleType("scheduler")
    vars(module)["Scheduler"] = type(hooked)
    step_recorder.install_recorder(lambda: create_directory(setting.home / "recorder"))
    step_recorder.hook_scheduler(module)
    of = medians(
        interleave_measurements(
            rounds, {"bare": partial(measure_step, bare), "hooked": partial(measure_step, hooked)}
        )
    )
    step_recorder.reset_after_fork()
    yield Figure(
        "recording a step, CPU time",
        "s",
        of["hooked"] - of["bare"],
        "a step of the demo model",
        demo_step(setting),
        Limit(0.02) if setting.short else Limit(0.002),
        rounds,
    )


def create_directory(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def measure_step(scheduler: Any) -> float:
    """CPU seconds of a step: what else runs on the machine does not count."""
    step: Callable[[], Any] = lambda: scheduler.update_from_output(scheduler.schedule(), None)  # noqa: E731
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS


def demo_step(setting: Setting) -> float:
    """Seconds between two steps of a busy server, by its own recording."""
    server = setting.text
    body = {"model": "demo-text", "prompt": "The", "max_tokens": TOKENS, "ignore_eos": True}
    server.load([server.request(PATH, body)] * REQUESTS, 8)
    done = setting.run(VLLMOPS, "doctor", "--history", "-t", str(server.pid), "--json")
    data = json.loads(done.stdout)["data"]
    (recording,) = data["recordings"]
    steps = [dict(zip(data["columns"], step, strict=True)) for step in recording["steps"]]
    # Not how long a step took: vLLM schedules ahead, so steps wait for one another.
    seconds: list[float] = [
        (after["began_at"] - step["began_at"]) / step["steps"]
        for step, after in pairwise(steps)
        if step["running"]
    ]
    return statistics.median(seconds)
