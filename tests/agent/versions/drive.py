"""Drives every hook of the agent on the vLLM of this process; `test_versions` runs it in forks.

Each function raises where a feature does not work, and has the name of the feature.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from vllmops.agent.actions import (
    blocked_admission,
    cache_repair,
    dead_io_threads,
    encoder_cache_deadlock,
    paused_engine,
)
from vllmops.agent.hooks import vllm_objects
from vllmops.agent.patches import registry
from vllmops.agent.patches.probe_objects import ScratchRequest
from vllmops.agent.patches.request_hash_cycle import make_scratch_request
from vllmops.agent.recording import step_recorder
from vllmops.agent.state import cache_comparison, caches, engine, requests
from vllmops.agent.versions import engine as adapter
from vllmops.agent.versions import features, kv_transfers, module_locations
from vllmops.agent.versions import requests as adapted
from vllmops.agent.versions import scheduler as scheduling
from vllmops.collect.machine import shared_memory
from vllmops.model.cache_repairs import RepairRequest
from vllmops.model.caches import EncoderCache, LruCache
from vllmops.rules.caches import check_cache
from vllmops_responses.server import installation
from vllmops_responses.store.backend import Response

ATTRIBUTES = (
    *("current_step", "running", "waiting", "requests", "num_waiting_for_streaming_input"),
    *("pause_state", "kv_cache_manager", "max_num_running_reqs", "encoder_cache_manager"),
)


def drive_features() -> dict[str, str]:
    """Installs the hooks, imports what they are for, and drives them; the result by feature."""
    importlib.import_module("vllm.multimodal")  # alone, parts of it import each other in a circle
    vllm_objects.report_compatibility()
    vllm_objects.hook_constructors(lambda: None)
    cache_comparison.install_hooks()
    step_recorder.install_recorder(Path)
    registry.install_patches()
    installation.replace_routes_on_import(lambda: None)
    results: dict[str, str] = {}
    lacks = features.find_missing_features()
    for name in features.FEATURES:
        try:
            assert name not in lacks, f"there is no {', '.join(lacks[name])}"
            DRIVES[name]()
            results[name] = "works"
        except BaseException as error:  # what a version raises is the result
            results[name] = f"off: {type(error).__name__}: {error}"[:200]
    for patch in registry.PATCHES.values():
        for module in filter(None, map(module_locations.find_existing_module, patch.modules)):
            importlib.import_module(module)
    for verdict in registry.observe_patches(verify=True).patches:
        results[verdict.id] = verdict.state.value if not verdict.present else "failed"
    return results


def import_symbol(kind: str) -> Any:
    module = module_locations.find_symbol_module(kind)
    assert module
    return getattr(importlib.import_module(module), module_locations.PLACES[kind].name)


def source(kind: str) -> str:
    text = module_locations.read_source(module_locations.find_symbol_module(kind) or "")
    assert text
    return text


def multimodal_caches() -> None:
    """A receiver's cache is remembered, read, and rid of a ghost key."""
    name = getattr(importlib.import_module("vllm.envs"), "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "")
    assert not name or shared_memory.NAMES.fullmatch(name), name
    base = import_symbol("mm-cache")
    module = module_locations.find_existing_module("vllm.multimodal.cache.lru") or base.__module__
    receiver = next(
        cls
        for name, cls in vars(importlib.import_module(module)).items()
        if name in {"LruKeyReplicatedReceiverCache", "MultiModalReceiverCache"}
    )
    config = SimpleNamespace(mm_processor_cache_gb=1)
    holder: Any = receiver(SimpleNamespace(get_multimodal_config=lambda: config))
    assert vllm_objects.list_objects("mm-cache") == [holder]
    import torch

    holder._cache["a"] = torch.zeros(2)
    holder._cache._LRUCache__order["ghost"] = None
    read = caches.observe_lru_cache(holder)
    assert isinstance(read, LruCache)
    assert (read.entries, read.bytes, read.side, read.order_only) == (1, 8, "P1", ["ghost"])
    assert cache_repair.repair_caches(RepairRequest()).caches[0].reason is None
    assert not check_cache(caches.observe_lru_cache(holder))


def encoder_caches() -> None:
    """A manager's books are read, and contain no fault."""
    manager = import_symbol("encoder-cache")(cache_size=100)
    request = ScratchRequest()
    manager.allocate(request, 0)
    held = SimpleNamespace(
        encoder_cache_manager=manager,
        requests={request.request_id: SimpleNamespace(is_finished=lambda: False)},
    )
    held.requests[request.request_id].mm_features = request.mm_features
    read = caches.observe_encoder_cache(held)
    assert isinstance(read, EncoderCache)
    assert (read.slots, read.slots - read.free_slots) == (100, 3)
    assert list(read.requests_by_key) == list(request.hashes)
    assert not check_cache(read)
    assert hasattr(import_symbol("worker").__init__, "__vllmops__")


def progress() -> None:
    """The scheduler counts, and has the attributes that are read."""
    cls = import_symbol("scheduler")
    text = source("scheduler")
    assert [name for name in ATTRIBUTES if name not in text] == []
    assert hasattr(cls.__init__, "__vllmops__")
    scheduler = object.__new__(cls)
    scheduler.running, scheduler.waiting = [1], [2, 3]
    scheduler.skipped_waiting = scheduler.kv_holding_waiting = ()  # up to 0.30, and since
    assert engine.count_requests(scheduler) == (1, 2)
    scheduler.deferred_waiting = ()
    assert adapter.count_requests_by_state(scheduler) == (1, 2, 0)
    scheduler.kv_cache_manager = SimpleNamespace(usage=0.5)
    assert adapter.kv_cache_usage(scheduler) == 0.5
    for method in (cls.schedule, cls.update_from_output):
        assert hasattr(method, "__vllmops__")
    output = importlib.import_module("vllm.v1.core.sched.output").SchedulerOutput
    fields = inspect.signature(output).parameters
    assert {"num_scheduled_tokens", "total_num_scheduled_tokens"} <= fields.keys()
    assert "output_handler" in source("engine-client")
    assert "is_sleeping" in source("executor")
    for kind in ("executor", "engine-client"):
        assert hasattr(import_symbol(kind).__init__, "__vllmops__")


def comparison() -> None:
    """Both ends are hooked, and every engine is asked."""
    assert hasattr(import_symbol("engine-client").add_request, "__vllmops__")
    assert import_symbol("engine-core").vllmops_look is cache_comparison.observe_engine_caches
    assert "def collective_rpc" in source("executor")
    clients = importlib.import_module("vllm.v1.engine.core_client")

    async def call(method: str, *args: Any, engine: bytes) -> tuple[Any, ...]:
        return method, *args, engine

    for cls in (clients.AsyncMPClient, clients.DPLBAsyncMPClient):
        client = object.__new__(cls)
        client.core_engines, client._call_utility_async = [b"0", b"1"], call
        answers = asyncio.run(
            adapter.call_engine_utility(SimpleNamespace(engine_core=client), "look", 1)
        )
        assert answers == [("look", 1, b"0"), ("look", 1, b"1")]


def live_requests() -> None:
    """A request is counted while it lives."""
    cls = import_symbol("request")
    one = make_scratch_request(importlib.import_module(cls.__module__))
    assert vllm_objects.count_objects("request") == 1
    assert not one.is_finished()
    del one
    assert vllm_objects.count_objects("request") == 0


def requests_in_flight() -> None:
    """A request is read on each side, as this vLLM keeps it, and ended where it can be."""
    request = make_scratch_request(importlib.import_module(import_symbol("request").__module__))
    scheduler = object.__new__(import_symbol("scheduler"))
    manager = SimpleNamespace(req_to_blocks={request.request_id: [1, 2]})
    scheduler.requests, scheduler.running = {request.request_id: request}, []
    scheduler.waiting = scheduler.kv_holding_waiting = [request]
    scheduler.deferred_waiting, scheduler.skipped_waiting = {request}, [request]
    scheduler.finished_req_ids = {"gone"}
    scheduler.encoder_cache_manager = SimpleNamespace(cached={"a": {request.request_id}})
    scheduler.kv_cache_manager = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=(manager,))
    )
    (read,) = requests.list_engine_requests(scheduler)
    assert (read.id, read.state, read.kv_blocks, read.cache_pins) == (
        *(request.request_id, "deferred", 2, 1),
    )
    assert adapted.list_finished_ids(scheduler) == ["gone"]
    for kind, words in {
        "scheduler": ("finished_req_ids", "self.requests"),
        "engine-client": ("async def abort", "internal: bool", "output_processor"),
    }.items():
        assert [word for word in words if word not in source(kind)] == []
    managers = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    assert "self.req_to_blocks" in inspect.getsource(managers)
    asyncio.run(ended_for_its_client())
    core = SimpleNamespace(**{name: SimpleQueue() for name in QUEUES})
    adapted.abort_engine_requests(core, [request])
    assert core.aborts_queue.get_nowait() == [request.request_id]
    assert core.input_queue.get_nowait()[1] == [request.request_id]
    client, outputs = core.output_queue.get_nowait()
    assert (client, outputs.outputs[0].finish_reason.name) == (request.client_index, "ABORT")
    assert all(f"self.{name} = queue.Queue" in source("engine-core") for name in QUEUES)


