"""The general way: the tables, the root and its victims, and the labelled texts of the field."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from tests.bench.diagnosis import cases, wilson

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.model.stacks import Frame, ProcessStacks
from vllmops.rules.stacks.explanation import StackFinding, explain_stacks
from vllmops.rules.stacks.signature_matching import format_process_name
from vllmops.rules.stacks.signatures import load_signatures, strip_qualifiers
from vllmops.rules.stacks.thread_phases import (
    Phase,
    WaitReason,
    find_phase_ids,
    find_thread_position,
    find_wait_ids,
    load_frame_tables,
)
from vllmops.rules.stacks.wait_chains import find_wait_chain, load_hang_tables

HERE = Path(__file__).parent
TEXTS = [path for folder in ("field", "stacks") for path in sorted((HERE / folder).glob("*.txt"))]

LOOP = """\
    execute_model (vllm/v1/worker/cpu_worker.py:210)
    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:930)
"""
ENGINE = """\
Process 100: VLLM::EngineCore
Thread 100 (idle): "MainThread"
    poll (zmq/sugar/poll.py:106)
    acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:674)
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:755)
    get_response (vllm/v1/executor/multiproc_executor.py:380)
    step_with_batch_queue (vllm/v1/engine/core.py:430)
    run_busy_loop (vllm/v1/engine/core.py:1300)
"""


def worker(rank: int, frames: str) -> str:
    head = f"Process {200 + rank}: VLLM::Worker_TP{rank}\nThread {200 + rank}"
    return f'{head} (active): "MainThread"\n{frames}{LOOP}'


DEEP = """\
    all_reduce (torch/distributed/distributed_c10d.py:2900)
    all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:60)
    all_reduce (vllm/distributed/parallel_state.py:520)
    forward (vllm/model_executor/models/qwen3.py:200)
"""
BEFORE = """\
    all_reduce (vllm/distributed/parallel_state.py:519)
    forward (vllm/model_executor/models/qwen3.py:200)
