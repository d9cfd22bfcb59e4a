"""Where in its life a thread is, and what it waits for, by ``thread_phases.toml``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...model.stacks import Frame, ProcessStacks, ThreadStack
from ...support.lazy_patterns import compile_lazily
from .. import toml_tables
from .signatures import CACHED, strip_qualifiers

# Frames that say nothing of their own: what they wait for stands further out.
GENERIC = compile_lazily(
    r"wait|_wait|get|poll|_poll|select|accept|acquire|recv|_recv|sleep|join|read|readline|result|"
    r"_worker|sched_yield|__get_result|wait4|waitpid|_try_wait|_wait_for_tstate_lock|next|"
    r"\w*futex\w*|epoll_wait|ppoll|\w*cond_\w*wait\w*|sem_\w*wait|\w*nanosleep|syscall|ioctl|"
    r"do_futex_wait\S*|pthread_\w+|lll_lock_wait|__lll_\w+|_PyMutex\w*|PyThread\w*|lock_\w+|"
    r"usleep|__\w*poll|os_sched_yield\w*|__GI_\w+"
)
# Wrappers, the interpreter, and addresses.
WRAPPERS = compile_lazily(
    r"decorate_context|_?wrapper\w*|\w+_wrapper|wrapped\w*|_call_impl|_wrapped_call_impl|run_method|"
    r"__enter__|__exit__|inner|_fn|<lambda>|<genexpr>|<listcomp>|<module>|__call__|__torch_\w+__|"
    r"0x[0-9a-f]+|_?_?Py\w+|cfunction\w*|method_vectorcall\w*|\w+_vectorcall\w*|vectorcall\w*|"
    r"slot_tp\w*|type_call|function_code_fastcall|call_function|\?\?|THP\w+|call|call_boxed|boxed\w*|"
    r"helper|_start|start_thread|clone3?|__clone3?|__libc_start\w*|_bootstrap\w*|run"
)
DRIVERS = compile_lazily(
    r"lib(?:cuda|cudart|amdhip|hsa|ze_|ze_loader|ur_|sycl|ascendcl|runtime|acl|musa|Synapse|nrt|tpu|"
    r"tt_metal|mcruntime|cnrt|ttmlir)"
)
# Files of the queues, locks and pollers of Python, and of Ray's own threads: a thread that is there
# alone has nothing to do.
PLUMBING = compile_lazily(
    r"(?:^|/)(?:threading|queue|selectors|subprocess|socket|thread|poll|connection|popen_fork|"
    r"base_events|backend|_base|runners|process|garbage|_monitor|ssl|unix_events|contextlib)\.py$"
    r"|zmq/|asyncio/|uvloop|ray/_private/|^<|concurrent/futures|multiprocessing/|libc\.|libpthread"
)
MODEL = compile_lazily(
    r"model_executor/|_custom_ops|_C\.|flashinfer/|flash_attn|attention|fused_moe|kernels?[/_.]|aiter/|"
    r"deep_gemm|/ops/|quantization|/models/|/layers/"
)
FORWARD = compile_lazily(r"forward(?:_\w+)?")
# Threads of the agent, and of Python's small HTTP servers: what they wait for tells no hang.
ASIDE = compile_lazily(r"vllmops-|.*\(process_request_thread\)")
PYTHON = {"admission", "structure"}  # waits for nothing, in Python
LOCKS = {"acquire", "_acquire", "wait", "_acquire_restore"}
SLEEPS = {"_process_engine_step", "step", "step_with_batch_queue", "run_busy_loop"}


class FramePattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frames by their names; see the head of the file."""

    example: str
    function: str = ""
    file: str = ""
    platform: str = "any"


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a thread's life.

    Args:
        id: a stable word.
        stage: ``start``, ``serve`` or ``end``.
        title: for a person, after "while".
        names: the frames that show it.
    """

    id: str
    stage: str
    title: str
    names: tuple[FramePattern, ...]


class WaitReason(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"waits_for": "for"}
):
    """What a thread may wait for.

    Args:
        id: a stable word.
        waits_for: for a person.
        names: the frames that show it.
    """

    id: str
    waits_for: str
    names: tuple[FramePattern, ...]


class FrameTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    phase: tuple[Phase, ...]
    wait: tuple[WaitReason, ...]


NOWHERE = Phase("", "", "", ())
# Waits that no name shows.
OTHERS = {
    "call": "what a call into C or to the device does, which Python does not show",
    "lock": "whoever holds a lock of the process",
    "sleep": "nothing: the last step executed nothing, so it sleeps before the next",
    "rest": "work",
}


@dataclass(frozen=True)
class ThreadPosition:
    """Where one thread is.

    Args:
        process: its process.
        thread: the thread.
        phase: of its life; `NOWHERE` if no frame tells.
        wait: the id of what it waits for; ``call`` for what no table names, ``rest`` for work.
        frame: the frame that shows the wait; None without frames.
        is_in_collective: whether it is inside the library that does a collective.
    """

    process: ProcessStacks
    thread: ThreadStack
    phase: Phase
    wait: str
    frame: Frame | None
    is_in_collective: bool = False

    @property
    def waits_for(self) -> str:
        known = {wait.id: wait.waits_for for wait in load_frame_tables().wait}
        return OTHERS.get(self.wait) or known[self.wait]


@functools.cache
def load_frame_tables() -> FrameTables:
    """The tables, as the file has them."""
    return toml_tables.load_table("stacks/thread_phases.toml", FrameTables)


APART = compile_lazily(r"\|(?![^(]*\))")  # between alternatives
PLAIN = compile_lazily(r"\w+")
# What need not be in a name that matches: groups, classes, escapes, and what may be missing.
OPTIONAL = compile_lazily(r"\([^()]*\)[?*+]?|\[[^]]*\][?*+]?|\\.[?*+]?|.[?*]|\{[^}]*\}")


def _find_required_word(alternative: str) -> str:
    """The longest word that is in each name that an alternative matches; empty if it is short."""
    left = OPTIONAL.sub(" ", alternative)
    return "" if "(" in left else max(left.lower().split(), key=len, default="")


def _make_matcher(alternative: str) -> Callable[[str], object]:
    """What tells whether a name matches; most alternatives need no pattern for it."""
    core = alternative.removeprefix(r"\w*").removesuffix(r"\w*")
    if not PLAIN.fullmatch(core):
        known = compile_lazily(alternative)
        return lambda name: known.fullmatch(name)  # noqa: PLW0108 - its attribute compiles it
    if alternative == rf"\w*{core}\w*":
        return lambda name: core in name
    return lambda name: name.startswith(core) if alternative.endswith("*") else name.endswith(core)


@dataclass(frozen=True)
class _FrameIndex:
    """A table to look frames up in; each of the parts gives row numbers.

    Args:
        rows_by_name: by names that are no pattern.
        word_patterns: of other functions a word that is in a name if it matches, or nothing, and
            what tells whether it does.
        file_patterns: patterns of files, each with one of functions.
    """

    rows_by_name: dict[str, set[int]]
    word_patterns: list[tuple[str, Callable[[str], object], int]]
    file_patterns: list[tuple[re.Pattern[str], re.Pattern[str], int]]


@functools.cache
def _build_index(kind: str) -> _FrameIndex:
    plain: dict[str, set[int]] = {}
    worded: list[tuple[str, Callable[[str], object], int]] = []
    filed: list[tuple[re.Pattern[str], re.Pattern[str], int]] = []
    for row, name in (
        (row, name) for row, each in enumerate(_get_table(kind)) for name in each.names
    ):
        if name.file:
            filed.append((compile_lazily(name.file), compile_lazily(name.function or ".*"), row))
            continue
        for function in APART.split(name.function):
            if PLAIN.fullmatch(function):
                plain.setdefault(function, set()).add(row)
            else:
                worded.append((_find_required_word(function), _make_matcher(function), row))
    return _FrameIndex(plain, worded, filed)


def _get_table(kind: str) -> Sequence[Phase | WaitReason]:
    return load_frame_tables().phase if kind == "phase" else load_frame_tables().wait


@functools.lru_cache(CACHED)
def _find_row_ids(kind: str, function: str, path: str) -> tuple[str, ...]:
    """The ids of the rows that match a frame, in the order of the file."""
    name = strip_qualifiers(function)
    lower = name.lower()
    index = _build_index(kind)
    rows = [row for word, matches, row in index.word_patterns if word in lower and matches(name)]
    file = f"{path} {function}" if "::" in function else path
    rows += [row for known, row in _select_file_patterns(kind, file) if known.fullmatch(name)]
    return tuple(
        _get_table(kind)[row].id for row in sorted(index.rows_by_name.get(name, set()).union(rows))
    )


@functools.lru_cache(CACHED)
def _select_file_patterns(kind: str, file: str) -> list[tuple[re.Pattern[str], int]]:
    """What a function must match for a row, for each row that a file matches."""
    return [
        (function, row)
        for known, function, row in _build_index(kind).file_patterns
        if known.search(file)
    ]


@functools.cache
def _index_phases() -> dict[str, Phase]:
    return {phase.id: phase for phase in load_frame_tables().phase}


def get_phase_title(phase: str) -> str:
    """What a phase's id means in words; empty for none."""
    return _index_phases()[phase].title if phase else ""