QUEUES = ("aborts_queue", "input_queue", "output_queue")


async def ended_for_its_client() -> None:
    """Who waits for a request's output gets the error that vLLM passes on to the client."""
    outputs = importlib.import_module("vllm.v1.engine.output_processor")
    kind = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
    queue = outputs.RequestOutputCollector(kind, "a")
    held = SimpleNamespace(queue=queue, detokenizer=None, stats=None)
    aborted: list[str] = []

    async def abort(names: list[str], *, internal: bool) -> None:
        assert internal
        aborted.extend(names)

    client = SimpleNamespace(
        output_processor=SimpleNamespace(request_states={"a": held}), abort=abort
    )
    assert adapter.find_oldest_request_id(client) == "a"
    await adapted.abort_with_error(client, ["a"], "enough")
    assert aborted == ["a"]
    error = queue.output
    assert str(error) == "enough"
    passed_on = inspect.getsource(import_symbol("engine-client").generate)
    assert any(kind.__name__ in passed_on for kind in type(error).__mro__[:-2])


def drive_healing() -> None:
    """What heals reads a real queue, KV cache and encoder cache, and finds what it calls."""
    request = make_scratch_request(importlib.import_module(import_symbol("request").__module__))
    kv, specs = (importlib.import_module(f"vllm.v1.{name}") for name in KV_CACHE)
    import torch

    layer = specs.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.half)
    group = specs.KVCacheGroupSpec(["layer"], layer)
    sizes = {"max_model_len": 64, "scheduler_block_size": 16, "hash_block_size": 16}
    takes = inspect.signature(kv.KVCacheManager).parameters
    scheduler = object.__new__(import_symbol("scheduler"))
    scheduler.kv_cache_manager = kv.KVCacheManager(
        specs.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group]),
        enable_caching=False,
        **{name: size for name, size in sizes.items() if name in takes},
    )
    queues = importlib.import_module("vllm.v1.core.sched.request_queue")
    scheduler.deferred_waiting, scheduler.skipped_waiting, scheduler.running = set(), [], []
    scheduler.max_model_len, scheduler.current_step = 64, 7
    for policy in queues.SchedulingPolicy:
        scheduler.waiting = queues.create_request_queue(policy)
        scheduler.waiting.add_request(request)
        assert scheduling.list_undeferred_requests(scheduler) == [request]
    assert scheduling.count_usable_blocks(scheduler) == 3
    assert scheduling.count_needed_blocks(scheduler, request) == 1
    assert blocked_admission.explain_too_large(scheduler, request) == ""
    needs = SimpleNamespace(request_id="b", num_tokens=64, num_prompt_tokens=64)
    assert "need 4 blocks" in blocked_admission.explain_too_large(scheduler, needs)
    assert scheduling.has_one_block_pool(scheduler)
    knot(scheduler, request)
    manager = import_symbol("encoder-cache")(cache_size=6)
    first, second = (ScratchRequest(request_id=name, hashes=tuple(name)) for name in ("ab", "cd"))
    for number in range(2):
        manager.allocate(first, number)
    for feature in second.mm_features:
        feature.mm_position = SimpleNamespace(offset=0, length=3)
    assert encoder_cache_deadlock.can_list_holders(manager)
    assert scheduling.count_slots_by_entry(manager, first) == {"a": 3, "b": 3}
    assert scheduling.find_unencoded_input(manager, second) == ("c", 3)
    assert encoder_cache_deadlock.count_releasable_slots(manager, [first]) == 6
    scheduling.release_encoder_slots(manager, first)
    assert (manager.num_freeable_slots, manager.get_cached_input_ids(first)) == (6, set())
    asleep()
    for recomputes in (True, False):
        lost_load(scheduler, request, recomputes=recomputes)
    core = importlib.import_module(
        module_locations.find_symbol_module("engine-core") or ""
    ).EngineCoreProc
    for name, count in ((dead_io_threads.READER, 4), (dead_io_threads.WRITER, 3)):
        inspect.signature(getattr(core, name)).bind(*range(count + 1))
    for kind, words in {
        "engine-core": ("self.step_fn(", "self.addresses", "def run_busy_loop"),
        "engine-client": ("is_paused", "resume_generation", "is_sleeping", "wake_up"),
    }.items():
        assert [word for word in words if word not in source(kind)] == []


