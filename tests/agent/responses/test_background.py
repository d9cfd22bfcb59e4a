"""Background runs, without vLLM."""

from __future__ import annotations

import subprocess
import sys

ACCEPT = """
import asyncio, sys
from types import SimpleNamespace
from tests.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops.agent.responses import background
from vllmops.agent.responses.turn import Turn

def fail(_):
    raise ValueError("it can't be stored")

async def main():
    turn = Turn(SimpleNamespace(), "", b"[]")
    turn.latest = SimpleNamespace(id="resp_1")
    background.fields.fill = background.named_in = lambda response, _: response
    background.dump = fail
    task = asyncio.ensure_future(turn.accepted)
    handler = SimpleNamespace(store=None, conversations=None, background_tasks={"resp_1": task})
    try:
        await background.Runs(handler).accept(turn, None)
    except ValueError as error:
        print(error)
    await asyncio.wait([task], timeout=5)
    print(task.cancelled(), handler.background_tasks)

asyncio.run(main())
"""


def test_a_run_that_can_not_be_stored_does_not_wait_for_ever() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ACCEPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["it can't be stored", "True {}"]
