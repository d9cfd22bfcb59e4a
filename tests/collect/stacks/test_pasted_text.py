"""Forms that no transformation of a sample makes; the others are in `rules/paste_forms.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllmops.collect.stacks.pasted_text import GUESSED, parse_stacks
from vllmops.model.pasted_stacks import PastedStacks
from vllmops.model.stacks import ProcessStacks
from vllmops.rules.stacks.explanation import explain_stacks

STACKS = Path(__file__).parents[2] / "rules/stacks"

FRAGMENT = """\
    popitem (vllm/utils/cache.py:190)
    __setitem__ (cachetools/__init__.py:76)
    get_and_update_item (vllm/multimodal/cache.py:617)
    get_and_update_features (vllm/multimodal/cache.py:560)
"""

CRASH = """\
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720] EngineCore encountered a fatal error.
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720] Traceback (most recent call last):
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720]   File "/x/vllm/v1/engine/core.py", \
line 711, in run_engine_core
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720]     engine_core.run_busy_loop()
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720]     ^^^^^^^^^^^^^^^^^^^^^^^^^^^
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720]   File "/x/vllm/v1/engine/core.py", \
line 738, in run_busy_loop
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720]     self._process_engine_step()
(EngineCore_DP0 pid=559) ERROR 10-20 03:20:50 [core.py:720] RuntimeError: CUDA error: an illegal \
memory access was encountered
"""

FATAL = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f83311c46c0 (most recent call first):
  File "/x/vllm/v1/worker/gpu_model_runner.py", line 4160 in execute_model
  File "/x/vllm/v1/executor/multiproc_executor.py", line 1041 in worker_busy_loop

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""

PY_BT = """\
Attaching to process 4120
(gdb) py-bt
Traceback (most recent call first):
  <built-in method poll of zmq.backend Socket object>
  File "/x/vllm/v1/engine/core.py", line 1590, in _process_input_queue
    req = self.input_queue.get(block=block)
  File "/x/vllm/v1/engine/core.py", line 1551, in run_busy_loop
    self._process_input_queue()
"""

BT = """\
Thread 2 (Thread 0x7f8 (LWP 4121) "VLLM::EngineCor"):
#0  0x00007f2 in futex_wait (private=0, expected=0, futex_word=0x7f) at ../futex-internal.h:146
#1  PyThread_acquire_lock_timed (lock=0x1) at Python/thread_pthread.h:483
#2  _PyEval_EvalFrameDefault (tstate=0x55, frame=0x7f, throwflag=0) at Python/bytecodes.c:3263

Thread 1 (Thread 0x7f9 (LWP 4120) "VLLM::EngineCor"):
#0  0x00007f3 in cuEventSynchronize () from /usr/lib/x86_64-linux-gnu/libcuda.so.1
#1  0x00007f4 in std::function<void (at::Tensor const&)>::operator()(at::Tensor const&) const () \
from /x/libtorch_cpu.so
#2  _PyEval_EvalFrameDefault (tstate=0x55, frame=0x7f, throwflag=0) at Python/bytecodes.c:3263
"""

FAULTHANDLER = """\
Timeout (0:01:00)!
Thread 0x00007f83311c46c0 (most recent call first):
  File "/x/threading.py", line 327 in wait
  File "/x/queue.py", line 171 in get
  File "/x/vllm/v1/engine/core.py", line 1968 in process_output_sockets

Thread 0x00007f8332e18b80 (most recent call first):
  File "/x/vllm/v1/engine/core.py", line 667 in step
  File "<string>", line 1 in <module>