def knot(scheduler: Any, holder: Any) -> None:
    """A request that needs what others hold that wait, too, is found; not while any gets on."""
    fields = {"num_tokens": 48, "num_prompt_tokens": 48, "num_computed_tokens": 0}
    head = SimpleNamespace(request_id="head", **fields)
    scheduler.scheduler_reserve_full_isl, scheduler.connector = True, None
    scheduler.requests = {holder.request_id: holder}
    assert blocked_admission.explain_blocked(scheduler, head) == ""  # it fits
    scheduler.kv_cache_manager.allocate_slots(holder, 1)
    assert scheduling.count_free_blocks(scheduler) == 2
    assert "needs 3 more blocks" in blocked_admission.explain_blocked(scheduler, head)
    assert "and requests that wait hold 1" in blocked_admission.explain_blocked(scheduler, head)
    scheduler.running = [holder]
    assert blocked_admission.explain_blocked(scheduler, head) == ""
    scheduler.running = []
    passed = SimpleNamespace(status=holder.status, num_computed_tokens=0)
    scheduler.deferred_waiting, scheduler.skipped_waiting = {holder}, [holder]
    scheduler.waiting, scheduler.kv_holding_waiting = [], []
    scheduler._pause_state = SimpleNamespace(name="UNPAUSED")
    vllm_objects.track_object("scheduler", scheduler)
    assert blocked_admission.find_blocking_requests() == []  # the only one is passed over
    big = SimpleNamespace(request_id="big", status=holder.status, **{**fields, "num_tokens": 64})
    scheduler.deferred_waiting = scheduler.skipped_waiting = scheduler.waiting = [big]
    assert [proof.subject for proof in blocked_admission.find_blocking_requests()] == [
        "big"
    ]  # its grammar took a while
    scheduler.deferred_waiting, scheduler.skipped_waiting = {holder}, [holder]
    scheduler.waiting = [passed]
    first, other = scheduling.list_waiting_requests(scheduler)[:2]
    assert {id(first), id(other)} == {id(holder), id(passed)}
    assert scheduling.list_undeferred_requests(scheduler) == [passed]
    holder.num_computed_tokens = 1  # its blocks came from elsewhere
    assert scheduling.list_undeferred_requests(scheduler)[0] is holder
    holder.num_computed_tokens = 0
    scheduler.kv_cache_manager.free(holder)
    scheduler.deferred_waiting, scheduler.skipped_waiting = set(), []


