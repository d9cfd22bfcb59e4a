"""What heals inside a process is exact, and nothing of it reaches the engine as an error."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from vllmops.agent.actions import (
    blocked_admission,
    blocked_event_loop,
    dead_io_threads,
    stalled_transfers,
)
from vllmops.agent.actions import input_sockets as sockets
from vllmops.agent.actions.engine_thread import run_before_call, run_between_steps
from vllmops.agent.hooks import vllm_objects
from vllmops.agent.state import fatal_messages
from vllmops.agent.versions import scheduler as scheduling

from ...support.waiting import until

# Each letter makes it longer by half: it never ends.
BLOCKED = """
from {module} import compile
from vllmops.agent.actions import blocked_event_loop as event_loop

def {function}():
    compile(r"(a|aa)+$").match(90 * "a" + "b")

event_loop.install_signal_handler()
print(event_loop.find_interrupt_signal(), flush=True)
try:
    {function}()
except TimeoutError as error:
    print(type(error).__name__, flush=True)
"""


@contextmanager
def start_blocked_process(
    module: str, function: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process whose main thread is in a regex, and the signal that it names."""
    code = BLOCKED.format(module=module, function=function)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("module", ["re", "regex"])
def test_a_signal_ends_a_parser_s_regex_although_it_holds_the_gil(module: str) -> None:
    with start_blocked_process(module, "extract_tool_calls") as (process, number):
        while process.poll() is None:
            os.kill(process.pid, number)  # it may come before the parser does
            time.sleep(0.05)
        assert process.stdout
        assert process.stdout.read() == "ParserInterruptedError\n"


def test_a_signal_ends_nothing_but_a_parser() -> None:
    with start_blocked_process("re", "anything") as (process, number):
        for _ in range(20):
            os.kill(process.pid, number)
            time.sleep(0.02)
        assert process.poll() is None


def extract_tool_calls(signals: int) -> None:
    for _ in range(signals):
        helper()


def helper() -> None:
    blocked_event_loop.interrupt_parser(blocked_event_loop.SIGNAL, sys._getframe())


def test_a_signal_ends_no_other_call_than_the_one_before_it_met() -> None:
    extract_tool_calls(1)
    extract_tool_calls(1)  # another one: the first has ended meanwhile
    helper()  # none
    extract_tool_calls(1)
    with pytest.raises(blocked_event_loop.ParserInterruptedError):
        extract_tool_calls(2)
    extract_tool_calls(1)


def test_a_call_that_was_met_is_forgotten_when_the_event_loop_goes_on() -> None:
    async def serve() -> None:
        extract_tool_calls(1)
        assert blocked_event_loop._met is not None
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert blocked_event_loop._met is None

    asyncio.run(serve())


@pytest.mark.parametrize("private", [True, False])
def test_request_with_a_private_block_pool_is_not_called_too_large(private: bool) -> None:
    """As with vLLM's HiSparse: while its host pool is full, more is needed than there is."""
    pool = SimpleNamespace(num_gpu_blocks=4, get_num_free_blocks=lambda: 1)
    own = SimpleNamespace() if private else pool
    coordinator = SimpleNamespace(
        single_type_managers=[
            SimpleNamespace(block_pool=pool, req_to_blocks={"b": [1]}),
            SimpleNamespace(block_pool=own, req_to_blocks={}),
        ],
        get_num_blocks_to_allocate=lambda request_id: 5,  # noqa: ARG005
    )
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool, coordinator=coordinator),
        scheduler_reserve_full_isl=True,
        max_model_len=64,
        requests={},
        running=[],
        waiting=[],
        connector=None,
    )
    request = SimpleNamespace(request_id="a", num_tokens=16, num_prompt_tokens=16)
    assert bool(blocked_admission.explain_too_large(scheduler, request)) is not private
    assert bool(blocked_admission.explain_blocked(scheduler, request)) is not private