"""


def sample(stem: str) -> str:
    return (STACKS / f"{stem}.txt").read_text()


def the_process(pasted: PastedStacks) -> ProcessStacks:
    (found,) = pasted.samples
    (process,) = found.processes
    return process


def test_a_fragment_of_four_frames() -> None:
    process = the_process(parse_stacks(FRAGMENT))
    assert (process.role, process.pid, len(process.threads)) == ("engine", 0, 1)
    (finding,) = explain_stacks(parse_stacks(FRAGMENT)).findings
    assert finding.code == "stack.mm-cache-eviction-spin"


@pytest.mark.parametrize(
    "head",
    [
        "py-spy of Worker_TP2:",
        "Here is the stack of the `Worker_TP2` process:",
        "**from Worker_TP2:**",
    ],
)
def test_a_process_that_a_sentence_names(head: str) -> None:
    pasted = parse_stacks(f"{head}\n```\n{FRAGMENT}```\n")
    assert the_process(pasted).title == "VLLM::Worker_TP2"


def test_a_crash_is_no_hang() -> None:
    found = explain_stacks(parse_stacks(CRASH))
    assert found.verdict == "crash"
    (finding,) = found.findings
    assert (finding.code, finding.hang) == ("stack.crash", False)
    assert finding.subject == "EngineCore_DP0 pid 559"
    assert finding.lines[0] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    # Oldest first in the text, innermost first here.
    assert finding.lines[1].startswith("raised at: run_busy_loop (core.py:738) < run_engine_core")
    assert parse_stacks(CRASH).samples == ()


def test_a_line_of_code_is_no_rest_of_the_longest_line() -> None:
    """What a terminal cuts off begins where lines begin."""
    lines = ['  File "/srv/vllm/v1/engine/core.py", line 510, in step_with_queue', "    raise e"]
    text = "\n".join(["Traceback (most recent call last):", *lines])
    (crash,) = parse_stacks(text).crashes
    assert crash.frames[0].function == "step_with_queue"


def test_a_crash_whose_head_was_not_pasted() -> None:
    found = explain_stacks(parse_stacks("".join(CRASH.splitlines(keepends=True)[2:])))
    assert (found.verdict, len(found.findings)) == ("crash", 1)


def test_the_same_crash_told_twice_is_one() -> None:
    assert len(explain_stacks(parse_stacks(CRASH + CRASH)).findings) == 1


def test_a_fatal_error_is_a_crash() -> None:
    found = explain_stacks(parse_stacks(FATAL))
    assert found.verdict == "crash"
    assert found.findings[0].lines[0] == "Fatal Python error: Segmentation fault"


def test_a_crash_beside_stacks() -> None:
    found = explain_stacks(parse_stacks(CRASH + sample("input-thread-dead")))
    assert {item.code for item in found.findings} == {"stack.crash", "stack.input-thread-dead"}
    assert found.verdict == "hang"


def test_the_tracebacks_of_gdb_are_innermost_first() -> None:
    process = the_process(parse_stacks(PY_BT))
    assert (process.pid, process.role) == (4120, "engine")
    functions = [frame.function for frame in process.threads[0].frames]
    assert functions == ["_process_input_queue", "run_busy_loop"]
    assert parse_stacks(PY_BT).crashes == ()


def test_gdb_with_frames_of_the_interpreter_alone() -> None:
    process = the_process(parse_stacks(BT))
    assert [(thread.tid, thread.state) for thread in process.threads] == [
        (4121, "idle"),
        (4120, "active"),
    ]
    assert process.note == GUESSED
    frame = process.threads[1].frames[0]
    assert (frame.function, frame.file) == (
        "cuEventSynchronize",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    )
    assert explain_stacks(parse_stacks(BT)).verdict == "maybe"


def test_processes_of_faulthandler_that_nothing_names() -> None:
    """The main thread is the last of each."""
    (found,) = parse_stacks(FAULTHANDLER.partition("\n")[2] * 2).samples
    assert [len(process.threads) for process in found.processes] == [2, 2]
    assert [thread.state for thread in found.processes[0].threads] == ["idle", "active"]


def test_a_process_that_comes_again_is_another_sample() -> None:
    pasted = parse_stacks(sample("lost-broadcast"))
    assert [len(found.processes) for found in pasted.samples] == [4, 4, 4]


def test_a_last_sample_that_breaks_off_is_left_out() -> None:
    text = sample("worker-stuck-broadcast.two-samples")
    cut = (text * 2)[: -len(text) // 8]
    assert len(parse_stacks(text * 2).samples) == 4
    assert len(parse_stacks(cut).samples) == 3
    assert explain_stacks(parse_stacks(cut)).verdict == "hang"


def test_local_variables_are_no_frames() -> None:
    text = (
        'Thread 7 (active): "MainThread"\n    step (vllm/v1/engine/core.py:667)\n'
        '        Locals:\n            text: "popitem (vllm/utils/cache.py:190)"\n'
        "            call: popitem (vllm/utils/cache.py:190)\n"
    )
    assert [frame.function for frame in the_process(parse_stacks(text)).threads[0].frames] == [
        "step"
    ]


def test_log_lines_are_no_frames() -> None:
    text = (
        "INFO 11-20 03:12:44 [core.py:99] init engine took 3.1 s (compilation: 1.2 s)\n"
        "GET /health (127.0.0.1:8000)\nsee vllm (https://docs.vllm.ai)\n"
    )
    assert parse_stacks(text).samples == ()


INTERRUPTED = """\
^CTraceback (most recent call last):
  File "/v/vllm/entrypoints/llm.py", line 500, in generate
    outputs = self._run_engine()
  File "/v/vllm/v1/worker/gpu_model_runner.py", line 3800, in execute_model
    self.event.synchronize()
  File "/v/torch/cuda/streams.py", line 231, in synchronize
    super().synchronize()