def asleep() -> None:
    """An engine that its own code puts to sleep is found, and the front end's own code wakes it."""
    kind: Any = type("Own", (import_symbol("executor"),), {"collective_rpc": lambda *_, **__: []})
    kind.__abstractmethods__ = frozenset()
    executor: Any = object.__new__(kind)
    scheduler = object.__new__(import_symbol("scheduler"))
    executor.sleeping_tags = set()
    if not isinstance(getattr(kind, "is_sleeping", None), property):  # up to 0.30
        executor.is_sleeping = False
    scheduler._pause_state = SimpleNamespace(name="UNPAUSED")
    for name, made in {"executor": executor, "scheduler": scheduler}.items():
        vllm_objects.track_object(name, made)
    assert paused_engine.find_paused_engine() == []
    executor.sleep(1)
    (proof,) = paused_engine.find_paused_engine()
    assert "it is asleep" in proof.evidence

    async def yes() -> bool:
        return bool(executor.is_sleeping)

    async def no() -> bool:
        return False

    async def wake(tags: Any) -> bool:
        executor.wake_up(tags)
        return True

    client = object.__new__(import_symbol("engine-client"))
    client.logger_manager = None
    client.engine_core = SimpleNamespace(
        is_sleeping_async=yes,
        wake_up_async=wake,
        is_scheduler_paused_async=no,
        shutdown=lambda *_, **__: None,  # called as it goes
    )
    asyncio.run(paused_engine.wake_and_resume(client))
    assert paused_engine.find_paused_engine() == []
    # Its base: the worker itself needs a GPU.
    worker = object.__new__(import_symbol("worker"))
    worker._sleep_saved_buffers = {}
    vllm_objects.track_object("worker", worker)
    assert paused_engine.find_dropped_weights() == []
    worker._sleep_saved_buffers = {"rope": 1}
    (proof,) = paused_engine.find_dropped_weights()
    assert "level 2" in proof.evidence
    spec = importlib.util.find_spec("vllm.v1.worker.gpu_worker")
    assert "self._sleep_saved_buffers = {" in Path(str(spec and spec.origin)).read_text("utf-8")


