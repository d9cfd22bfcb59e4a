"""Real hangs: a plug-in that puts defects back into vLLM, and how each is made and ended."""

from __future__ import annotations

import fcntl
import http.client
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from vllmops.collect.agents import agent_client, agent_files
from vllmops.collect.http import vllm_client
from vllmops.collect.machine.processes import Process
from vllmops.demo.inputs import make_chat_request
from vllmops.servers.discovery import resolve_server

from ..support import plug_ins
from ..support.waiting import until
from .conftest import Cli, Launched, Stock, kill, launch
from .test_cache import send_image_request

PATCHES = ("mm-lru-ghost-keys", "mm-lru-stale-eviction", "request-hash-cycle")
UNPATCHED = ",".join((*PATCHES, "broadcast-recheck"))
# Of the demo model's images some five fit.
FEW_IMAGES = ("--mm-processor-cache-gb", "0.00008", "--limit-mm-per-prompt", '{"image":8}')
# vLLM 0.24 and newer leave no ghost keys, and 0.16 and newer no cycle in a request: a plug-in puts
# the old code back, before ours looks.
OLD_CACHE = """
from vllm.utils.cache import LRUCache

def touch(self, key):  # as it was until vLLM 0.23
    try:
        self._LRUCache__order.move_to_end(key)
    except KeyError:
        self._LRUCache__order[key] = None

def register():
    LRUCache.touch = touch
"""
# Requests of so small a model end while they are young, and the garbage collector's first
# generations would take what in production only the last one does. So memory grows with these.
OLD = (
    OLD_CACHE
    + """
import gc
import os
from functools import partial, wraps
from vllm.v1.request import Request

construct, keep_cache = Request.__init__, register

@wraps(construct)
def init(self, *args, block_hasher=None, **fields):  # as it was until vLLM 0.15.1
    self.get_hash_new_full_blocks = None
    construct(self, *args, **fields)
    if block_hasher is not None:
        self.get_hash_new_full_blocks = partial(block_hasher, self)
        self.block_hashes = self.get_hash_new_full_blocks()

def update_block_hashes(self):
    if self.get_hash_new_full_blocks is not None:
        self.block_hashes.extend(self.get_hash_new_full_blocks())

def register():
    keep_cache()
    Request.__init__ = init
    Request.update_block_hashes = update_block_hashes
    os.register_at_fork(after_in_child=gc.disable)
"""
)
PLACE = "VLLM_TEST_HANGS"  # a directory: a file in it puts the defect of that name in