class Core:
    """An engine that takes steps."""

    def __init__(self) -> None:
        self.step_fn: Any = self.step
        self.steps = 0

    def raise_attribute_error(self) -> None:
        raise AttributeError("gone")

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(0.001):
            self.step_fn()


def test_an_act_runs_once_on_the_engine_s_thread_and_its_error_does_not_reach_it() -> None:
    core, stop, seen = Core(), threading.Event(), list[str]()
    thread = threading.Thread(target=core.run, args=(stop,), name="engine")
    thread.start()
    try:
        note = lambda: seen.append(threading.current_thread().name)  # noqa: E731
        assert run_between_steps(core, note, 60) == ""
        assert run_between_steps(core, core.raise_attribute_error, 60) == "AttributeError: gone"
        before = core.steps
        until(lambda: core.steps >= before + 3)
    finally:
        stop.set()
        thread.join()
    assert (seen, core.step_fn) == (["engine"], core.step)


def test_to_count_the_blocks_of_a_request_writes_nothing() -> None:
    """vLLM's count for Mamba layers looks into a defaultdict."""
    books: defaultdict[str, list[int]] = defaultdict(list, held=[1, 2])

    def count(request_id: str, num_tokens: int) -> int:
        return num_tokens - len(books[request_id])

    coordinator = SimpleNamespace(
        single_type_managers=[SimpleNamespace(req_to_blocks=books), SimpleNamespace()],
        get_num_blocks_to_allocate=count,
    )
    scheduler = SimpleNamespace(
        max_model_len=9, kv_cache_manager=SimpleNamespace(coordinator=coordinator)
    )

    def count_blocks(name: str) -> int:
        request = SimpleNamespace(request_id=name, num_tokens=5, num_prompt_tokens=5)
        return scheduling.count_needed_blocks(scheduler, request)

    assert (count_blocks("new"), count_blocks("held")) == (5, 3)
    assert books == {"held": [1, 2]}


class NixlConnector:
    """As vLLM's, which loads from the address in a request."""


class Offloading:
    """A connector that loads from elsewhere, whatever a router has written into a request."""


def make_waiting_request(name: str, transfer: Any) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        arrival_time=time.time() - 60,
        status=SimpleNamespace(name="WAITING_FOR_REMOTE_KVS"),
        kv_transfer_params=transfer,
        num_preemptions=0,
        num_computed_tokens=0,
    )


@pytest.fixture
def mute() -> Iterator[int]:
    """A port at which nobody answers: whoever waits there for a place fills the queue."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("", 0), backlog=0))
        port: int = listener.getsockname()[1]
        for _ in range(4):
            with suppress(TimeoutError):
                held.enter_context(socket.create_connection(("127.0.0.1", port), 0.2))
        yield port


class Several:
    """As vLLM's MultiConnector: one of its parts loads a request."""

    def __init__(self) -> None:
        self._connectors = [Offloading(), NixlConnector()]
        self._requests_to_connector = {"gone": 1, "odd 0": 0}