"""
REST = """\
    poll (zmq/sugar/poll.py:106)
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:755)
"""


@pytest.mark.parametrize(
    ("frame", "held"),
    [
        ("decompress (PIL/ImageFile.py:301)", True),
        ("_update_request (vllm/v1/core/sched/scheduler.py:1400)", True),
        ("step (vllm/v1/engine/core.py:470)", False),
        ("schedule (vllm/v1/core/sched/scheduler.py:510)", False),
        ("find_longest_cache_hit (vllm/v1/core/kv_cache_manager.py:201)", False),
        ("evict (sglang/srt/mem_cache/radix_cache.py:330)", False),
    ],
)
def test_gil_holder_that_may_be_calling_python_is_not_reported(frame: str, held: bool) -> None:
    """Where a stack ends in a function that calls Python, the frames further in are missing."""
    dump = f'Process 1: VLLM::EngineCore\nThread 1 (active+gil): "MainThread"\n    {frame}\n'
    dump += "    step_with_batch_queue (vllm/v1/engine/core.py:512)\n"
    dump += "    run_busy_loop (vllm/v1/engine/core.py:1164)\n\n"
    found = explain_stacks(parse_stacks(dump * 3), {"progress": "frozen"}).findings
    assert ("stack.gil-held" in {finding.code for finding in found}) == held


def find_first_finding(text: str) -> StackFinding:
    return explain_stacks(parse_stacks(text)).findings[0]


def frame_of(example: str) -> Frame:
    found = re.fullmatch(r"(\S+) \((.+)\)", example)
    assert found, example
    return Frame(found[1], found[2], found[2])


def test_a_frame_is_looked_up_as_if_each_pattern_were_tried() -> None:
    """Most patterns are never compiled: a word of theirs is looked for in the name first."""
    samples = [sample for path in TEXTS for sample in parse_stacks(path.read_text()).samples]
    threads = [t for sample in samples for process in sample.processes for t in process.threads]
    frames = {(f.function, f.short_file) for thread in threads for f in thread.frames}
    rows: tuple[Phase | WaitReason, ...] = (*load_frame_tables().phase, *load_frame_tables().wait)
    names = [name for row in rows for name in row.names]
    words = {re.sub(r"\\[wS][*+]|[?()]", "", w) for n in names for w in n.function.split("|")}
    frames |= {(cased, "torch/x.py") for word in words for cased in (word, word.upper())}
    for function, file in frames:
        frame = Frame(function, file, file)
        name, place = strip_qualifiers(function), f"{file} {function}" if "::" in function else file
        for of, table in (
            (find_phase_ids, load_frame_tables().phase),
            (find_wait_ids, load_frame_tables().wait),
        ):
            tried = tuple(
                row.id
                for row in table
                if any(
                    (not n.function or re.fullmatch(n.function, name))
                    and (not n.file or re.search(n.file, place))
                    for n in row.names
                )
            )
            assert of(frame) == tried, frame


@pytest.mark.parametrize(
    "row", [*load_frame_tables().phase, *load_frame_tables().wait], ids=lambda row: row.id
)
def test_every_name_matches_its_example(row: Phase | WaitReason) -> None:
    of = find_phase_ids if isinstance(row, Phase) else find_wait_ids
    for name in row.names:
        assert row.id in of(frame_of(name.example)), name.example
        if name.function:
            assert re.fullmatch(name.function, name.example.split(" ")[0])
        if name.file:
            assert re.search(name.file, frame_of(name.example).short_file)


def test_the_answers_name_what_the_tables_have() -> None:
    known = {signature.id for signature in load_signatures()}
    phases = {phase.id for phase in load_frame_tables().phase}
    for answer in load_hang_tables().answer:
        assert set(answer.ids) <= known
        assert set(answer.phase) <= phases
        assert len(answer.ids) <= 3
    assert {row.id for row in load_hang_tables().crash} <= known


def test_the_texts_show_every_phase_and_every_wait() -> None:
    """Three of each, in texts or in parts of them."""
    seen: Counter[str] = Counter()
    for path in TEXTS:
        places = {
            word
            for sample in parse_stacks(path.read_text()).samples
            for process in sample.processes
            for thread in process.threads
            for place in [find_thread_position(process, thread)]
            for word in (f"phase {place.phase.id}", f"wait {place.wait}")
        }
        seen.update(places)
    wanted = [f"phase {row.id}" for row in load_frame_tables().phase]
    wanted += [f"wait {row.id}" for row in load_frame_tables().wait]
    assert {word: seen[word] for word in wanted if seen[word] < 3} == {}


def test_a_rank_that_did_not_enter_the_collective_is_the_root() -> None:
    finding = find_first_finding(ENGINE + worker(0, DEEP) + worker(1, BEFORE))
    assert finding.subject == "Worker_TP1 201"
    assert finding.victims == ("Worker_TP0 200", "EngineCore 100")
    assert finding.code == "stack.worker-stuck-broadcast"
    assert finding.phase == "running the model"


def test_the_process_is_named_though_a_figure_names_the_gpu() -> None:
    smi = "| N/A   38C    P0   118W /  700W |   74211MiB /  81559MiB |    100%      Default |\n"
    finding = find_first_finding(smi + worker(2, BEFORE.replace("all_reduce", "wait_stream")))
    assert (finding.code, finding.subject) == ("stack.gpu-kernel-stuck", "Worker_TP2 202")
    assert finding.confidence == "likely"


def test_the_library_s_name_of_a_collective_makes_no_other_one_of_it() -> None:
    gather = BEFORE.replace("all_reduce", "all_gather")
    inside = "    all_gather_into_tensor (torch/distributed/distributed_c10d.py:4000)\n"
    finding = find_first_finding(ENGINE + worker(0, inside + gather) + worker(1, gather))
    assert (finding.code, finding.subject) == ("stack.worker-stuck-broadcast", "Worker_TP1 201")


def test_waiting_thread_of_ray_does_not_change_the_finding() -> None:
    """Of a real server with two actors."""
    listener = """\
Thread 101 (idle): "ray_listen_error_messages"
    listen_error_messages (ray/_private/worker.py:2472)
    run (threading.py:982)
    _bootstrap_inner (threading.py:1045)
    _bootstrap (threading.py:1002)
"""
    finding = find_first_finding(ENGINE + listener + worker(0, DEEP) + worker(1, BEFORE))
    assert (finding.code, finding.subject) == ("stack.worker-stuck-broadcast", "Worker_TP1 201")


def test_frames_inherited_by_fork_are_ignored() -> None:
    """Of a real server with two ranks on the CPU: what started them stands below their own."""
    forked = """\
    run (multiprocessing/process.py:108)
    _bootstrap (multiprocessing/process.py:314)
    _launch (multiprocessing/popen_fork.py:71)
    start (multiprocessing/process.py:121)
    make_worker_process (vllm/v1/executor/multiproc_executor.py:755)
    _init_executor (vllm/v1/executor/multiproc_executor.py:196)
"""
    operator = """\
    __call__ (torch/_ops.py:1279)
    all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:275)