def lost_load(scheduler: Any, request: Any, *, recomputes: bool) -> None:
    """A load that is reported as failed is computed again or ended by the scheduler's own code."""
    name, manager = request.request_id, scheduler.kv_cache_manager
    config = SimpleNamespace(kv_cache_groups=[None])
    for key, value in {
        "connector": SimpleNamespace(update_connector_output=lambda _: None),
        "requests": {name: request},
        "skipped_waiting": [request],
        "kv_holding_waiting": [request],
        "finished_recving_kv_req_ids": set(),
        "failed_recving_kv_req_ids": set(),
        "recompute_kv_load_failures": recomputes,
        "kv_cache_config": config,
        "block_size": 16,
        "prefix_replay_tokens": 0,
        "needs_kv_cache_zeroing": False,
        "_kv_fetch_stages": None,
        "log_stats": False,
    }.items():
        setattr(scheduler, key, value)
    request.status = getattr(type(request.status), kv_transfers.WAITS)
    assert manager.allocate_slots(request, request.num_tokens, delay_cache_blocks=True)
    request.num_computed_tokens = request.num_tokens
    assert kv_transfers.list_loading_requests(scheduler) == [request]
    assert kv_transfers.find_failure_policy(scheduler) == ("recompute" if recomputes else "fail")
    importlib.import_module(kv_transfers.OUTPUTS)
    output = SimpleNamespace(kv_connector_output=None)
    told = kv_transfers.add_failed_loads(scheduler, output, {name, "another"}).kv_connector_output
    assert (output.kv_connector_output, told.finished_recving) == (None, {name})
    if told.invalid_block_ids:
        failed = scheduler._handle_invalid_blocks(told.invalid_block_ids, {})
    else:
        failed = scheduler._handle_failed_recving(told.failed_recving)
    assert failed == (set() if recomputes else {name})
    text = source("scheduler")
    assert ".failed_recving" in text or ".invalid_block_ids" in text
    if recomputes:
        scheduler._update_from_kv_xfer_finished(told)
        assert kv_transfers.list_loading_requests(scheduler) == []
        again = kv_transfers.add_failed_loads(scheduler, output, {name})
        assert again is output
        scheduler._update_waiting_for_remote_kv(request)
    assert request.num_computed_tokens == (
        0 if recomputes or told.invalid_block_ids else request.num_tokens
    )
    manager.free(request)
    request.num_computed_tokens = 0


def check_healing() -> str:
    """Drive it; what is wrong where it does not work."""
    try:
        drive_healing()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"


KV_CACHE = ("core.kv_cache_manager", "kv_cache_interface")


def responses() -> None:
    """The routes are ours, and a turn gets the items of the turn before, as this vLLM's types."""
    routes = import_symbol("responses-routes")
    served = vars(importlib.import_module(module_locations.find_symbol_module("responses") or ""))
    cls = served["OpenAIServingResponses"]
    assert cls.__name__ == "StoreBackedServing", vllm_objects.problems
    assert ("GET", "/v1/responses") in [
        (min(route.methods), route.path) for route in routes.routes if hasattr(route, "methods")
    ]
    serving = object.__new__(cls)
    serving.store, serving.get_keyring, serving.request_logger = (
        cls.open_store(),
        lambda: None,
        None,
    )
    serving.models = SimpleNamespace(
        lora_requests={}, is_base_model=lambda _: True, model_name=lambda _: "m"
    )
    serving._is_model_supported = lambda _: True
    from vllmops_responses.server import item_conversion
    from vllmops_responses.server.background.background_runs import BackgroundRuns
    from vllmops_responses.server.conversations import turn as ours
    from vllmops_responses.server.conversations.conversation_turns import (
        ConversationTurns,
    )
    from vllmops_responses.server.conversations.turn_history import HistoryReader
    from vllmops_responses.server.stored_responses import StoredResponsesApi
    from vllmops_responses.server.vllm_interface import RENDERERS, ResponsesRequest, find_renderer

    serving.conversations = ConversationTurns(serving.store)
    serving.runs = BackgroundRuns(serving)
    serving.stored_responses = StoredResponsesApi(
        serving.store, serving.conversations, serving.runs.stop_run
    )
    serving.use_harmony = False
    serving.history = HistoryReader(item_conversion.parse_items, harmony=False)
    assert RENDERERS
    for name in RENDERERS:
        kinds = {inspect.iscoroutinefunction(vars(held)[name]) for held in (cls, cls.__base__)}
        assert len(kinds) == 1, name
    place = module_locations.find_existing_module("vllm.renderers.online_renderer")  # since 0.25
    module = importlib.import_module(place or "vllm.entrypoints.serve.render.serving")
    name, kind = ("online_renderer", "OnlineRenderer") if place else (OLD, "OpenAIServingRender")
    assert name in inspect.getsource(cls.__base__.__init__)
    rendering = object.__new__(getattr(module, kind))
    assert find_renderer(SimpleNamespace(**{name: rendering})) is rendering
    asyncio.run(turns(serving, ResponsesRequest, ours))
    words = [{"role": "user", "content": "hi"}, {"type": "function_call", **CALL}]
    chat = item_conversion.convert_items_to_messages(
        [*words, {"type": "function_call_output", "call_id": "c", "output": "x"}]
    )
    assert [message["role"] for message in chat] == ["user", "assistant", "tool"]
    asyncio.run(check_response_routes(routes, serving))
    asyncio.run(check_event_fields(serving))