def find_phase_ids(frame: Frame) -> tuple[str, ...]:
    """The phases that a frame shows."""
    return _find_row_ids("phase", frame.function, frame.short_file)


def is_startup_frame(frame: Frame) -> bool:
    """Whether a frame shows a phase of a start."""
    return any(_index_phases()[phase].stage == "start" for phase in find_phase_ids(frame))


def find_wait_ids(frame: Frame) -> tuple[str, ...]:
    """The waits that a frame shows, the first in the file first."""
    return _find_row_ids("wait", frame.function, frame.short_file)


def is_computing_frame(frame: Frame) -> bool:
    """Whether a frame is of Python that computes or calls more of it, and not of a call into C."""
    return bool(find_phase_ids(frame)) or not PYTHON.isdisjoint(find_wait_ids(frame))


@functools.cache
def _rank_waits() -> dict[str, int]:
    return {wait.id: index for index, wait in enumerate(load_frame_tables().wait)}


def find_thread_position(process: ProcessStacks, thread: ThreadStack) -> ThreadPosition:
    """Where a thread is, and what it waits for."""
    frames = drop_parent_frames(thread.frames)
    if "(" in thread.name:  # Python names a thread after its outermost function
        frames = (*frames, Frame(thread.name.rpartition("(")[2].rstrip(")"), "", ""))
    shown = [(at, ids[0]) for at, frame in enumerate(frames) if (ids := find_phase_ids(frame))]
    inside = shown[0][0] if shown else len(frames) - 1
    phase = _find_thread_phase([phase for _, phase in shown])
    if not shown and any(
        MODEL.search(frame.short_file) or FORWARD.fullmatch(strip_qualifiers(frame.function))
        for frame in frames
    ):
        phase = _index_phases()["forward"]
    inner = frames[: inside + 1]
    if (
        not frames
        or ASIDE.match(thread.name)
        or _is_waiting_for_work(process, thread, phase, inner, frames)
    ):
        return ThreadPosition(process, thread, phase, "rest", frames[0] if frames else None)
    waits = [(ids[0], at) for at, frame in enumerate(inner) if (ids := find_wait_ids(frame))]
    if phase.id == "spawn":
        return ThreadPosition(process, thread, phase, "ipc-read", frames[0])
    telling = next((f for f in frames if not _is_generic_frame(f)), frames[0])
    if not waits:
        return ThreadPosition(process, thread, phase, _guess_wait(thread, frames, telling), telling)
    wait, at = min(waits, key=lambda row: (_rank_waits()[row[0]], row[1]))
    if wait in {"metadata", "structure"} and find_wait_ids(telling)[:1] != (wait,):
        wait, at = "call", frames.index(telling)
    if wait == "transfer" and find_wait_ids(telling)[:1] == ("collective",):
        wait, at = "collective", frames.index(telling)  # what a connector does with other ranks
    entered = wait == "collective" and any(
        ENTERED.search(frame.short_file) or DRIVERS.search(frame.short_file) for frame in inner[:3]
    )
    entered |= wait == "collective" and NATIVE.search(frames[0].short_file) is not None
    return ThreadPosition(process, thread, phase, wait, frames[at], entered)