"""
    found = find_first_finding(
        ENGINE + forked + worker(0, operator + BEFORE) + forked + worker(1, BEFORE) + forked
    )
    assert (found.code, found.subject) == ("stack.worker-stuck-broadcast", "Worker_TP1 201")
    assert set(found.victims) == {"Worker_TP0 200", "EngineCore 100"}
    assert found.phase == "running the model"


def test_a_process_whose_title_lacks_its_ranks_is_named_by_them() -> None:
    """As a worker of data parallel engines of a model without experts."""
    process = ProcessStacks(
        role="worker", pid=7, create_time=1.0, title="VLLM::Worker", ranks="DP1"
    )
    assert format_process_name(process) == "worker DP1 7"


def test_an_engine_that_writes_waits_for_the_worker_that_does_not_read() -> None:
    engine = ENGINE.replace("get_response", "collective_rpc").replace("dequeue", "enqueue")
    finding = find_first_finding(
        engine.replace("acquire_read", "acquire_write") + worker(1, BEFORE)
    )
    assert (finding.subject, finding.victims) == ("Worker_TP1 201", ("EngineCore 100",))


LINE = (
    "INFO [shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds.\n"
)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ("    hipStreamSynchronize (libamdhip64.so.7)\n", "gpu-kernel-stuck"),
        ("    cuLibraryLoadData (libcuda.so.1)\n", "module-load-stuck"),
        ("    clFinish (libOpenCL.so.1)\n", "gpu-kernel-stuck"),
    ],
)
def test_native_worker_frame_yields_the_specific_finding(frames: str, code: str) -> None:
    """On platforms that no signature lists."""
    found = explain_stacks(parse_stacks(LINE + ENGINE + worker(0, frames)))
    assert found.verdict == "hang"
    assert [f.code for f in found.findings] == [f"stack.{code}"]
    assert found.findings[0].subject == "Worker_TP0 200"


def test_a_signature_s_root_is_who_waits_for_nobody() -> None:
    pushed = "    crunch (acme/hooks.py:12)\n"
    (finding,) = explain_stacks(parse_stacks(LINE + ENGINE + worker(0, pushed))).findings
    assert (finding.code, finding.subject) == ("stack.worker-stuck-broadcast", "Worker_TP0 200")
    assert (finding.victims, finding.phase) == (("EngineCore 100",), "running the model")


HELPER = """\
Thread 9 (idle): "Thread-2 (_flush)"
    poll (libc.so.6)
    communicate (acme/metrics.py:12)
    run (threading.py:1010)
    _bootstrap_inner (threading.py:1073)
    _bootstrap (threading.py:1030)
    0x7f259f405aa4 (libc.so.6)
"""


def test_a_helper_thread_of_a_process_whose_head_is_cut_is_no_root() -> None:
    finding = find_first_finding(HELPER + worker(1, DEEP))
    assert (finding.code, finding.subject) == ("stack.collective-stall", "Worker_TP1 201")


def test_a_thread_at_work_tells_more_than_a_main_thread_that_is_cut() -> None:
    cut = "    decorate_context (torch/utils/_contextlib.py:120)\n    <module> (<string>:1)\n"
    work = """\
Thread 9 (idle): "Thread-2 (forward_thread_func)"
    register_window (pynccl_wrapper.py:540)
    ncclCommWindowRegister (pynccl.py:308)
    forward (acme_vocab.py:476)
    _bootstrap_inner (threading.py:1073)
"""
    finding = find_first_finding(cut + work)
    assert (finding.code, finding.phase) == ("stack.collective-stall", "running the model")


def test_arrows_tell_which_end_of_a_stack_is_innermost() -> None:
    text = """It hangs.
TP0: execute_model → _prepare_inputs → broadcast_tensor_dict → broadcast
TP1: execute_model → forward → tensor_model_parallel_all_gather → all_gather_into_tensor
"""
    finding = find_first_finding(text)
    assert (finding.code, finding.subject) == ("stack.collective-mismatch", "TP0, TP1")


def test_sentences_tell_the_victims_and_the_phase() -> None:
    text = "It hangs. TP1 is in `execute_model`, inside `cuModuleLoadData`; TP0 waits in `dequeue`."
    finding = find_first_finding(text)
    assert (finding.subject, finding.victims) == ("TP 1", ("TP 0",))
    assert (finding.phase, bool(finding.waits_for)) == ("running the model", True)


def test_a_collective_in_a_connector_s_code_waits_for_the_ranks() -> None:
    """It looks the same on all ranks but one, so who is missing counts, and no transfer."""
    frames = """\
    all_reduce (torch/distributed/distributed_c10d.py:3075)
    agree_on_blocks (acme_lmcache/lmcache/v1/cache_tree.py:196)
    schedule (vllm/v1/core/sched/scheduler.py:300)