# What today's vLLM has mended is put back. The code that blocks looks for its file each time, and
# waits in flock(2) for as long as a test holds that file's lock.
PLUG_IN = """
import ctypes
import fcntl
import os
import re
import signal
from functools import wraps
from multiprocessing import current_process
from vllm import plugins

def file_of(defect):
    return os.path.join(os.environ["VLLM_TEST_HANGS"], defect)

def blocking(function, defect, flock):
    path = file_of(defect)
    @wraps(function)
    def block(*args, **fields):
        if os.path.exists(path):
            with open(path) as file:
                flock(file.fileno(), fcntl.LOCK_EX)
        return function(*args, **fields)
    return block

def spinning(function, defect, turn):
    path = file_of(defect)
    @wraps(function)
    def spin(*args, **fields):
        while os.path.exists(path):
            turn()
        return function(*args, **fields)
    return spin

def engine():
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import RequestStatus
    from vllm.v1.serial_utils import MsgpackEncoder

    # Whether the longest prompt fits is not asked at start any more.
    kv_cache_utils._check_enough_kv_cache_memory = lambda *_: None

    init, free = EncoderCacheManager.__init__, EncoderCacheManager.free
    EncoderCacheManager.__init__ = lambda self, cache_size: init(self, 8)  # two images

    def keep_for_the_waiting(self, request):  # as it was before #31857
        if request.status != RequestStatus.WAITING:
            free(self, request)

    EncoderCacheManager.free = keep_for_the_waiting


    def encoding(stock):
        @wraps(stock)
        def encode(self, message, *buffer):  # its name is in the traceback, as vLLM's would be
            if any("unencodable" in one.request_id for one in getattr(message, "outputs", ())):
                raise TypeError("it can't be encoded")
            return stock(self, message, *buffer)
        return encode

    MsgpackEncoder.encode = encoding(MsgpackEncoder.encode)
    MsgpackEncoder.encode_into = encoding(MsgpackEncoder.encode_into)
    name, path = "_handle_mm_cache_miss", file_of("input-thread")
    miss = getattr(EngineCoreProc, name, None)  # not in 0.24

    def handle_miss(self, request, error):
        if os.path.exists(path):  # as it was until vLLM 0.13
            raise AssertionError(f"Expected a cached item for mm_hash={error.mm_hashes[0]!r}")
        miss(self, request, error)

    setattr(EngineCoreProc, name, handle_miss)
    keep, gone = EngineCoreProc.add_request, file_of("lost-request")

    def add_unless_gone(self, *args, **fields):
        if os.path.exists(gone):
            os.unlink(gone)
        else:
            keep(self, *args, **fields)

    EngineCoreProc.add_request = add_unless_gone
    # As it was before #45388: loads take what those need that were admitted before.
    Scheduler._inflight_prefill_reserved_blocks = lambda self: 0
    # PyDLL keeps the GIL.
    Scheduler.schedule = blocking(Scheduler.schedule, "gil", ctypes.PyDLL(None).flock)
    Scheduler.schedule = spinning(Scheduler.schedule, "scheduler", lambda: sum(range(100_000)))

def worker():
    import torch
    from vllm.v1.worker.cpu_worker import CPUWorker
    CPUWorker.execute_model = blocking(CPUWorker.execute_model, "worker", fcntl.flock)
    numbers = torch.ones(400, 400)
    kernel = lambda: torch.mm(numbers, numbers)
    CPUWorker.execute_model = spinning(CPUWorker.execute_model, "kernel", kernel)

def front_end():
    from vllm.tool_parsers import pythonic_tool_parser
    from vllm.v1.engine.core_client import AsyncMPClient

    PythonicToolParser = pythonic_tool_parser.PythonicToolParser
    pattern = re.compile(PythonicToolParser.TOOL_CALL_REGEX.pattern, re.DOTALL)

    # As it was until vLLM 0.9.0: Python's own re, and no time limit. A signal ends it.
    def extract_tool_calls(self, model_output, request):
        try:
            parsing.append(pattern)
            pattern.match(model_output)
        except InterruptedError:
            pass
        finally:
            parsing.clear()
        return pythonic_tool_parser.ExtractedToolCallInformation(
            tools_called=False, tool_calls=[], content=model_output
        )

    parsing = []

    def interrupt(*_):
        if parsing:  # the event loop would not survive it elsewhere
            raise InterruptedError

    give, lost = AsyncMPClient.abort_requests_async, file_of("lost-abort")

    async def abort_requests_async(self, names):
        if not os.path.exists(lost):
            await give(self, names)

    AsyncMPClient.abort_requests_async = abort_requests_async
    PythonicToolParser.extract_tool_calls = extract_tool_calls
    signal.signal(signal.SIGUSR2, interrupt)

def register():
    name = current_process().name
    if name.startswith("EngineCore"):
        engine()
    elif "Worker" in name:
        worker()
    elif name == "MainProcess":
        front_end()
        # A forked engine would have these alone.
        os.register_at_fork(after_in_child=load_again)

def load_again():
    plugins.plugins_loaded = False
"""
# A connector that finds the KV blocks of a request elsewhere if it is asked to. A load that is held
# is over once its file is gone; one that is lost is forgotten by the worker, and never reported.
CONNECTOR = """
import os
from vllm.distributed.kv_transfer.kv_connector.v1 import base

class Loads(base.KVConnectorMetadata):
    def __init__(self, loads):
        self.loads = loads

# Only of NIXL's own connectors it is known that they load from the address in a request.
class NixlPullConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    pass

class Losing(NixlPullConnector):
    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.loads, self.held = {}, {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        params = request.kv_transfer_params or {}
        if params.get("load"):
            return params.get("tokens", request.num_tokens) - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:  # vLLM's own connectors ask once for each request, too
            self.loads[request.request_id] = request.kv_transfer_params.pop("load")

    def build_connector_meta(self, scheduler_output):
        loads, self.loads = self.loads, {}
        return Loads(loads)

    def start_load_kv(self, forward_context, **fields):
        for name, load in self._get_connector_metadata().loads.items():
            if load != "lost":
                self.held[name] = os.path.join(os.environ["VLLM_TEST_HANGS"], load)

    def get_finished(self, finished_req_ids):
        over = {name for name, path in self.held.items() if not os.path.exists(path)}
        for name in over:
            del self.held[name]
        return None, over

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **fields):
        pass

    def wait_for_save(self):
        pass

def register():
    pass
"""
# vLLM 0.27 and newer look again on their own. A message between engine and worker gets lost once.
LOST_NOTIFY = """
import os
from collections import deque
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

def register():
    wait, notify = SpinCondition.wait, SpinCondition.notify
    lost = os.path.join(os.environ["VLLM_TEST_HANGS"], "notify")
    answered = deque(maxlen=20)
    Timeout = MessageQueue.ReadTimeoutWithWarnings
    until = Timeout.timeout_ms

    def lose(self):
        # A reader that was healed looks again by itself ever after. It has to do so for a while.
        answered.append(SpinCondition.wait is not wait)
        if all(answered) and len(answered) == answered.maxlen:
            SpinCondition.wait = wait
        try:
            os.unlink(lost)  # by one process
        except FileNotFoundError:
            notify(self)

    SpinCondition.notify = lose
    Timeout.timeout_ms = lambda self: None if self.timeout is None else until(self)
"""
# A large model on a small machine: each token takes its time, in a prompt as in a response.
SLOW = """
import os
import time
from functools import wraps
from multiprocessing import current_process

def register():
    if "Worker" not in current_process().name:
        return
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    path = os.path.join(os.environ["VLLM_TEST_HANGS"], "slow")
    run = GPUModelRunner._model_forward
    numbers = torch.ones(400, 400)

    @wraps(run)
    def forward(self, *args, **fields):
        if os.path.exists(path):
            with open(path) as file:
                tokens = fields["positions"].shape[-1]
                end = time.monotonic() + tokens * float(file.read())
            while time.monotonic() < end:
                torch.mm(numbers, numbers)
        return run(self, *args, **fields)

    GPUModelRunner._model_forward = forward
"""
ENVIRONMENT = {
    "VLLMOPS_NO_PATCH": ",".join(PATCHES),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # which has /pause
    # As with `serve`. An engine that is spawned loads plug-ins while it is made.
    "SPAWNED": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}
