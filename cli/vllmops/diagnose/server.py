"""What is wrong with a server besides its caches, stacks and memory; pure, from a snapshot.

Every rule names something that is wrong on no healthy server: low figures alone, such as a cache
that no request can hit, are shown and never judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..protocol.patches import State
from ..protocol.server import Disk, Leftover, ProcessState, ServerSnapshot
from .findings import Finding, Rule, Severity
from .progress import NO_PYTHON, PATIENCE_S, UNHEALTHY, late, named
from .stacks import STOPPED

INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
GIB = 1 << 30
FULL_SHARE = 0.05
FULL_BYTES = GIB
LEFT_AGE_S = 60.0
TOLD = 3  # leftovers that are told one by one
TELLING = 5  # requests, answers: fewer in an interval prove nothing

ENGINE_MISSING = Rule(
    "engine.missing",
    ERROR,
    "the API server lives, its engine does not",
    "its last words: vllmops logs --process engine; then vllmops restart",
    "https://github.com/vllm-project/vllm/issues/39863",
)
WORKER_MISSING = Rule(
    "worker.missing",
    ERROR,
    "fewer workers than the server was started with",
    "its last words: vllmops logs --process worker; then vllmops restart",
)
DEAD_CHILD = Rule(
    "process.dead",
    ERROR,
    "a process of the server is dead, and its parent has not noticed",
    "its last words: vllmops logs; then vllmops restart",
)
UNINTERRUPTIBLE = Rule(
    "process.uninterruptible",
    WARNING,
    "a process waits in the kernel and can't be interrupted",
    "a driver or a network file system does not answer: dmesg tells more, and no signal helps",
)
ORPHANS = Rule(
    "process.orphaned",
    WARNING,
    "processes are left of a server that is gone",
    "they keep their memory, a GPU's too: kill them",
    "https://github.com/vllm-project/vllm/issues/55510",
)
FAILED = Rule(
    "server.failed",
    ERROR,
    "the server does not come up",
    "vllmops logs shows why",
)
AGENT = Rule(
    "agent.silent",
    WARNING,
    "an agent does not answer as it should",
    "vllmops restart loads it anew",
)
AGENT_VERSION = Rule(
    "agent.version",
    INFO,
    "the server runs another vllmops than this one",
    "restart it when it suits, so that both are the same",
)
AGENT_PROBLEM = Rule(
    "agent.problem",
    INFO,
    "an agent can't do all it should in this vLLM",
    "what it can't see is missing here; the server is not affected",
)
PATCH_FAILED = Rule(
    "patch.failed",
    WARNING,
    "a patch could not be applied",
    "vllmops patches list; the server runs as vLLM wrote it",
)
DEFECT_PRESENT = Rule(
    "patch.off",
    WARNING,
    "this vLLM has a defect, and its patch is off",
    "vllmops restart without --no-patch, or vllmops attach --patch; vllmops patches show ID",
)
KNOWN_DEFECT = Rule(
    "vllm.known-defect",
    WARNING,
    "this version of vLLM is known to have a defect",
    "a newer vLLM, or vllmops attach --patch",
)
SHM = Rule(
    "machine.shm-leftovers",
    INFO,
    "shared memory is left of processes that are gone",
    "it takes memory until it is removed: vllmops doctor --clean-shm",
    "https://github.com/vllm-project/vllm/issues/51579",
)
DISK = Rule("machine.disk", WARNING, "a file system is nearly full", "make room on it")
MEMORY = Rule(
    "machine.memory",
    WARNING,
    "hardly any memory is left",
    "the kernel kills the largest process when it runs out: vllmops ps tells who has it",
)
GPU_MEMORY = Rule(
    "gpu.bad-memory",
    ERROR,
    "a GPU has memory that can't be corrected",
    "take it out of service; nvidia-smi -q -d ECC",
)
GPU_BRAKED = Rule(
    "gpu.throttled",
    WARNING,
    "a GPU is braked by heat or power",
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
)
SEVERAL_STORES = Rule(
    "responses.store-in-memory",
    WARNING,
    "several API servers keep Responses each in its own memory",
    "a follow-up, a retrieval or a cancellation finds its response by chance: one API server, or a "
    "store that they share",
    "https://github.com/vllm-project/vllm/pull/34738",
)
NO_KEY = Rule(
    "security.no-api-key",
    WARNING,
    "whoever reaches this machine can use the server: it wants no API key",
    "start it with VLLM_API_KEY set, or with --host 127.0.0.1",
)
DEV_ROUTES = Rule(
    "security.dev-routes",
    ERROR,
    "whoever reaches this machine can put the server to sleep, or empty its caches",
    "start it without VLLM_SERVER_DEV_MODE, or with --host 127.0.0.1",
)
WEAK_KEY = Rule(
    "security.signing-key",
    ERROR,
    "the key that signs conversation state is weak",
    "64 random hex digits at least: vllmops keygen",
)
PYSPY = Rule(
    "tools.py-spy",
    WARNING,
    "stacks can't be read, and will be missing when something hangs",
    "vllmops stacks dump tells what it needs",
)
# Errors of the trial that hold for every process until somebody changes something.
NO_STACKS = frozenset(
    {
        "pyspy.missing",
        "pyspy.unusable",
        "stacks.no-capability",
        "stacks.other-user",
        "stacks.ptrace-scope",
        "stacks.refused",
        "stacks.seccomp",
    }
)
CANARY = Rule(
    "canary.failed",
    ERROR,
    "a request for one token was not answered",
    "vllmops stacks dump --explain",
)
CANARY_SLOW = Rule(
    "canary.late",
    WARNING,
    "a request for one token was not answered in time, and others were",
    "it waits behind them: vllmops status shows how many",
)
KV_PRESSURE = Rule(
    "kv-cache.pressure",
    WARNING,
    "the KV cache is full, and requests wait for room",
    "fewer requests at once (--max-num-seqs), a shorter --max-model-len, or more memory for it "
    "(--gpu-memory-utilization)",
)
PREEMPTIONS = Rule(
    "kv-cache.preemptions",
    WARNING,
    "requests are thrown out of the KV cache and computed again",
    "as for kv-cache.pressure; each preemption repeats work",
)
QUEUEING = Rule(
    "latency.queueing",
    WARNING,
    "requests spend most of their time waiting to be scheduled",
    "more replicas, or fewer requests at once from the clients",
)
FIRST_TOKEN = Rule(
    "latency.first-token",
    WARNING,
    "the time to the first token is mostly spent outside the engine",
    "the API server is the bottleneck: tokenizing, media, its event loop; --api-server-count",
)
NEXT_TOKEN = Rule(
    "latency.next-token",
    WARNING,
    "the time from token to token is mostly spent outside the engine",
    "the API server is the bottleneck: detokenizing, parsers, its event loop; --api-server-count",
)
ERRORS = Rule(
    "requests.errors",
    ERROR,
    "requests fail by the server's own fault",
    "vllmops logs shows the errors",
)
CATALOGUE = {rule.code: rule for rule in list(vars().values()) if isinstance(rule, Rule)}

# Defects that a version is known by, where nothing in the process can be asked: the first version
# without it. Run in the wheels of the versions on both sides.
DEFECTS = (
    ("encoder-decoder-free-order", "0.14.1", "https://github.com/vllm-project/vllm/pull/32789"),
    ("request-hash-cycle", "0.16.0", "https://github.com/vllm-project/vllm/pull/34183"),
    ("mm-lru-ghost-keys", "0.24.0", "https://github.com/vllm-project/vllm/pull/43595"),
)


def diagnose(snapshot: ServerSnapshot) -> list[Finding]:
    """What every check finds, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(snapshot)]


