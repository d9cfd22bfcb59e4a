"""``ps`` and ``cache inspect`` of a server with many ranks: small processes with the agent."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator

from ..support.ranked import make_rank_code
from .figure import Figure, Limit
from .setting import VLLMOPS, Setting

FEW, MANY = 8, 64
MOST_S = 1.5
# A title in place of a command line is all that makes it a vLLM process; forks share the imports.
SERVER = """
import os
import signal
import sys
import time
from setproctitle import setproctitle
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects
from vllmops.agent import register
from vllmops.agent.transport import unix_socket as service

def rank(title, code, entries=0):
    setproctitle(title)
    scope = {}
    exec(code, scope)
    held = scope["held"]
    tensor = SimpleNamespace(nbytes=1, device="cpu")
    cache = dict.fromkeys(map(str, range(entries)), tensor)
    held.model_runner = SimpleNamespace(encoder_cache=cache)
    return held  # of which the agent has a weak reference

codes = [line.split("\\t") for line in sys.stdin.read().splitlines()]
register()
for title, code in codes[1:]:
    if os.fork() == 0:
        held = rank(title, eval(code), 100)
        signal.pause()
held = rank(codes[0][0], eval(codes[0][1]))
time.sleep(1.5)  # until all hearts have beaten
print("up", flush=True)
signal.pause()
"""


def measure(setting: Setting) -> Iterator[Figure]:
    rounds = 2 if setting.short else 20
    taken: dict[tuple[str, int], list[float]] = {}
    for count in (FEW, MANY):
        with server(setting, count) as pid:
            commands = {"ps": ("ps",), "cache inspect": ("cache", "inspect", "-t", str(pid))}
            for name, words in commands.items():
                ran = setting.run(VLLMOPS, *words, "--json")
                assert ran.stdout.count(b'"worker"') >= count - 2, f"{name} misses ranks"
                taken[name, count] = [
                    setting.seconds(VLLMOPS, *words, "--json") for _ in range(rounds)
                ]
    for name in ("ps", "cache inspect"):
        value, rival = (statistics.median(taken[name, count]) for count in (MANY, FEW))
        title = f"{name}, {MANY} agents"
        yield Figure(title, "s", value, f"{FEW} agents", rival, Limit(2.0), rounds)
        yield Figure(title, "s", value, "what was promised", MOST_S, Limit(1.0), rounds)


@contextlib.contextmanager
def server(setting: Setting, agents: int) -> Iterator[int]:
    """The pid of a server that has so many agents: an API server, an engine and workers."""
    sizes = (1, agents - 2, 1)
    workers = [
        (f"VLLM::Worker_TP{rank}", make_rank_code("worker", rank=rank, sizes=sizes))
        for rank in range(agents - 2)
    ]
    ranks = [
        ("VLLM::APIServer_0", make_rank_code("api", sizes=sizes)),
        ("VLLM::EngineCore", make_rank_code("engine", sizes=sizes)),
        *workers,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=setting.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write("\n".join(f"{title}\t{code!r}" for title, code in ranks))
        process.stdin.close()
        assert process.stdout.readline() == "up\n"
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