# 1,280 tokens fit into the KV cache, which is less than the longest prompt's 2,048.
FEW_BLOCKS = ("--num-gpu-blocks-override", "11")
ARGUMENTS = (
    *FEW_BLOCKS,
    *FEW_IMAGES,
    *("--enable-auto-tool-choice", "--tool-call-parser", "pythonic"),
)
DEFECTS = {"hangs": PLUG_IN, "slow": SLOW}
LOSING = {"hangs": PLUG_IN, "losing": CONNECTOR, "lost_notify": LOST_NOTIFY}
TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
BACKTRACKING = "[a(" + 60 * "a=1,"  # each argument doubles the time: 20 of them take half a second

_numbers = itertools.count(100)


def make_connector_arguments(policy: str) -> tuple[str, ...]:
    """Arguments for the connector, and a policy for loads that fail."""
    connector = {
        "kv_connector": "Losing",
        "kv_connector_module_path": "losing",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
    }
    return ("--kv-transfer-config", json.dumps(connector))


class Asked:
    """A chat request that nobody waits for, until asked for its answer."""

    def __init__(self, url: str, body: dict[str, Any], **headers: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc)
        headers = {"Content-Type": "application/json", **headers}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        self.status: int | None = None
        self.aborted = False

    def answer(self, within_s: float) -> int | None:
        """The answer's status, None where it does not come in time."""
        if self.status is None and not self.aborted:
            self.connection.sock.settimeout(within_s)
            try:
                self.status = self.connection.getresponse().status
            except TimeoutError:
                return None
        return self.status

    def abort(self) -> None:
        self.aborted = True
        self.connection.close()