def missing(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Processes that should be there."""
    if snapshot.state == "failed":
        yield FAILED.at(snapshot.server, snapshot.stage or "it is over")
        return
    if not snapshot.looks or snapshot.state == "starting":
        return
    last = snapshot.looks[-1]
    roles = [process.role for process in last.processes if process.state not in {"", "Z"}]
    apis = [process for process in last.processes if process.role == "api"]
    # With multiprocessing off the engine lives in the API server.
    inside = any(
        each.role == "api" and each.engine.current_step is not None for each in snapshot.told
    )
    if apis and last.health and "engine" not in roles and not inside:
        seen = f"api {apis[0].pid} is there, no EngineCore below it"
        if last.health == 503 or len(roles) == len(apis):
            yield ENGINE_MISSING.at(snapshot.server, seen)
    elif last.health == 503:
        yield UNHEALTHY.at(", ".join(map(called, apis)), "/health answers 503")
    if "engine" in roles and (wanted := workers(snapshot)) > (here := roles.count("worker")) > 0:
        yield WORKER_MISSING.at(snapshot.server, f"{here} workers of {wanted}")
    for process in last.processes:
        if process.state == "Z":
            yield DEAD_CHILD.at(called(process), "a zombie")


def workers(snapshot: ServerSnapshot) -> int:
    """How many workers the server was started with, 0 where it can't be told."""
    samples = snapshot.caches.samples if snapshot.caches else []
    for process in samples[-1].processes if samples else ():
        setup = process.setup
        if setup and process.role == "engine":
            return (setup.tensor_parallel or 1) * (setup.pipeline_parallel or 1)
    return 0


def halted(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Processes that can't run: in two looks, for one may catch any."""
    if len(snapshot.looks) < 2:
        return
    earlier = {process.pid: process.state for process in snapshot.looks[-2].processes}
    for process in snapshot.looks[-1].processes:
        if process.state != earlier.get(process.pid):
            continue
        if process.state == "T":
            yield STOPPED.at(called(process), f"state T; kill -CONT {process.pid} lets it go on")
        elif process.state == "D":
            yield UNINTERRUPTIBLE.at(called(process), "state D in both looks")
    # Where an agent answers, its file can't be written: a disk is full, say.
    answered = {told.pid for told in snapshot.told}
    for pulse in snapshot.looks[-1].pulses:
        if pulse.age_s >= PATIENCE_S and pulse.pid not in answered:
            yield NO_PYTHON.at(named(pulse), late(pulse))


def orphaned(snapshot: ServerSnapshot) -> Iterator[Finding]:
    for process in snapshot.machine.orphans:
        yield ORPHANS.at(
            called(process), f"its server is gone, it has {size(process.rss_bytes or 0)}"
        )


def agents(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Agents that are there and are not as they should be; an absent one is no defect."""
    for each in snapshot.unseen:
        if each.code in {"agent.timeout", "agent.broken", "agent.mismatch", "agent.unsafe"}:
            yield AGENT.at(each.part, each.why)
        elif each.code in {"agent.older", "agent.newer"}:
            yield AGENT_VERSION.at(each.part, each.why)
    versions: dict[str, list[str]] = {}
    for told in snapshot.told:
        if told.hello.agent != snapshot.vllmops:
            versions.setdefault(told.hello.agent, []).append(f"{told.role} {told.pid}")
        for problem in told.hello.problems:
            yield AGENT_PROBLEM.at(f"{told.role} {told.pid}", problem)
    for version, where in versions.items():
        yield AGENT_VERSION.at(
            ", ".join(where), f"vllmops {version} there, {snapshot.vllmops} here"
        )


def patched(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Patches that are not on, and what the version alone tells where no agent does."""
    states: dict[tuple[str, str, str], list[str]] = {}
    for process in snapshot.patches:
        for verdict in process.patches:
            if verdict.state in {State.FAILED, State.OFF} and verdict.present is not False:
                key = (verdict.id, verdict.state, verdict.reason or "")
                states.setdefault(key, []).append(f"{process.role} {process.pid}")
    for (name, state, reason), where in states.items():
        rule = PATCH_FAILED if state == State.FAILED else DEFECT_PRESENT
        yield rule.at(", ".join(where), f"{name}: {reason or state}")
    if snapshot.patches or not snapshot.vllm_version:
        return
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415 - slow, and seldom needed

    try:
        version = Version(snapshot.vllm_version)
    except InvalidVersion:
        return
    for name, fixed, reference in DEFECTS:
        if version < Version(fixed):
            evidence = f"vLLM {snapshot.vllm_version} has {name}, gone in {fixed}"
            yield KNOWN_DEFECT.at(snapshot.server, f"{evidence}; {reference}")


def machine(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """What the server stands on."""
    found = snapshot.machine
    left = [each for each in found.leftovers if each.age_s >= LEFT_AGE_S]
    if left:
        yield SHM.at("/dev/shm", "; ".join(leftover(left)))  # noqa: S108 - the kernel's own place
    for disk in found.disks:
        if short(disk):
            yield DISK.at(disk.path, f"{disk.use}: {size(disk.free)} of {size(disk.total)} free")
    if found.memory_available < FULL_SHARE * found.memory_total:
        yield MEMORY.at(
            "memory", f"{size(found.memory_available)} of {size(found.memory_total)} available"
        )
    for gpu in found.gpus:
        subject = f"GPU {gpu.index} ({gpu.name})"
        if gpu.bad_memory:
            yield GPU_MEMORY.at(subject, f"{gpu.bad_memory} uncorrected errors")
        if gpu.throttled:
            yield GPU_BRAKED.at(subject, f"{gpu.celsius} °C, {gpu.watts} W")


def leftover(left: Sequence[Leftover]) -> Iterator[str]:
    """What segments are left, the largest first, and how far it is known that nobody uses them."""
    yield f"{len(left)} segments, {size(sum(each.bytes for each in left))}"
    largest = sorted(left, key=lambda each: -each.bytes)[:TOLD]
    for each in largest:
        yield f"{each.name}: {size(each.bytes)}, of {each.owner}, {each.age_s / 60:.0f} min old"
    doubt = next((each.doubt for each in left if each.doubt), "")
    yield (
        f"no process is seen to map or open them; {doubt}"
        if doubt
        else ("no process of this machine maps or opens them")
    )


def short(disk: Disk) -> bool:
    """Whether a file system has next to nothing left; a large one may be nearly full for years."""
    return disk.free < FULL_SHARE * disk.total and disk.free < FULL_BYTES


def guarded(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Who can reach the server, and what they can do."""
    guard = snapshot.guard
    where = ", ".join(guard.addresses)
    if guard.exposed and guard.open:
        yield NO_KEY.at(where, "/v1/models answered without a key")
    if guard.exposed and guard.dev_routes:
        yield DEV_ROUTES.at(where, "vLLM's development routes are there, and ask for no key")
    if guard.signing_key == "weak":
        yield WEAK_KEY.at(
            "VLLM_RESPONSES_STATE_SIGNING_KEY", "not hex, or fewer than 64 digits of it"
        )
    apis = [told for told in snapshot.told if told.role == "api"]
    if guard.store == "memory" and len(apis) > 1:
        yield SEVERAL_STORES.at(
            ", ".join(f"api {told.pid}" for told in apis), "no store is shared between them"
        )


def tools(snapshot: ServerSnapshot) -> Iterator[Finding]:
    for each in snapshot.unseen:
        if each.code in NO_STACKS:
            yield PYSPY.at(each.part, each.why)


def canary(snapshot: ServerSnapshot) -> Iterator[Finding]:
    bird = snapshot.canary
    if bird is None or bird.outcome in {"answered", "unable"}:
        return
    tokens = [look.metrics.tokens for look in snapshot.looks if look.metrics]
    moved = len({count for count in tokens if count is not None}) > 1
    late_only = bird.outcome == "timeout" and moved
    rule = CANARY_SLOW if late_only else CANARY
    yield rule.at(snapshot.url or snapshot.server, f"{bird.detail} ({bird.seconds:.1f} s)")


def traffic(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """What the metrics say of the time between the first look and the last."""
    with_metrics = [look for look in snapshot.looks if look.metrics]
    if len(with_metrics) < 2:
        return
    first, last = with_metrics[0].metrics, with_metrics[-1].metrics
    assert first is not None
    assert last is not None
    seconds = with_metrics[-1].at_s - with_metrics[0].at_s
    where = snapshot.url or snapshot.server

    def grown(name: str) -> float:
        was, now = getattr(first, name), getattr(last, name)
        return 0.0 if was is None or now is None else max(now - was, 0.0)

    def mean(name: str) -> float | None:
        count = grown(f"{name}_n")
        return grown(f"{name}_s") / count if count >= TELLING else None

    full = all((look.metrics.kv_cache_usage or 0) > 0.95 for look in with_metrics if look.metrics)
    if full and last.waiting:
        yield KV_PRESSURE.at(
            where, f"{last.kv_cache_usage:.0%} in use, {last.waiting:.0f} requests wait"
        )
    if (thrown := grown("preemptions")) >= TELLING:
        yield PREEMPTIONS.at(where, f"{thrown:.0f} in {seconds:.1f} s")
    queue, prefill, first_token = mean("queue"), mean("prefill"), mean("first")
    between, decode = mean("between"), grown("decode_s")
    whole = mean("whole")
    if queue is not None and whole and queue > 0.5 * whole and queue > 1.0:
        yield QUEUEING.at(where, f"{queue:.1f} s of {whole:.1f} s for each request")
    if first_token and queue is not None and prefill is not None:
        rest = first_token - queue - prefill
        if rest > 0.5 * first_token and rest > 1.0:
            yield FIRST_TOKEN.at(
                where,
                f"{first_token:.2f} s, of which {queue:.2f} s in the queue and {prefill:.2f} s of "
                "prefill",
            )
    tokens = grown("between_n")
    if between and decode and between > 0.2:
        engine = decode / tokens
        if engine < 0.5 * between:
            yield NEXT_TOKEN.at(where, f"{between:.2f} s, of which {engine:.2f} s in the engine")
    wrong, answers = grown("errors"), grown("answers")
    broken, ended = grown("failed"), grown("finished")
    if wrong and wrong >= FULL_SHARE * answers:
        yield ERRORS.at(where, f"{wrong:.0f} of {answers:.0f} answers had a status from 500 up")
    elif broken and broken >= FULL_SHARE * ended:
        yield ERRORS.at(where, f"{broken:.0f} of {ended:.0f} requests ended with an error")


CHECKS: tuple[Callable[[ServerSnapshot], Iterator[Finding]], ...] = (
    missing,
    halted,
    orphaned,
    canary,
    traffic,
    agents,
    patched,
    machine,
    guarded,
    tools,
)


def called(process: ProcessState) -> str:
    return f"{process.title.removeprefix('VLLM::') or process.role} {process.pid}"


def size(count: float) -> str:
    """Bytes for a person, as evidence has them."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
