"""Background runs, without vLLM."""

from __future__ import annotations

import subprocess
import sys

ACCEPT = """
import asyncio, sys
from types import SimpleNamespace
from tests.responses.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops_responses.server.background import background_runs
from vllmops_responses.server.conversations.conversation_turns import ConversationTurns
from vllmops_responses.server.conversations.turn import Turn

def fail(_):
    raise ValueError("it can't be stored")

async def main():
    turn = Turn(SimpleNamespace(), "", b"[]")
    turn.latest_response = SimpleNamespace(id="resp_1")
    background_runs.response_fields.fill_response = lambda it, _: it
    background_runs.set_response_conversation = lambda it, _: it
    background_runs.encode_model = fail
    task = asyncio.ensure_future(turn.accepted_run)
    handler = SimpleNamespace(
        store=None, conversations=ConversationTurns(None), background_tasks={"resp_1": task}
    )
    try:
        await background_runs.BackgroundRuns(handler).accept_run(turn, None)
    except ValueError as error:
        print(error)
    await asyncio.wait([task], timeout=60)
    print(task.cancelled(), handler.background_tasks)

asyncio.run(main())
"""

# A run that has been accepted, in a store of its own.
BEGUN = """
import asyncio, sys
from types import SimpleNamespace
from tests.responses.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops_responses.server.background import background_runs
from vllmops_responses.server.conversations.conversation_turns import ConversationTurns
from vllmops_responses.server.conversations.turn import Turn, set_current_turn
from vllmops_responses.store import backend_factory as opening
from vllmops_responses.store.conversation_backend import Conversation
from vllmops_responses.store.response_store import ResponseStore

background_runs.response_fields.fill_response = lambda it, _: it
background_runs.set_response_conversation = lambda it, _: it
background_runs.encode_model = lambda _: b"{}"

def runs_of(store):
    handler = SimpleNamespace(
        store=store, conversations=ConversationTurns(store), background_tasks={}
    )
    return background_runs.BackgroundRuns(handler)

async def begun(runs, held=None, keep=None):
    turn = Turn(SimpleNamespace(), "", b"[]")
    turn.hold = held
    turn.latest_response = SimpleNamespace(
        id="resp_1", model="m", status="queued", previous_response_id=None
    )
    with set_current_turn(turn):
        task = asyncio.create_task(runs.execute_run(lambda _: asyncio.sleep(600)))
    runs.handler.background_tasks["resp_1"] = task
    try:
        await runs.accept_run(turn, keep or runs.store.create)
    finally:
        if not turn.goes_on:
            await runs.conversations.release_turn(turn)
    return task
"""

REUSED = """
async def main():
    async with ResponseStore(opening.make_backend("memory://")) as store:
        runs = runs_of(store)
        first = await begun(runs)
        await store.delete("", "resp_1")  # as another replica does
        second = await begun(runs)
        await asyncio.wait([first], timeout=60)
        print(first.cancelled(), second.done(), runs.running["resp_1"][1] is second)
        runs.stop_run("resp_1")
        runs.stop_run("resp_1")
        await asyncio.wait([second], timeout=60)
        print(second.cancelled(), runs.running, store.tracked_runs)

asyncio.run(main())
"""
DELETED = """
async def main():
    async with ResponseStore(opening.make_backend("memory://")) as store:
        kept = store.conversations
        await kept.create(Conversation(id="conv", owner=""), [])
        runs = runs_of(store)
        task = await begun(runs, await kept.hold("", "conv", "resp_1"))
        await store.delete("", "resp_1")
        runs.stop_run("resp_1")  # before it has begun
        await asyncio.wait([task], timeout=60)
        while store.backend.stored_conversations["conv"].is_held:
            await asyncio.sleep(0.01)
        print(task.cancelled(), store.backend.stored_conversations["conv"].is_held)

asyncio.run(main())
"""
LEFT = """
async def main():
    async with ResponseStore(opening.make_backend("memory://")) as store:
        kept = store.conversations
        await kept.create(Conversation(id="conv", owner=""), [])
        runs, asked = runs_of(store), asyncio.Event()

        async def slow(run):
            asked.set()
            await asyncio.sleep(0.1)
            return await store.create(run)

        held = await kept.hold("", "conv", "resp_1")
        request = asyncio.create_task(begun(runs, held, slow))
        await asked.wait()
        request.cancel()
        await asyncio.wait([request])
        async with asyncio.timeout(60):
            while (run := await store.get("", "resp_1")) is None or run.status == "queued":
                await asyncio.sleep(0.01)
        print(request.cancelled(), (await store.get("", "resp_1")).status)
        print(list(runs.running), store.backend.stored_conversations["conv"].is_held)

asyncio.run(main())
"""
ENDED = """
import asyncio, sys
from types import SimpleNamespace
from tests.responses.store.served import Vllm
sys.meta_path.insert(0, Vllm())
from vllmops_responses.server.background import background_runs

async def main():
    begun = asyncio.Event()

    async def put(_):
        begun.set()
        await asyncio.sleep(600)

    store = SimpleNamespace(put=put)
    runs = background_runs.BackgroundRuns(SimpleNamespace(store=store, conversations=None))
    tasks = [asyncio.create_task(asyncio.sleep(600)) for _ in range(3)]
    for number, task in enumerate(tasks):
        run = background_runs.Response(
            id=str(number), owner="", model="m", status="in_progress", body=b"{}"
        )
        runs.running[run.id] = run, task
    ending = asyncio.create_task(runs.shut_down())
    await begun.wait()
    await asyncio.sleep(0)
    print([task.cancelled() for task in tasks])
    ending.cancel()

asyncio.run(main())
"""

AGAIN = """
import asyncio, time
from tests.histories import replica
from vllmops_responses.server.serving import StoreBackedServing
from vllmops_responses.store import backend_factory as opening
from vllmops_responses.store.backend import Response
from vllmops_responses.store.response_store import ResponseStore

backend = opening.make_backend("memory://")
StoreBackedServing.open_store = staticmethod(lambda: ResponseStore(backend))
StoreBackedServing.get_keyring = staticmethod(lambda: None)

async def main():
    handler = StoreBackedServing()
    what = {"body": b"{}", "input": b'[{"role": "user", "content": "light"}]'}
    run = Response(id="resp_1", owner="", model="m", status="queued", **what)
    async with handler.store as store:
        await store.create(run)
        store.paused_until = time.monotonic() + 0.2
        await handler.runs.rerun_response(run, {"background": True, "stream": True})
        frames = handler.stored_responses.follow_events("", "resp_1")
        print(*[frame.type async for frame in frames][-1:])

asyncio.run(main())
"""


def run_script(script: str) -> list[str]:
    """The lines that a script printed."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_slow_store_lets_no_run_go_on_into_the_end_of_the_engine() -> None:
    assert run_script(ENDED) == ["[True, True, True]"]


def test_a_run_is_run_again_once_the_store_is_back() -> None:
    assert run_script(AGAIN) == ["response.completed"]


def test_a_run_whose_id_is_used_again_ends() -> None:
    assert run_script(BEGUN + REUSED) == ["True False True", "True {} {}"]


def test_a_run_that_is_stopped_before_it_begins_lets_go_of_its_conversation() -> None:
    assert run_script(BEGUN + DELETED) == ["True False"]


def test_a_run_goes_on_whose_client_leaves_while_it_is_stored() -> None:
    assert run_script(BEGUN + LEFT) == ["True in_progress", "['resp_1'] True"]


def test_a_run_that_can_not_be_stored_does_not_wait_for_ever() -> None:
    assert run_script(ACCEPT) == ["it can't be stored", "True {}"]