OLD = "openai_serving_render"
CALL = {"call_id": "c", "name": "lamp", "arguments": "{}"}
ANSWER = (
    b'{"id":"resp_1","output":[{"type":"message","id":"msg_1_0","role":"assistant","status":'
    b'"completed","content":[{"type":"output_text","text":"hello","annotations":[]}]},'
    b'{"type":"function_call","id":"fc_1_1","call_id":"c","name":"lamp","arguments":"{}"}]}'
)


def left_out(others: list[Any]) -> list[Any]:
    """The content of what a request may say in short, as vLLM has read it.

    Args:
        others: items that vLLM does not render as they are.
    """
    import pytest

    from vllmops_responses.server import item_conversion
    from vllmops_responses.server.vllm_interface import (
        ResponsesRequest,
        can_render_item,
        is_valid_item,
    )

    image = {"type": "input_image", "image_url": "data:,"}
    given = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": "no type"},
        {"type": "message", "role": "assistant", "content": "a type"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "parts, no type"}]},
    ]
    for item in others:
        assert is_valid_item(item), item
        assert can_render_item(item), item
    bodies: tuple[Any, ...] = (None, [], "x", 5)
    for body in bodies:
        with pytest.raises(ValueError, match="not a JSON object"):
            ResponsesRequest.model_validate(body)
    request = ResponsesRequest.model_validate({"input": given})
    *texts, parts = request.input
    both = [{"type": "output_text", "text": text} for text in "ab"]
    thought = [{**part, "type": "reasoning_text"} for part in both]
    joined = item_conversion.parse_items(
        [
            {"type": "message", "role": "assistant", "content": both},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": thought},
        ]
    )
    assert [[part.text for part in item.content] for item in joined] == [["ab"], ["a\n\nb"]]
    return [*(item["content"] for item in texts), parts.content[0].text]


def recorded_requests(folder: str) -> dict[str, list[Any]]:
    """Whether vLLM's and our request model take each recorded request, by the client's name."""

    from vllmops_responses.server.request_parameters import (
        list_ignored_parameters,
        validate_parameters,
    )
    from vllmops_responses.server.vllm_interface import Request, ResponsesRequest

    found: dict[str, list[Any]] = {}
    for file in sorted(Path(folder).iterdir()):
        for line in file.read_text().splitlines():
            taken: list[bool] = []
            for model in (Request, ResponsesRequest):
                try:
                    request = model.model_validate_json(line)
                except ValueError:
                    taken.append(False)
                    continue
                taken.append(True)
            validate_parameters(request, tool_parser=True)
            list_ignored_parameters(request, tool_server=False)
            found.setdefault(file.stem, []).append(taken)
    return found


TEXT: dict[str, Any] = {"type": "input_text", "text": "hi"}
KINDS: tuple[dict[str, Any], ...] = ({}, {"type": "message"}, {"type": "mesage"})
CONTENTS: tuple[Any, ...] = (
    *("hi", "", "a\0b", "grün", "\ud800", None, 5, {}, [], [TEXT], [TEXT, TEXT], [TEXT, "hi"]),
    *([{**TEXT, "text": value}] for value in ("", "grün", "\ud800", None, 5)),
    *([{**TEXT, "type": value}] for value in ("output_text", "text", None, 5)),
)


def messages() -> dict[str, Any]:
    """How many messages vLLM leaves as they are or refuses, as we do; those that differ."""
    from vllmops_responses.server.vllm_interface import Request, ResponsesRequest

    given: list[dict[str, Any]] = [
        {**kind, "role": role, "content": content}
        for kind in KINDS
        for role in ("user", "system", "developer", "tool", None, ["user"])
        for content in CONTENTS
    ]
    counts, differ = Counter[str](), []
    for item in given:
        read: list[Any] = []
        for model in (ResponsesRequest, Request):
            try:
                read += model.model_validate({"input": [item]}).input
            except ValueError:
                read.append(None)
        ours, stock = read
        counts["refused" if stock is None else "as it is" if stock == item else "changed"] += 1
        if ours != stock:
            differ.append(item)
    kinds = {str(model.model_fields["input"].annotation) for model in (ResponsesRequest, Request)}
    return {**counts, "differ": differ, "quick": len(kinds) == 2}


