"""The CPU time that the agent's threads have used."""

from __future__ import annotations

import threading
import time

from vllmops.agent import cost


def test_the_cpu_time_of_its_threads() -> None:
    def use_cpu() -> None:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass

    used: list[float] = []
    before, done, go = cost.measure_cpu_s(), threading.Event(), threading.Event()

    def use_cpu_and_wait() -> None:
        use_cpu()
        used.append(time.thread_time())
        if len(used) == 2:
            done.set()
        go.wait()

    thread = threading.Thread(target=use_cpu_and_wait, name="vllmops-test")
    other = threading.Thread(target=use_cpu_and_wait, name="of-the-engine")
    thread.start()
    other.start()
    done.wait()
    assert 0.19 < cost.measure_cpu_s() - before < sum(used)  # not what the other one has used
    go.set()
    thread.join()
    other.join()
    before = cost.measure_cpu_s()
    short = threading.Thread(
        target=cost.wrap_with_cpu_accounting(use_cpu_and_wait), name="vllmops-request"
    )
    short.start()
    short.join()
    assert 0.19 < cost.measure_cpu_s() - before < 1.5 * used[-1]  # it counts once