KeyboardInterrupt
"""


def test_keyboard_interrupt_traceback_is_parsed_as_a_stack() -> None:
    pasted = parse_stacks(INTERRUPTED)
    functions = [frame.function for frame in the_process(pasted).threads[0].frames]
    assert functions == ["synchronize", "execute_model", "generate"]
    assert pasted.crashes == ()
    assert explain_stacks(pasted).findings[0].code == "stack.gpu-kernel-stuck"


@pytest.mark.parametrize(
    "text",
    [
        "synchronize (streams.py:231) ← get_output (runner.py:260) ← step (engine/core.py:400)",
        "it hangs in `synchronize` (streams.py) <- `get_output (runner.py:260)` <- `step`",
        "EngineCore main thread: step() -> get_output() -> synchronize()",
        "1. step (vllm/v1/engine/core.py:400)\n2. get_output (runner.py:260)\n"
        "3. synchronize (streams.py:231)",
        "* `synchronize` torch/cuda/streams.py:231\n* `get_output` v1/runner.py:260\n"
        "* `step` v1/engine/core.py:400",
        "v1/engine/core.py:400 in step\nv1/runner.py:260 in get_output\n"
        "cuda/streams.py:231 in synchronize",
        "#0 synchronize from /x/streams.py:231\n#1 get_output from /x/runner.py:260\n"
        "#2 step from /x/core.py:400",
        "  └─ step (core.py:400)\n     └─ get_output (runner.py:260)\n"
        "        └─ synchronize (streams.py:231)",
    ],
)
def test_frames_as_people_type_them(text: str) -> None:
    frames = [frame.function for frame in the_process(parse_stacks(text)).threads[0].frames]
    assert [name for name in frames if name != "it"] == ["synchronize", "get_output", "step"]


def test_an_issue_is_read_by_its_comments() -> None:
    """A dump of somebody else is no second sample."""
    comments = [{"body": FRAGMENT}, {"body": "me too"}, {"body": FRAGMENT}]
    pasted = parse_stacks(
        json.dumps({"title": "it hangs", "body": "see below", "comments": comments})
    )
    assert [len(section.samples) for section in pasted.sections] == [0, 1, 0, 1]
    assert [finding.code for finding in explain_stacks(pasted).findings] == [
        "stack.mm-cache-eviction-spin"
    ]


TIMED_OUT = """\
(EngineCore pid=9) Traceback (most recent call last):
(EngineCore pid=9)   File "/x/vllm/v1/executor/multiproc_executor.py", line 380, in get_response
(EngineCore pid=9) TimeoutError: RPC call to execute_model timed out.
(APIServer pid=8) Traceback (most recent call last):
(APIServer pid=8)   File "/x/vllm/v1/engine/async_llm.py", line 600, in output_handler
(APIServer pid=8) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def test_a_time_out_of_the_engine_is_a_stuck_worker() -> None:
    found = explain_stacks(parse_stacks(TIMED_OUT))
    assert (found.verdict, found.findings[0].code) == ("hang", "stack.worker-stuck-broadcast")
    assert len(found.findings) == 1