async def turns(serving: Any, request_type: Any, ours: Any) -> None:
    import pytest

    from vllmops_responses.server.wire_format import ApiError

    await serving.store.open()
    stored = Response(
        id="resp_1",
        owner="",
        model="m",
        status="completed",
        created_at=1.0,
        previous_id=None,
        body=ANSWER,
        input=b'[{"type":"message","role":"user","content":"hi"}]',
    )
    assert await serving.store.create(stored)
    body = b'{"input":[{"type":"function_call_output","call_id":"c","output":"done"}]}'
    given = request_type.model_validate(
        {
            "model": "m",
            "previous_response_id": "resp_1",
            **importlib.import_module("json").loads(body),
        }
    )
    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=None)))

    async def read() -> bytes:
        return body

    async def refer(*references: Any, **more: Any) -> Any:
        """A turn whose input begins with references, and the types of its input."""
        items = [*references, *json.loads(body)["input"]]
        asked = request_type.model_validate({"model": "m", "input": items, **more})
        sent = json.dumps({"input": items}).encode()
        raw = SimpleNamespace(app=app, headers={}, body=lambda: asyncio.sleep(0, sent))
        turn = await serving.build_turn(asked, raw)
        return json.loads(turn.items), [
            item["type"] if isinstance(item, dict) else item.type for item in asked.input
        ]

    message, call = {"type": "item_reference", "id": "msg_1_0"}, {"id": "fc_1_1"}
    items, kinds = await refer(message, call)
    assert kinds == ["message", "function_call", "function_call_output"], kinds
    assert [item["type"] for item in items] == kinds
    assert (items[0]["content"][0]["text"], items[1]["name"]) == ("hello", "lamp")
    items, kinds = await refer({"id": "message_1_0"}, store=False)  # as a list of its input has it
    assert items[0]["content"] == [{"type": "input_text", "text": "hi"}]
    items, kinds = await refer(message, previous_response_id="resp_1")
    assert kinds == ["function_call_output"]
    for unknown in ("msg_1_9", "msg_other_0", "msg", "_"):
        with pytest.raises(ApiError, match=unknown) as refused:
            await refer(message, {"type": "item_reference", "id": unknown})
        assert (refused.value.status, refused.value.param) == (400, "input[1]")

    turn = await serving.build_turn(given, SimpleNamespace(app=app, headers={}, body=read))
    token = ours.current.set(turn)
    assert await serving._check_model(given) is None
    ours.current.reset(token)
    kinds = [item["type"] if isinstance(item, dict) else item.type for item in given.input]
    assert kinds == ["message", "message", "function_call", "function_call_output"], kinds
    assert ours.current.get() is None