def drop_parent_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of a process's own; below them a fork still has those of its parent."""
    start = next(
        (at for at, f in enumerate(frames) if strip_qualifiers(f.function) == "_bootstrap"),
        len(frames),
    )
    return tuple(frames[: start + 1])


# An operator of torch's that is the innermost frame is in its native code.
NATIVE = compile_lazily(r"torch/_ops\.py$")
ENTERED = compile_lazily(r"torch/distributed|distributed_c10d|lib\w*ccl|pynccl|gloo|c10d|libtorch")


def _find_thread_phase(phase_names: Sequence[str]) -> Phase:
    """The phase of a thread, from those that its frames show, innermost first."""
    phases = [_index_phases()[name] for name in phase_names]
    if "dummy" in phase_names:  # it runs what a trial runs
        return _index_phases()["dummy"]
    if "draft" in phase_names and all(phase.stage == "serve" for phase in phases):
        return _index_phases()["draft"]  # the same
    for stage in ("end", "start", "serve"):
        for phase in phases:
            if phase.stage == stage:
                return phase
    return NOWHERE


def _is_generic_frame(frame: Frame) -> bool:
    name = strip_qualifiers(frame.function)
    return bool(GENERIC.fullmatch(name) or WRAPPERS.fullmatch(name))


def _is_waiting_for_work(
    process: ProcessStacks,
    thread: ThreadStack,
    phase: Phase,
    inner: Sequence[Frame],
    frames: Sequence[Frame],
) -> bool:
    """Whether a thread only waits for work."""
    names = {strip_qualifiers(frame.function) for frame in inner}
    if "_process_input_queue" in {strip_qualifiers(frame.function) for frame in frames[:8]}:
        return "_handle_client_request" not in names
    waits = [find_wait_ids(frame)[0] for frame in inner if find_wait_ids(frame)]
    if {strip_qualifiers(frame.function) for frame in frames} >= DRIVEN:
        return True
    if phase.id in {"worker", "step"} and "ipc-read" in waits and "collective" not in waits:
        # A worker reads its next call; SGLang's loop reads requests.
        return phase.id == "worker" or "recv_requests" in names
    if not is_main_thread(process, thread) and (
        PLUMBING.search(frames[0].short_file)
        or GENERIC.fullmatch(strip_qualifiers(frames[0].function))
    ):
        return thread.state == "idle" or not any(map(find_wait_ids, frames))
    return phase.id in {"", "api"} and all(
        PLUMBING.search(frame.short_file)
        or _is_generic_frame(frame)
        or strip_qualifiers(frame.function) in ENTRIES
        for frame in frames
    )