def test_a_time_out_after_a_crash_is_a_crash() -> None:
    found = explain_stacks(parse_stacks(CRASH + TIMED_OUT))
    assert found.verdict == "crash"
    assert "illegal memory access" in found.findings[0].title


def test_a_table_of_py_spy_top_has_the_callers_of_what_runs() -> None:
    rows = """\
  %Own   %Total  OwnTime  TotalTime  Function (filename)
 97.00% 100.00%   9.70s    10.0s   spin_once (acme/ring.py)
  2.00%   2.00%   0.20s    0.20s   tick (acme/clock.py)
  1.00% 100.00%   0.10s    10.0s   drain (acme/ring.py)
  0.00% 100.00%   0.00s    10.0s   process_input_sockets (vllm/v1/engine/core.py)
"""
    ((process,),) = (sample.processes for sample in parse_stacks(rows).samples)
    assert [frame.function for frame in process.threads[0].frames] == [
        "spin_once",
        "drain",
        "process_input_sockets",
    ]


@pytest.mark.parametrize("digit", ["7", "f", "\N{ARABIC-INDIC DIGIT SEVEN}"])
@pytest.mark.parametrize(
    "text",
    [
        'Process ¤: VLLM::EngineCore\nThread 1 (idle): "MainThread"\n    wait (threading.py:1)',
        'Thread ¤ (idle): "MainThread"\n    wait (threading.py:¤)',
        'Thread 0x¤ (most recent call first):\n  File "/x/threading.py", line ¤ in wait',
        "#0 0x1 in foo () at a.c:¤\n#1  Frame 0x1, for file /x.py, line ¤, in wait ()",
        "EngineCore pid ¤:\n wait (threading.py:1)",
        "all ¤ ranks are here:\n wait (threading.py:1)",
        "$ py-spy dump --pid ¤\n wait (threading.py:1)",
        "root ¤ 1 VLLM::EngineCore\n wait (threading.py:1)",
        "(EngineCore pid=¤) ERROR Traceback (most recent call last):",
        "Call to f in a.py:¤ from g in b.py:¤",
        "| 0 N/A 30C P0 ¤W / ¤W | ¤MiB / ¤MiB | ¤% Default |\n wait (threading.py:1)",
    ],
)
def test_numbers_that_python_does_not_read(text: str, digit: str) -> None:
    explanation = explain_stacks(parse_stacks(text.replace("¤", digit * 5000)))
    assert len(str(explanation)) < 20_000


@pytest.mark.parametrize("number", ["1.2.3", ".", "..", "1."])
@pytest.mark.parametrize(
    "text",
    [
        "Avg prompt throughput: ¤ tokens/s, Avg generation throughput: ¤ tokens/s, Running: 1 "
        "reqs, Waiting: 0 reqs, GPU KV cache usage: ¤%",
        "  ¤% ¤%  1.0s  1.0s  wait (threading.py:1)",
        "¤ %, 5 %, ¤ W\n wait (threading.py:1)",
        "| 30C P0 ¤W / 300W | 1MiB / 2MiB | 5% |\n wait (threading.py:1)",
    ],
)
def test_malformed_numbers_do_not_break_the_parser(text: str, number: str) -> None:
    assert explain_stacks(parse_stacks(text.replace("¤", number))).verdict


@pytest.mark.parametrize(
    "words", ["py-spy dump -p ", "#1 Frame 0x1, for file ", "\r#*=", "author:\tx\n"]
)
def test_a_line_without_end_takes_no_time_without_end(words: str) -> None:
    """Of 400 kB it took minutes, and of four times as much sixteen times as long."""
    explain_stacks(parse_stacks(words * (1_600_000 // len(words))))


def test_threads_without_number_take_no_time_without_end() -> None:
    """Of 16,000 it took 44 seconds, and of so many ten minutes."""
    threads = "".join(f'Thread {n} (active): "T{n}"\n    wait (a.py:1)\n' for n in range(60_000))
    explain_stacks(parse_stacks(f"Process 5: VLLM::EngineCore\n{threads}"))