async def check_event_fields(serving: Any) -> None:
    """The first and the last event of a stream have every field, and the answer is stored."""
    import openresponses_types
    from openai.types.responses import Response as Official
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    from vllmops_responses.server import request_parameters
    from vllmops_responses.server import response_fields as fields
    from vllmops_responses.server import vllm_interface as adapter
    from vllmops_responses.server.conversations import turn as ours

    protocol = importlib.import_module(adapter.ResponsesResponse.__module__)
    request = protocol.ResponsesRequest.model_validate(
        {"model": "m", "input": "hi", "safety_identifier": "s", "metadata": {"a": "b"}}
    )
    params = importlib.import_module("vllm.sampling_params").SamplingParams(max_tokens=4)
    turn = ours.Turn(request, "", b"[]")

    def answer(status: str, usage: Any) -> Any:
        return protocol.ResponsesResponse.from_request(
            request, params, "m", 1, output=[], status=status, usage=usage
        )

    typed: Any = TypeAdapter(ResponseStreamEvent)
    details = {"cached_tokens": 0, "cache_write_tokens": 0}
    if "cache_write_tokens" not in protocol.InputTokensDetails.model_fields:
        del details["cache_write_tokens"]
    usage = protocol.ResponseUsage(
        input_tokens=1,
        output_tokens=1,
        total_tokens=2,
        input_tokens_details=details,
        output_tokens_details={"reasoning_tokens": 0},
    )
    hints = {
        "client_metadata": {"a": "b"},
        "include": ["web_search_call.results"],
        "moderation": {"model": "m"},
        "prompt_cache_options": {"mode": "explicit"},
        "text": {"verbosity": "high"},
    }
    asked = adapter.ResponsesRequest.model_validate({"model": "m", "input": "hi", **hints})
    request_parameters.validate_parameters(asked, tool_parser=True)
    assert request_parameters.list_ignored_parameters(asked, tool_server=False) == [
        "client_metadata",
        "include.web_search_call.results",
        "moderation",
        "prompt_cache_options.mode",
        "text.verbosity",
    ]
    lamp: dict[str, Any] = {"type": "function", "name": "lamp", "parameters": {}}
    door = {**lamp, "name": "door"}
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "door"}],
    }
    asked = adapter.ResponsesRequest.model_validate(
        {"model": "m", "input": "hi", "tools": [lamp, door], "tool_choice": choice}
    )
    assert ([tool.name for tool in asked.tools], asked.tool_choice) == (["door"], "required")
    made = fields.fill_response(
        protocol.ResponsesResponse.from_request(
            asked,
            importlib.import_module("vllm.sampling_params").SamplingParams(max_tokens=4),
            "m",
            1,
            output=[],
            status="completed",
        ),
        asked,
    )
    told = json.loads(fields.encode_model(made))
    assert ([tool["name"] for tool in told["tools"]], told["tool_choice"]) == (
        ["lamp", "door"],
        choice,
    )
    parser = SimpleNamespace(extract_content_ids=lambda tokens: tokens[3:])
    context = SimpleNamespace(
        response_parser=SimpleNamespace(reasoning_parser=parser),
        _accumulated_token_ids=[1, 2, 3, 4],
    )
    thought, said = (SimpleNamespace(type=kind) for kind in ("reasoning", "message"))
    for output, count in (([said], 0), ([thought, said], 3), ([thought], 4)):
        made = SimpleNamespace(output=output, usage=SimpleNamespace(output_tokens=4))
        assert adapter.count_reasoning_tokens(context, made) == count
    made = SimpleNamespace(output=[thought, said], usage=SimpleNamespace(output_tokens=5))
    assert adapter.count_reasoning_tokens(context, made) == 0
    warm = {"model": "m", "input": "hi", "prompt_cache_options": {"prewarm": True}}
    assert request_parameters.is_prewarm_request(protocol.ResponsesRequest.model_validate(warm))
    for status in ("completed", "incomplete"):
        request.request_id = f"resp_{status}"
        # Since 0.33, an incomplete answer has an event of its own.
        kind = status if hasattr(protocol, f"Response{status.capitalize()}Event") else "completed"
        last = getattr(protocol, f"Response{kind.capitalize()}Event")

        async def parts() -> Any:
            for kind in ("Added", "Done"):
                if made := getattr(protocol, f"ResponseReasoningPart{kind}Event", None):
                    yield made(
                        type=f"response.reasoning_part.{kind.lower()}",
                        item_id="rs_1",
                        content_index=0,
                        output_index=0,
                        sequence_number=1,
                        part={"type": "reasoning_text", "text": "hm"},
                    )

        async for part in adapter.normalize_stream_events(parts(), stored=True):
            event = typed.validate_json(fields.encode_model(part))
            assert event.part.text == "hm"

        async def events(status: str = status, kind: str = kind, last: Any = last) -> Any:
            created, done = answer("in_progress", None), answer(status, usage)
            yield protocol.ResponseCreatedEvent(
                type="response.created", sequence_number=0, response=created.model_dump()
            )
            yield last(type=f"response.{kind}", sequence_number=1, response=done)

        frames = [frame async for frame in serving.stream_response(turn, request, events())]
        assert [frame.type for frame in frames] == ["response.created", f"response.{status}"]
        for frame in frames:
            event = json.loads(frame.data)
            openresponses_types.ResponseResource.model_validate(event["response"])
            typed.validate_python(event)
            assert event["response"]["safety_identifier"] == "s"
        stored = json.loads(await serving.stored_responses.retrieve("", request.request_id))
        assert stored == event["response"]
        assert (stored["completed_at"] is not None) is (status == "completed")
        Official.model_validate(stored)


async def check_response_routes(router: Any, serving: Any) -> None:
    """A list, a response, its items, and its end, over HTTP with this vLLM's decorators."""
    import fastapi
    import httpx

    app = fastapi.FastAPI()
    app.include_router(router)
    app.state.openai_serving_responses = serving
    app.state.args = SimpleNamespace(api_key=None)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        listed = (await client.get("/v1/responses")).json()
        assert [response["id"] for response in listed["data"]] == ["resp_1"]
        assert (await client.get("/v1/responses/resp_1")).json()["id"] == "resp_1"
        items = (await client.get("/v1/responses/resp_1/input_items")).json()
        assert len(items["data"]) == 1
        assert (await client.post("/v1/responses/resp_1/cancel")).status_code == 400
        assert (await client.delete("/v1/responses/resp_1")).json()["deleted"] is True
        assert (await client.get("/v1/responses/resp_1")).status_code == 404


DRIVES: dict[str, Callable[[], None]] = {
    "caches": multimodal_caches,
    "encoder-caches": encoder_caches,
    "progress": progress,
    "compare": comparison,
    "requests": requests_in_flight,
    "memory": live_requests,
    "responses": responses,
}