# A worker of vLLM's older engine, between two steps: its driver sends what the next one needs.
DRIVEN = {"start_worker_execution_loop", "broadcast_tensor_dict", "dequeue"}
ENTRIES = {"main", "cmd", "serve", "run_server", "run_server_worker", "serve_http", "spawn_main",
           "_main", "output_handler", "run_api_server_worker_proc", "monitor_engine_cores",
           "wait_for_completion_or_failure", "run_multi_api_server"}  # fmt: skip


def _guess_wait(thread: ThreadStack, frames: Sequence[Frame], specific_frame: Frame) -> str:
    """The wait of a thread that no table names."""
    first = frames[0]
    if DRIVERS.search(first.short_file):
        return "device-sync"
    name = strip_qualifiers(first.function)
    if name in SLEEPS and thread.state == "idle":
        return "sleep"
    if specific_frame is not first and name in LOCKS:
        return "lock"
    return "call"


def is_main_thread(process: ProcessStacks, thread: ThreadStack) -> bool:
    """Whether a thread is its process's main one, as far as the dump tells."""
    if thread.name == "MainThread" or len(process.threads) == 1:
        return True
    if process.has_main_thread:
        return False
    return thread.tid == process.pid or not is_helper_thread(thread)


def is_helper_thread(thread: ThreadStack) -> bool:
    """Whether a thread's frames show that Python, or a library, started it."""
    outermost = thread.frames[-1].function if thread.frames else "_bootstrap"
    # With --native, frames of the C library stand below those of Python.
    inner = any(strip_qualifiers(frame.function) == "_bootstrap_inner" for frame in thread.frames)
    return inner or HELPERS.fullmatch(outermost) is not None


HELPERS = compile_lazily(
    r"(?:\w+\.)?_bootstrap|start_thread|clone3?|__clone3?|thread_run|(?:\w+\.)?run"
)