"""
    other = frames.replace("all_reduce", "broadcast")
    finding = find_first_finding(worker(0, frames) + worker(1, other) + worker(2, other))
    assert (finding.code, finding.subject) == ("stack.collective-mismatch", "Worker_TP0 200")


def test_a_query_of_nvidia_smi_that_ends_the_text() -> None:
    rows = "utilization.gpu [%], utilization.memory [%], temperature.gpu, power.draw [W]\n"
    finding = find_first_finding(f"{rows}97 %, 0 %, 51, 19.10 W")
    assert finding.code == "stack.gpu-kernel-stuck"


def test_a_compiler_that_runs_is_work() -> None:
    frames = "    make_cubin (triton/backends/nvidia/compiler.py:430)\n"
    table = "root 5511 99.0 ptxas -arch=sm_90a /tmp/x.ptx -o /tmp/x.cubin\n"
    assert explain_stacks(parse_stacks(worker(0, frames))).findings[0].code == "stack.jit-or-lock"
    assert explain_stacks(parse_stacks(table + worker(0, frames))).findings == ()


def test_an_end_that_waits_for_the_other_ranks() -> None:
    ending = """\
Process 7: VLLM::Worker_TP0
Thread 7 (active): "MainThread"
    destroy_process_group (torch/distributed/distributed_c10d.py:2150)
    shutdown (vllm/v1/executor/multiproc_executor.py:840)
    worker_main (vllm/v1/executor/multiproc_executor.py:880)
"""
    finding = find_first_finding(ending)
    assert (finding.code, finding.phase) == ("stack.collective-stall", "shutting down")


def test_a_structure_is_known_by_its_file() -> None:
    frames = """\
    _walk_once (sglang/srt/mem_cache/radix_cache.py:12)
    match_prefix (sglang/srt/mem_cache/radix_cache.py:380)
    get_next_batch_to_run (sglang/srt/managers/scheduler.py:1690)
"""
    assert find_first_finding(worker(0, frames)).code == "stack.scheduler-python-spin"


def test_a_forward_pass_is_known_by_its_name() -> None:
    frames = "    put_rows (pool.py:12)\n    forward_prepare (acme_model.py:7)\n"
    finding = find_first_finding(f'Thread 3 (active): "MainThread"\n{frames}    ...\n')
    assert (finding.code, finding.phase) == ("stack.gpu-kernel-stuck", "running the model")


def test_ranks_of_one_count_are_written_together() -> None:
    """As NCCL's RAS does it in a large job; the groups of a few name their ranks."""
    ras = """\
#0-0 (fa93) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation {few}
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 3032 on node n1
  Rank 13 -- GPU 5 managed by process 3033 on node n1
"""
    near, far = find_first_finding(ras.format(few=640)), find_first_finding(ras.format(few=612))
    assert (near.code, near.subject) == ("stack.gpu-kernel-stuck", "30 ranks")
    assert (far.code, far.subject) == ("stack.collective-mismatch", "30 ranks")
    assert find_first_finding(ras.format(few=700)).subject == "rank 12, rank 13"


def test_a_server_that_is_not_named_tells_least() -> None:
    line = "DEBUG [core_client.py:425] Waiting for 1 core engine proc(s) to start: {0}\n"
    assert find_first_finding("It hangs at the start.\n\n" + 4 * line).subject == "the engine"


def test_a_rank_at_rest_is_missing_from_the_collective() -> None:
    rest = worker(1, REST).replace(LOOP.splitlines()[0] + "\n", "")
    finding = find_first_finding(ENGINE + worker(0, DEEP) + rest)
    assert (finding.subject, finding.victims[0]) == ("Worker_TP1 201", "Worker_TP0 200")


def test_the_few_of_different_collectives_are_the_root() -> None:
    other = BEFORE.replace("all_reduce", "all_gather")
    text = worker(0, DEEP) + worker(1, DEEP) + worker(2, other)
    finding = find_first_finding(text)
    assert (finding.code, finding.subject) == ("stack.collective-mismatch", "Worker_TP2 202")
    assert any("all_gather" in line for line in finding.lines)
    assert any("all_reduce" in line for line in finding.lines)