@dataclass(frozen=True)
class Prone(Stock):
    """A server with the plug-in, and no supervisor to end it."""

    launched: Launched
    place: Path

    @cached_property
    def url(self) -> str:
        return self.launched.url

    @cached_property
    def processes(self) -> dict[str, Process]:
        return {process.role: process for process in resolve_server(self.name).processes}

    def pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in self.processes.items()}

    def send_chat_request(self, *seeds: int, text: str = "hi", **fields: Any) -> Asked:
        return Asked(self.url, make_chat_request(list(seeds), text, **fields))

    def unencodable(self) -> Asked:
        """A request whose output ends the engine's output thread."""
        return Asked(self.url, make_chat_request([], "hi"), **{"X-Request-Id": "unencodable"})

    def tokens(self) -> float | None:
        """Counted so far, None where nobody answers."""
        found = vllm_client.fetch_metrics(self.url)
        return found.tokens if found else None

    def count_handed_requests(self) -> int:
        """Requests that the API server has handed to the engine and that are not over."""
        pulse = agent_files.read_heartbeat(self.processes["api"])
        assert pulse
        return pulse.heartbeat.engine_requests or 0

    @contextmanager
    def defect(self, name: str) -> Iterator[None]:
        """Put one in, until the end of the block."""
        with (self.place / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                Path(file.name).unlink()

    @contextmanager
    def suspend_process(self, role: str) -> Iterator[None]:
        pid = self.pids()[role]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def prone(
    cli: Cli,
    place: Path,
    modules: Mapping[str, str],
    *options: str,
    ahead: Sequence[Path] = (),
    demo: str = "vision",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Prone]:
    """A server with defects that is about to start.

    Args:
        cli: whose home has the model.
        place: for its log, and for what the plug-ins read.
        modules: the plug-ins by name.
        options: for vLLM.
        ahead: folders of code that goes first.
        demo: which model.
        environment: more of it.
    """
    folders = [place / "plug-ins" / name for name in modules]
    for folder, (name, module) in zip(folders, modules.items(), strict=True):
        plug_ins.lean(folder)
        plug_ins.write(folder, name, module)
    paths = os.pathsep.join([*map(str, (*ahead, *folders)), cli.environment["PYTHONPATH"]])
    known = {**ENVIRONMENT, PLACE: str(place), "PYTHONPATH": paths, **(environment or {})}
    launched = launch(cli, place / "log", known, *options, demo=demo)
    try:
        yield Prone(cli, str(launched.process.pid), launched, place)
    finally:
        launched.stop()


@contextmanager
def slow(server: Prone, token_s: float) -> Iterator[None]:
    """Let it take so many seconds for each token, until the end of the block."""
    path = server.place / "slow"
    path.write_text(str(token_s))
    try:
        yield
    finally:
        path.unlink()


def make_front_only_images(url: str) -> Iterator[int]:
    """Images that the front end alone may have cached.

    A text fits before the image's placeholder is expanded, and not after: some lengths do so. Those
    that fit at all come last.
    """
    for length in range(2044, 2017, -1):
        assert send_image_request(url, 1000 + length, text="z" * length).status_code in {200, 400}
        yield 1000 + length


def leave_ghost(url: str) -> bool:
    """Ask again for such images; whether the engine has failed on one.

    Its reuse leaves a key without data in the engine.
    """
    return any(
        send_image_request(url, seed).status_code == 500 for seed in make_front_only_images(url)
    )


@contextmanager
def larger_than_the_cache(server: Prone) -> Iterator[list[Asked]]:
    asked = [server.send_chat_request(text="z" * 1500), server.send_chat_request()]
    with ExitStack() as after:
        after.callback(asked[0].abort)
        yield asked


@contextmanager
def livelock(server: Prone) -> Iterator[list[Asked]]:
    """Two requests that do not fit into the KV cache together, about the same three images.

    The encoder cache takes two. The one that runs has put them there, the one that waits holds on
    to them, and so the third has no room. Their texts are new each time: of a prompt that is in
    the KV cache no image is encoded.
    """
    with server.suspend_process("worker"):  # so that both are there when one is scheduled
        time.sleep(1.2)  # a heartbeat later those of others are counted, too
        before = server.count_handed_requests()
        first = server.send_chat_request()
        until(lambda: server.count_handed_requests() > before)
        # A busy machine's engine might not be in this step yet, and take one of the two alone.
        until(
            lambda: agent_client.open_agent(server.processes["engine"]).fetch_engine_state().running
        )
        texts = [f"{next(_numbers)} ".ljust(750, "z") for _ in range(2)]
        bodies = [make_chat_request([1, 2, 3], text) for text in texts]
        for body in bodies:
            body["messages"][0]["content"].reverse()  # the text has its KV blocks by then
        asked = [Asked(server.url, body) for body in bodies]
        until(lambda: server.count_handed_requests() > before + 2)
    assert first.answer(30) == 200
    with ExitStack() as after:
        after.callback(asked[1].abort)
        yield asked


@contextmanager
def worker_blocked(server: Prone) -> Iterator[list[Asked]]:
    with server.defect("worker"):
        yield [server.send_chat_request()]


@contextmanager
def kernel_spins(server: Prone) -> Iterator[list[Asked]]:
    with server.defect("kernel"):
        yield [server.send_chat_request()]


@contextmanager
def scheduler_spins(server: Prone) -> Iterator[list[Asked]]:
    with server.defect("scheduler"):
        yield [server.send_chat_request()]


@contextmanager
def worker_stopped(server: Prone) -> Iterator[list[Asked]]:
    with server.suspend_process("worker"):
        yield [server.send_chat_request()]


@contextmanager
def gil_held(server: Prone) -> Iterator[list[Asked]]:
    with server.defect("gil"):
        yield [server.send_chat_request()]


@contextmanager
def trigger_backtracking(server: Prone) -> Iterator[list[Asked]]:
    forced = {"choice": [BACKTRACKING]}
    asked = server.send_chat_request(tools=[TOOL], structured_outputs=forced, max_tokens=500)
    until(lambda: not vllm_client.is_healthy(server.url, timeout_s=1))
    with ExitStack() as after:
        after.callback(os.kill, server.pids()["api"], signal.SIGUSR2)
        yield [asked]


@contextmanager
def input_thread_dead(server: Prone) -> Iterator[list[Asked]]:
    def deaths() -> int:
        return server.launched.log.read_text().count("AssertionError: Expected a cached item")

    (server.place / "input-thread").touch()
    before = deaths()
    for seed in make_front_only_images(server.url):
        lost = server.send_chat_request(seed)
        while lost.answer(0.1) is None and deaths() == before:
            time.sleep(0.1)
        if deaths() > before:
            break
    (server.place / "input-thread").unlink()
    yield [lost, server.send_chat_request()]


def lost_notify(server: Prone) -> Asked:
    """A request whose way to the worker, or back, nobody tells of; nothing else is in flight."""
    time.sleep(1.5)  # until then the reader looks by itself
    lost = server.place / "notify"
    lost.touch()
    try:
        asked = server.send_chat_request()
        until(lambda: not lost.exists())
    finally:
        lost.unlink(missing_ok=True)
    return asked


@contextmanager
def engine_killed(server: Prone) -> Iterator[list[Asked]]:
    engine = server.pids()["engine"]
    kill(engine)
    until(lambda: not psutil.pid_exists(engine))
    assert server.send_chat_request().answer(10) == 500
    yield []


@dataclass(frozen=True)
class Hang:
    """A way to hang.

    Args:
        name: of the test.
        code: of the finding that names it in its stacks.
        told: of the one that names it where more is known; the same where empty.
        made: makes it, and ends it with the block, where it can be ended; gives its requests.
        lives_on: whether the server does.
        age_s: how old it must be before it can be told from work.
        captured: whether a watch catches it in the short form, too.
        short: whether it is part of the short form.
    """

    name: str
    code: str
    made: Callable[[Prone], AbstractContextManager[list[Asked]]]
    lives_on: bool = True
    age_s: float = 3.0
    told: str = ""
    captured: bool = False
    short: bool = True


HANGS = (
    Hang(
        "request larger than the KV cache",
        "stack.admission-deadlock",
        larger_than_the_cache,
        short=False,
    ),
    Hang("nothing scheduled", "stack.schedule-livelock", livelock),
    Hang("worker blocked", "stack.worker-stuck-broadcast", worker_blocked),
    Hang("worker stopped", "process.stopped", worker_stopped, short=False),
    Hang("GIL held in C", "stack.gil-held", gil_held, age_s=9.0),
    Hang("regex backtracks", "stack.tool-parser-regex", trigger_backtracking, short=False),
    Hang("input thread dead", "stack.input-thread-dead", input_thread_dead, lives_on=False),
    Hang(
        "EngineCore killed",
        "stack.engine-core-missing",
        engine_killed,
        lives_on=False,
        told="engine.missing",
        captured=True,
    ),
)

# Nothing but their length tells them from work.
SPINS = (
    Hang("kernel spins", "", kernel_spins),
    Hang("scheduler spins", "", scheduler_spins),
)


def is_real(server: Prone, asked: list[Asked], age_s: float) -> None:
    """Requests stay unanswered, and no token is counted for ``age_s`` seconds."""

    def is_at_rest() -> bool:
        before = server.tokens()
        time.sleep(age_s)
        return server.tokens() == before

    until(is_at_rest)  # what was answered last is counted later, on a busy machine much later
    assert not asked or any(item.answer(0.1) is None for item in asked)