@pytest.mark.parametrize("kind", [NixlConnector, Offloading, Several])
def test_a_sender_is_judged_by_what_a_client_can_not_forge(
    kind: type, mute: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that is none harms no other request."""
    odd: list[Any] = [
        {"remote_host": "127.0.0.1", "remote_port": "abc"},
        {"remote_host": "127.0.0.1", "remote_port": 99999},
        {"remote_host": "127.0.0.1", "remote_port": [1]},
        {"remote_host": "127.0.0.1", "remote_port": "9" * 5000},
        {"remote_host": "a" * 300, "remote_port": 1},
        {"remote_host": "a..b", "remote_port": 1},
        {"remote_host": 7, "remote_port": 1},
        ["a"],
        None,
        *({"remote_host": f"127.0.0.{n}", "remote_port": mute} for n in range(2, 22)),
    ]
    gone = {"remote_host": "127.0.0.1", "remote_port": "1"}
    requests = [make_waiting_request(f"odd {n}", each) for n, each in enumerate(odd)]
    requests.append(make_waiting_request("gone", gone))
    scheduler = SimpleNamespace(
        connector=kind(),
        finished_recving_kv_req_ids=set(),
        recompute_kv_load_failures=True,
        requests={request.request_id: request for request in requests},
        vllm_config=SimpleNamespace(),
        pause_state=SimpleNamespace(name="UNPAUSED"),
    )
    monkeypatch.setattr(vllm_objects, "find_latest", lambda _: scheduler)
    together = threading.Barrier(20)
    refuses = stalled_transfers.is_refusing_connections

    def is_refusing_after_barrier(address: stalled_transfers.Address) -> bool:
        if address[1] == mute:  # one after the other would not get on
            together.wait()
        return refuses(address)

    monkeypatch.setattr(stalled_transfers, "is_refusing_connections", is_refusing_after_barrier)
    monkeypatch.setattr(stalled_transfers, "LOOKED_UP_S", 60.0)
    found = stalled_transfers.find_lost_loads()
    assert [proof.subject for proof in found if proof.client_message] == (
        [] if kind is Offloading else ["gone"]
    )


def test_an_act_does_not_run_where_the_call_has_another_shape() -> None:
    class Other:
        def update(self, *, output: int) -> int:
            return output

    core, seen = Other(), list[str]()
    act = threading.Thread(target=lambda: seen.append(run_before_call(core, "update", tuple, 60)))
    act.start()
    until(lambda: "update" in vars(core))
    assert core.update(output=7) == 7
    act.join()
    assert seen == ["this vLLM calls update in another way"]
    assert vars(core) == {}


def test_an_act_that_found_no_step_does_not_run_later() -> None:
    core, seen = Core(), list[int]()
    kept = core.step_fn
    assert "takes no step" in run_between_steps(core, lambda: seen.append(1), timeout_s=0.01)
    assert core.step_fn == kept
    assert (core.step_fn(), seen) == (1, [])


def test_requests_lost_by_a_dead_io_thread_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(dead_io_threads, "_deaths", {})
    dead_io_threads.install_excepthook()

    def process_output_sockets() -> None:
        output = 0, SimpleNamespace(outputs=[SimpleNamespace(request_id="a")])
        raise TypeError(f"{len(output)} parts can't be encoded")

    def preprocess_add_request(request: Any) -> None:
        raise AssertionError(f"{request.request_id} has no item")

    def process_input_sockets() -> None:
        req = SimpleNamespace(request_id="an earlier one's")
        preprocess_add_request(SimpleNamespace(request_id="b"))
        del req

    for target in (process_output_sockets, process_input_sockets):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert {name: death.requests for name, death in dead_io_threads._deaths.items()} == {
        "process_output_sockets": ("a",),
        "process_input_sockets": ("b",),
    }


def test_the_message_that_ended_a_thread_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_io_threads, "_deaths", {})
    monkeypatch.setattr(fatal_messages, "_kept", deque[Any](maxlen=fatal_messages.KEPT))
    monkeypatch.setattr(fatal_messages, "MESSAGE_BYTES", 10)

    def decode(frames: list[Any]) -> None:
        raise ValueError(f"{len(frames)} frames can't be read")

    def wait() -> None:
        raise OSError("no message has come")

    wait = FunctionType(wait.__code__, {**globals(), "__name__": "zmq.sugar.poll"})

    def process_input_sockets(receives: bool) -> None:
        type_frame, *data_frames = b"\0", SimpleNamespace(buffer=memoryview(b"1234567")), b"89012"
        if receives:
            decode(data_frames)
        assert type_frame
        wait()

    def process_output_sockets() -> None:
        output = 0, Outputs([One("a", what=object())])
        raise TypeError(f"{len(output)} parts can't be encoded")

    for target, *given in (
        (process_input_sockets, True),
        (process_input_sockets, False),
        (process_output_sockets,),
    ):
        try:
            target(*given)
        except Exception as error:
            dead_io_threads.note_thread_death(error, error.__traceback__)
    read, written = fatal_messages.list_fatal_messages().messages
    assert [(frame.size, frame.head) for frame in read.frames] == [
        (1, b"\0"),
        (7, b"1234567"),
        (5, b"89"),
    ]
    assert (read.thread, read.error) == ("input thread", "ValueError: 2 frames can't be read")
    assert (written.thread, len(written.frames)) == ("output thread", 1)


class Outputs(msgspec.Struct):
    outputs: list[Any]


class One(msgspec.Struct):
    request_id: str
    what: Any = None


def test_a_message_that_can_t_be_encoded_is_sent_without_those_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_io_threads, "_deaths", {})
    sent = list[Any]()

    class Core:
        addresses = SimpleNamespace(outputs=["a"], coordinator_output=None)
        engine_index, output_queue = 0, queue.Queue[Any]()
        output_thread: threading.Thread

        def process_output_sockets(self, paths: list[str], _: str | None, index: int) -> None:
            assert (paths, index) == (["a"], 0)
            encoder = msgspec.msgpack.Encoder()

            def encode_into(outputs: Outputs) -> bytes:
                return encoder.encode(outputs)

            while True:
                output = self.output_queue.get()
                if output is None:
                    break
                sent.append(msgspec.msgpack.decode(encode_into(output[1]))["outputs"])

    core = Core()

    def run_output_thread() -> None:
        try:
            core.process_output_sockets(["a"], None, 0)
        except TypeError as error:
            dead_io_threads.note_thread_death(error, error.__traceback__)

    bad = One("b", what=object())
    for outputs in ([One("a"), bad, One("c")], [One("d")]):
        core.output_queue.put((0, Outputs(outputs)))
    thread = threading.Thread(target=run_output_thread)
    thread.start()
    thread.join()
    assert dead_io_threads._deaths["process_output_sockets"].requests == ("b",)
    core.output_queue.put(None)
    assert dead_io_threads.restart_thread(core, "process_output_sockets") == ""
    core.output_thread.join()
    assert [[one["request_id"] for one in outputs] for outputs in sent] == [["a", "c"], ["d"]]


def make_zmq_socket(context: Any, path: str) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"engine")
    socket.connect(path)
    return socket


class EngineCoreProc:
    """As vLLM's: it gives the thread's frame the same names."""

    def __init__(self) -> None:
        self.read: list[bytes] = []

    def process_input_sockets(
        self, input_addresses: list[str], coord_input_address: str | None, ready: threading.Event
    ) -> None:
        with ExitStack() as stack, zmq.Context() as ctx:
            sockets = [stack.enter_context(make_zmq_socket(ctx, path)) for path in input_addresses]
            assert coord_input_address is None
            for socket in sockets:
                socket.send(b"ready")
            ready.set()
            while True:
                message = sockets[0].recv()
                if message == b"bad":
                    raise AssertionError("bad")
                self.read.append(message)
                if message == b"end":
                    return


def test_messages_sent_while_the_input_thread_is_dead_are_read_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        EngineCoreProc, "process_input_sockets", EngineCoreProc.process_input_sockets
    )
    for _ in range(2):
        sockets.hook_input_thread(sys.modules[__name__])
    core, path = EngineCoreProc(), f"ipc://{tmp_path}/socket"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as front_end:
        front_end.bind(path)

        def run_input_thread() -> None:
            with suppress(AssertionError):
                core.process_input_sockets([path], None, threading.Event())

        for messages in ([b"a", b"bad", b"b", b"c"], [b"d", b"end"]):
            thread = threading.Thread(target=run_input_thread)
            thread.start()
            assert front_end.recv_multipart()[1] == b"ready"
            for message in messages:
                front_end.send_multipart([b"engine", message])
            thread.join()
    assert core.read == [b"a", b"b", b"c", b"d", b"end"]
    assert sockets._opened == []