def test_workers_in_one_collective_yield_a_collective_stall() -> None:
    finding = find_first_finding("".join(worker(rank, DEEP) for rank in range(4)))
    assert finding.code == "stack.collective-stall"
    assert finding.victims == ()


def test_everybody_at_rest_waits_for_nobody() -> None:
    (sample,) = parse_stacks(worker(0, REST).replace(LOOP.splitlines()[0] + "\n", "")).samples
    assert find_wait_chain(sample, {}) is None


def test_timeout_log_line_raises_confidence_of_a_single_dump() -> None:
    text = ENGINE + worker(0, DEEP) + worker(1, BEFORE)
    assert explain_stacks(parse_stacks(text)).verdict == "maybe"
    assert find_first_finding(text).confidence == "possible"
    assert find_first_finding(text).confirmation
    found = explain_stacks(
        parse_stacks("TimeoutError: RPC call to execute_model timed out.\n" + text)
    )
    assert found.verdict == "hang"
    assert found.findings[0].confidence in {"likely", "sure"}
    assert found.findings[0].subject == "Worker_TP1 201"


def test_tokens_that_come_are_work() -> None:
    assert (
        explain_stacks(parse_stacks(ENGINE + worker(0, DEEP)), {"progress": "moving"}).verdict
        == "working"
    )


def test_the_texts_of_the_field() -> None:
    found = cases(HERE / "field")
    hangs = [case for case in found if case.label not in {"none", "unknown", "idle-spin-normal"}]
    assert not [case.name for case in found if case.is_false_alarm]
    assert not [case.name for case in hangs if not case.is_within(2)]
    assert sum(case.is_within(1) for case in hangs) >= 0.9 * len(hangs)
    assert not [case.name for case in hangs if case.is_wrong_hang]
    rooted = [case for case in hangs if case.root]
    assert len(rooted) > 30
    assert sum(case.is_root_right for case in rooted) >= 0.9 * len(rooted)
    phased = [case for case in hangs if case.phase]
    assert sum(case.is_phase_right for case in phased) >= 0.9 * len(phased)


def test_an_interval() -> None:
    low, high = wilson(27, 27)
    assert (round(low, 2), high) == (0.88, 1.0)


IDLE = """\
Process 100: VLLM::EngineCore
Thread 100 (idle): "MainThread"
    wait (threading.py:355)
    get (queue.py:171)
    _process_input_queue (vllm/v1/engine/core.py:1480)
    run_busy_loop (vllm/v1/engine/core.py:1458)
Thread 101 (idle): "mq-loop"
    poll (zmq/sugar/poll.py:106)
    _main_loop (lmcache/v1/multiprocess/mq.py:240)
    run (threading.py:1012)
    _bootstrap (threading.py:1032)
"""


def test_an_idle_engine_with_a_connector_stays_idle() -> None:
    found = explain_stacks(parse_stacks(IDLE * 3))
    assert (found.verdict, found.samples) == ("idle", 3)
    assert found.findings[0].code == "stack.idle-spin-normal"
    assert [finding.confidence for finding in found.findings[1:]] == ["possible"]


@pytest.mark.parametrize("name", ["vllmops-admin", "Thread-7 (process_request_thread)"])
def test_the_agents_own_threads_are_no_cause(name: str) -> None:
    own = f"""Thread 101 (idle): "{name}"
    recv_into (vllmops/rpc/agent.py:217)
    readinto (socket.py:706)
    _read_status (http/client.py:286)
    exchange (vllmops/rpc/agent.py:248)
    run (vllmops/agent/remote.py:58)
"""
    assert explain_stacks(parse_stacks(own)).findings == ()
    assert name not in str(explain_stacks(parse_stacks(ENGINE + own)).findings)


def test_core_file_diagnosis_asks_for_no_further_dumps() -> None:
    stacks = 'Process 9: VLLM::Worker_TP0\nThread 9 (active): "MainThread"\n'
    stacks += "    all_reduce (torch/distributed/distributed_c10d.py:2900)\n"
    stacks += "    execute_model (vllm/v1/worker/gpu_worker.py:640)\n"
    pasted = parse_stacks(stacks)
    (sample,) = pasted.samples
    ended = [structs.replace(process, source="pystack") for process in sample.processes]
    core = replace(pasted, samples=(structs.replace(sample, processes=tuple(ended)),))
    for made, asks in ((pasted, True), (core, False)):
        found = explain_stacks(made)
        words = " ".join([*found.notes, *(finding.confirmation for finding in found.findings)])
        assert ("three dumps" in words or "take 3" in words) is asks
