"""What is wrong with a server besides its caches, stacks and memory; pure, from a snapshot.

A healthy server breaks none of these rules. A low figure alone, such as a cache without hits, is
shown and is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..model.agent_state import STORE_AWAY
from ..model.findings import Finding, Rule, Severity
from ..model.patches import PatchState
from ..model.ranks import choose_process_title, format_process, make_process_key
from ..model.server_snapshot import (
    DiskSpace,
    Gap,
    Gpu,
    ProcessState,
    ServerSnapshot,
    ShmLeftover,
    Xid,
)
from . import package_versions
from .progress import NO_PYTHON, PATIENCE_S, UNHEALTHY, describe_heartbeat_age, format_role_and_pid
from .stacks.explanation import STOPPED

INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
GIB = 1 << 30
FULL_SHARE = 0.05
FULL_BYTES = GIB
LEFT_AGE_S = 60.0
SHOWN_LEFTOVERS = 3
# A GPU that is busy and idle at once: seen 96 to 100 % with 0 % of memory, and a third of the power
# limit at most; a kernel that computes draws more.
SPIN_BUSY, SPIN_MEMORY, SPIN_POWER = 0.95, 0.01, 0.4
ENOUGH = 5  # requests or responses: fewer in an interval prove nothing
# Codes of what could not be seen: a broken agent, or one of another version; stacks
# without permission. A missing agent is no defect.
AGENT_BROKEN = {"agent.timeout", "agent.broken", "agent.mismatch", "agent.unsafe"}
AGENT_OTHER_VERSION = {"agent.older", "agent.newer"}
NO_STACKS = {
    "pyspy.missing",
    "pyspy.unusable",
    "stacks.ptrace-scope",
    "stacks.other-user",
    "stacks.no-capability",
    "stacks.seccomp",
    "stacks.refused",
}

ENGINE_MISSING = Rule(
    "engine.missing",
    ERROR,
    "the API server is alive, but its engine is gone",
    "vllmops logs --process engine shows its last lines; then vllmops restart",
    "https://github.com/vllm-project/vllm/issues/39863",
)
WORKER_MISSING = Rule(
    "worker.missing",
    ERROR,
    "fewer workers are alive than the server started with",
    "vllmops logs --process worker shows their last lines; then vllmops restart",
)
DEAD_CHILD = Rule(
    "process.dead",
    ERROR,
    "a process of the server is dead, and its parent has not noticed",
    "vllmops logs shows its last lines; then vllmops restart",
)
UNINTERRUPTIBLE = Rule(
    "process.uninterruptible",
    WARNING,
    "a process waits in the kernel and can't be interrupted",
    "a driver or a network file system does not answer: dmesg shows more; no signal helps",
)
ORPHANS = Rule(
    "process.orphaned",
    WARNING,
    "processes of a dead server are left",
    "they hold memory, also GPU memory: check that nobody uses them, then vllmops stop PID",
    "https://github.com/vllm-project/vllm/issues/55510",
)
FAILED = Rule(
    "server.failed",
    ERROR,
    "the server has failed",
    "vllmops logs shows why",
)
AGENT = Rule(
    "agent.silent",
    WARNING,
    "an agent does not answer as it should",
    "vllmops restart loads the agent again",
)
AGENT_VERSION = Rule(
    "agent.version",
    INFO,
    "server and command line have different versions of vllmops",
    "restart the server when it suits you, so that both have the same version",
)
AGENT_PROBLEM = Rule(
    "agent.problem",
    INFO,
    "an agent can't do everything in this vLLM",
    "what the agent can't see is missing here; the server is not affected",
)
PATCH_FAILED = Rule(
    "patch.failed",
    WARNING,
    "a patch could not be applied",
    "vllmops patches list shows the reason; the server runs vLLM's own code",
)
DEFECT_PRESENT = Rule(
    "patch.off",
    WARNING,
    "this vLLM has a known defect, and its patch is off",
    "vllmops restart without --no-patch, or vllmops attach --patch; vllmops patches show ID "
    "explains the defect",
)
KNOWN_DEFECT = Rule(
    "vllm.known-defect",
    WARNING,
    "this version of vLLM has a known defect",
    "use a newer vLLM, or vllmops attach --patch",
)
SHM = Rule(
    "machine.shm-leftovers",
    INFO,
    "shared memory of dead processes is left",
    "it uses memory until it is removed: vllmops doctor --clean-shm, once it is 10 min old",
    "https://github.com/vllm-project/vllm/issues/51579",
)
DISK = Rule(
    "machine.disk",
    WARNING,
    "a file system is nearly full",
    "free space on it",
)
MEMORY = Rule(
    "machine.memory",
    WARNING,
    "almost no memory is left",
    "when memory runs out, the kernel kills the largest process; vllmops ps shows which "
    "process uses how much",
)
GPU_MEMORY = Rule(
    "gpu.bad-memory",
    ERROR,
    "a GPU has uncorrectable memory errors",
    "take the GPU out of service; nvidia-smi -q -d ECC shows details",
)
GPU_THROTTLED = Rule(
    "gpu.throttled",
    WARNING,
    "heat or power limits a GPU",
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows which; check cooling and power limit",
)
GPU_SPINNING = Rule(
    "gpu.spinning",
    WARNING,
    "a kernel on a GPU seems to spin: it is busy, and it neither reads memory nor draws power",
    "vllmops stacks dump --explain names the thread that waits for it; a restart ends it",
    "https://github.com/vllm-project/vllm/issues/43885",
)
GPU_ERROR = Rule(
    "gpu.xid",
    ERROR,
    "the driver reported an error of a GPU",
    "dmesg shows it; restart the server; with Xid 79, 94, 95 or 119 reset the GPU before",
    "https://docs.nvidia.com/deploy/xid-errors/",
)
SEVERAL_STORES = Rule(
    "responses.store-in-memory",
    WARNING,
    "several API servers keep responses, each in its own memory",
    "a follow-up, a retrieval or a cancellation finds its response only by chance: use one "
    "API server, or a store that they share (vllmops serve --store)",
    "https://github.com/vllm-project/vllm/pull/34738",
)
UNSTORED = Rule(
    "responses.store-unavailable",
    ERROR,
    "the store of responses can't be reached",
    "vllmops logs shows why: check that its server runs, its URL and password, and its disk",
)
NO_KEY = Rule(
    "security.no-api-key",
    WARNING,
    "anybody who reaches this machine can use the server",
    "start it with VLLM_API_KEY set, or with --host 127.0.0.1",
)
DEV_ROUTES = Rule(
    "security.dev-routes",
    ERROR,
    "anybody who reaches this machine can put the server to sleep or empty its caches",
    "start it without VLLM_SERVER_DEV_MODE, or with --host 127.0.0.1",
)
WEAK_KEY = Rule(
    "security.signing-key",
    ERROR,
    "the key that signs conversation state is weak",
    "use at least 64 random hex digits: vllmops keygen",
)
PYSPY = Rule(
    "tools.py-spy",
    WARNING,
    "stacks can't be read, so a hang can't be explained",
    "vllmops stacks dump shows what is missing",
)
CANARY = Rule(
    "canary.failed",
    ERROR,
    "a request for one token was not answered",
    "vllmops stacks dump --explain names what is stuck",
)
CANARY_LATE = Rule(
    "canary.late",
    WARNING,
    "a request for one token timed out while other requests made progress",
    "it waits behind the others: vllmops status shows how many; add replicas, or send fewer "
    "requests at once",
)
KV_PRESSURE = Rule(
    "kv-cache.pressure",
    WARNING,
    "the KV cache is full and requests wait",
    "run fewer requests at once (--max-num-seqs), lower --max-model-len, or give the cache "
    "more memory (--gpu-memory-utilization)",
)
PREEMPTIONS = Rule(
    "kv-cache.preemptions",
    WARNING,
    "requests are preempted: removed from the KV cache and computed again",
    "each preemption repeats work: run fewer requests at once (--max-num-seqs), lower "
    "--max-model-len, or give the cache more memory (--gpu-memory-utilization)",
)
QUEUEING = Rule(
    "latency.queueing",
    WARNING,
    "requests spend most of their time in the queue",
    "add replicas, or send fewer requests at once",
)
FIRST_TOKEN = Rule(
    "latency.first-token",
    WARNING,
    "most of the time to the first token is spent outside the engine",
    "the API server is the bottleneck (tokenizing, media, event loop): raise --api-server-count",
)
NEXT_TOKEN = Rule(
    "latency.next-token",
    WARNING,
    "most of the time between tokens is spent outside the engine",
    "the API server is the bottleneck (detokenizing, parsers, event loop): raise "
    "--api-server-count",
)
ERRORS = Rule(
    "requests.errors",
    ERROR,
    "requests fail because of server errors",
    "vllmops logs shows the errors",
)
BAD_VERSION = package_versions.BAD_VERSION
CATALOGUE = {rule.code: rule for rule in list(vars().values()) if isinstance(rule, Rule)}

# Known defects, and the first version without each; for a server that no agent can probe. The
# versions on both sides were tested.
DEFECTS = (
    ("encoder-decoder-free-order", "0.14.1", "https://github.com/vllm-project/vllm/pull/32789"),
    ("request-hash-cycle", "0.16.0", "https://github.com/vllm-project/vllm/pull/34183"),
    ("mm-lru-ghost-keys", "0.24.0", "https://github.com/vllm-project/vllm/pull/43595"),
)


def diagnose_server(snapshot: ServerSnapshot) -> list[Finding]:
    """What every check finds, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(snapshot)]


def check_missing_processes(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Processes that should be there."""
    if snapshot.state == "failed":
        yield FAILED.make_finding(snapshot.server, snapshot.failure or "its state is failed")
        return
    if not snapshot.samples or snapshot.state == "starting":
        return
    last = snapshot.samples[-1]
    roles = [process.role for process in last.processes if process.state not in {"", "Z"}]
    apis = [process for process in last.processes if process.role == "api"]
    # Without multiprocessing the engine runs inside the API server.
    inside = any(
        report.role == "api" and report.engine.current_step is not None
        for report in snapshot.reports
    )
    if apis and last.health and "engine" not in roles and not inside:
        evidence = f"api {apis[0].pid} has no EngineCore process below it"
        if last.health == 503 or len(roles) == len(apis):
            yield ENGINE_MISSING.make_finding(snapshot.server, evidence)
    elif last.health == 503:
        yield UNHEALTHY.make_finding(
            ", ".join(map(format_process_name, apis)), "/health answers 503"
        )
    expected, alive = count_expected_workers(snapshot), roles.count("worker")
    if "engine" in roles and expected > alive > 0:
        yield WORKER_MISSING.make_finding(
            snapshot.server, f"{alive} of {expected} workers are alive"
        )
    for process in last.processes:
        if process.state == "Z":
            yield DEAD_CHILD.make_finding(format_process_name(process), "state Z: a zombie")


def count_expected_workers(snapshot: ServerSnapshot) -> int:
    """How many workers the server was started with here; 0 if unknown."""
    samples = snapshot.caches.samples if snapshot.caches else []
    for process in samples[-1].processes if samples else ():
        setup = process.setup
        if setup and process.role == "engine" and not setup.spread:
            return (setup.tensor_parallel or 1) * (setup.pipeline_parallel or 1)
    return 0


def check_halted_processes(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Processes that can't run, in both of the last two samples: any process may be so in one."""
    if len(snapshot.samples) < 2:
        return
    earlier = {make_process_key(process): process for process in snapshot.samples[-2].processes}
    for process in snapshot.samples[-1].processes:
        before = earlier.get(make_process_key(process))
        # Who ran in between waits each time for something that comes, such as a disk.
        if before is None or (process.state, process.main) != (before.state, before.main):
            continue
        if process.state == "T":
            resumed = f"kill -CONT {process.pid} resumes it"
            yield STOPPED.make_finding(format_process_name(process), "state T", resumed)
        elif process.state == "D":
            yield UNINTERRUPTIBLE.make_finding(
                format_process_name(process), "state D in two samples"
            )
    # If the agent answers, only its heartbeat file is late: the disk may be full.
    answered = {make_process_key(report) for report in snapshot.reports}
    for pulse in snapshot.samples[-1].heartbeats:
        if pulse.age_s >= PATIENCE_S and make_process_key(pulse) not in answered:
            yield NO_PYTHON.make_finding(format_role_and_pid(pulse), describe_heartbeat_age(pulse))


def check_orphaned_processes(snapshot: ServerSnapshot) -> Iterator[Finding]:
    for process in snapshot.machine.orphans:
        memory = format_bytes(process.rss_bytes or 0)
        yield ORPHANS.make_finding(
            format_process_name(process), f"its server is gone; it holds {memory}"
        )


def check_agents(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Agents that are there and do not work as they should."""
    for unseen in snapshot.gaps:
        if unseen.code in AGENT_BROKEN:
            yield AGENT.make_finding(unseen.part, unseen.reason)
        elif unseen.code in AGENT_OTHER_VERSION:
            yield AGENT_VERSION.make_finding(unseen.part, unseen.reason)
    versions: dict[str, list[str]] = {}
    for report in snapshot.reports:
        if report.hello.agent != snapshot.vllmops:
            versions.setdefault(report.hello.agent, []).append(format_role_and_pid(report))
        for problem in report.hello.problems:
            yield AGENT_PROBLEM.make_finding(format_role_and_pid(report), problem)
    for version, names in versions.items():
        evidence = f"server: vllmops {version}; command line: vllmops {snapshot.vllmops}"
        yield AGENT_VERSION.make_finding(", ".join(names), evidence)


def check_patches(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Patches that are not on; without an agent, the defects that the version is known for."""
    states: dict[tuple[str, str, str], list[str]] = {}
    for process in snapshot.patches:
        for verdict in process.patches:
            if (
                verdict.state in {PatchState.FAILED, PatchState.OFF}
                and verdict.present is not False
            ):
                key = (verdict.id, verdict.state, verdict.reason or "")
                states.setdefault(key, []).append(format_process(process))
    for (patch, state, reason), names in states.items():
        rule = PATCH_FAILED if state == PatchState.FAILED else DEFECT_PRESENT
        yield rule.make_finding(", ".join(names), f"{patch}: {reason or state}")
    if snapshot.patches or not snapshot.vllm_version:
        return
    from packaging.version import Version  # noqa: PLC0415 - slow, and seldom needed

    try:
        version = Version(snapshot.vllm_version)
    except ValueError:  # it is none, or has thousands of digits
        return
    if version.is_devrelease and version.release == (0, 1):
        return  # built from a clone without tags, it may be of any time
    for patch, fixed_in, reference in DEFECTS:
        if version < Version(fixed_in):
            evidence = f"vLLM {snapshot.vllm_version} has {patch}, fixed in {fixed_in}"
            yield KNOWN_DEFECT.make_finding(snapshot.server, f"{evidence}; {reference}")


def check_installed_packages(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Versions that are known to hang."""
    versions = {name: v for report in snapshot.reports for name, v in report.packages.items()}
    yield from package_versions.check_versions(versions)


def check_machine(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Shared memory, disks, memory and GPUs of the machine."""
    machine_ = snapshot.machine
    left = [segment for segment in machine_.leftovers if segment.age_s >= LEFT_AGE_S]
    if left:
        yield SHM.make_finding("/dev/shm", "; ".join(describe_leftovers(left)))  # noqa: S108 - the kernel's own place
    for disk in machine_.disks:
        if is_nearly_full(disk):
            yield DISK.make_finding(
                disk.path,
                f"{disk.use}: {format_bytes(disk.free)} of {format_bytes(disk.total)} free",
            )
    if machine_.memory_available < FULL_SHARE * machine_.memory_total:
        yield MEMORY.make_finding(
            "memory",
            f"{format_bytes(machine_.memory_available)} of {format_bytes(machine_.memory_total)} "
            "available",
        )
    for gpu in machine_.gpus:
        subject = f"GPU {gpu.index} ({gpu.name})"
        if gpu.bad_memory:
            yield GPU_MEMORY.make_finding(subject, f"{gpu.bad_memory} uncorrected errors")
        if gpu.throttled:
            clock = f"{gpu.clock_mhz} of {gpu.most_mhz} MHz, " if gpu.most_mhz else ""
            why = f": {', '.join(gpu.slowed_by)}" if gpu.slowed_by else ""
            yield GPU_THROTTLED.make_finding(
                subject, f"{clock}{gpu.celsius} °C, {gpu.watts} W{why}"
            )
        if is_gpu_spinning(gpu) and not is_foreign_gpu(gpu, snapshot):
            share = f"busy {gpu.utilization:.0%}, memory {gpu.memory_busy:.0%}"
            yield GPU_SPINNING.make_finding(
                subject, f"{share}, {gpu.watts:.0f} of {gpu.limit_watts:.0f} W"
            )
    for address, errors in group_xids_by_gpu(machine_.xids).items():
        last = errors[-1]
        yield GPU_ERROR.make_finding(
            address,
            f"{len(errors)}; the last is Xid {last.number}, {last.age_s:.0f} s ago: {last.text}",
        )


def is_gpu_spinning(gpu: Gpu) -> bool:
    """Whether a kernel runs all the time and does nothing: work reads memory and draws power."""
    figures = (gpu.utilization, gpu.memory_busy, gpu.watts, gpu.limit_watts)
    if None in figures:
        return False
    busy, memory, watts, limit = (figure or 0.0 for figure in figures)
    return busy >= SPIN_BUSY and memory <= SPIN_MEMORY and watts < SPIN_POWER * limit


def is_foreign_gpu(gpu: Gpu, snapshot: ServerSnapshot) -> bool:
    """Whether a GPU is surely not this server's: the driver knows its processes, on other GPUs."""
    own = {process.pid for look in snapshot.samples for process in look.processes}
    shown = any(own & used.by_pid.keys() for used in snapshot.machine.gpus)
    return shown and not own & gpu.by_pid.keys()


def group_xids_by_gpu(xids: Sequence[Xid]) -> dict[str, list[Xid]]:
    """Errors by GPU."""
    by_gpu: dict[str, list[Xid]] = {}
    for xid in xids:
        by_gpu.setdefault(xid.gpu, []).append(xid)
    return by_gpu


def describe_leftovers(leftovers: Sequence[ShmLeftover]) -> Iterator[str]:
    """What is left, the largest segments first, and how certain it is that nobody uses them."""
    yield f"{len(leftovers)} segments, {format_bytes(sum(segment.bytes for segment in leftovers))}"
    for segment in sorted(leftovers, key=lambda segment: -segment.bytes)[:SHOWN_LEFTOVERS]:
        minutes = segment.age_s / 60
        yield (
            f"{segment.name}: {format_bytes(segment.bytes)}, of {segment.owner}, {minutes:.0f} min "
            "old"
        )
    doubt = next((segment.uncertainty for segment in leftovers if segment.uncertainty), "")
    yield (
        f"no process that vllmops can see maps or opens them; {doubt}"
        if doubt
        else "no process of this machine maps or opens them"
    )


def is_nearly_full(disk: DiskSpace) -> bool:
    """Whether little is left in share and in bytes: a large disk may be nearly full for years."""
    return disk.free < FULL_SHARE * disk.total and disk.free < FULL_BYTES


def check_response_store(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """API servers whose last call to the store of responses has failed."""
    for pulse in snapshot.samples[-1].heartbeats if snapshot.samples else ():
        if pulse.heartbeat.unready == STORE_AWAY:
            yield UNSTORED.make_finding(format_role_and_pid(pulse), "what must be stored gets 503")


def check_security(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Who can reach the server, and what they can do."""
    guard = snapshot.guard
    addresses = ", ".join(guard.addresses)
    if guard.exposed and guard.is_open:
        yield NO_KEY.make_finding(addresses, "/v1/models answers without an API key")
    if guard.exposed and guard.dev_routes:
        yield DEV_ROUTES.make_finding(
            addresses, "vLLM's development routes are on and need no API key"
        )
    if guard.signing_key == "weak":
        yield WEAK_KEY.make_finding(
            "VLLM_RESPONSES_STATE_SIGNING_KEY", "not hex, or fewer than 64 digits"
        )
    apis = [report for report in snapshot.reports if report.role == "api"]
    if guard.store == "memory" and len(apis) > 1:
        yield SEVERAL_STORES.make_finding(
            ", ".join(map(format_role_and_pid, apis)), "they share no store"
        )


def check_stack_access(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """Stacks that can't be read; processes that are refused for one reason are one finding."""
    refused: dict[str, list[Gap]] = {}
    for unseen in snapshot.gaps:
        if unseen.code in NO_STACKS:
            refused.setdefault(unseen.code, []).append(unseen)
    for parts in refused.values():
        yield PYSPY.make_finding(", ".join(unseen.part for unseen in parts), parts[0].reason)


def check_canary(snapshot: ServerSnapshot) -> Iterator[Finding]:
    result = snapshot.canary
    if result is None or result.outcome in {"answered", "unable"}:
        return
    tokens = [look.metrics.tokens for look in snapshot.samples if look.metrics]
    moving = len({count for count in tokens if count is not None}) > 1
    rule = CANARY_LATE if result.outcome == "timeout" and moving else CANARY
    yield rule.make_finding(
        snapshot.url or snapshot.server, f"{result.detail} ({result.seconds:.1f} s)"
    )


def check_traffic(snapshot: ServerSnapshot) -> Iterator[Finding]:
    """What the metrics show for the time between the first sample and the last."""
    with_metrics = [look for look in snapshot.samples if look.metrics]
    if len(with_metrics) < 2:
        return
    first, last = with_metrics[0].metrics, with_metrics[-1].metrics
    assert first is not None
    assert last is not None
    seconds = with_metrics[-1].at_s - with_metrics[0].at_s
    subject = snapshot.url or snapshot.server

    def compute_growth(name: str) -> float:
        before, after = getattr(first, name), getattr(last, name)
        return 0.0 if before is None or after is None else max(after - before, 0.0)

    def compute_mean(name: str) -> float | None:
        count = compute_growth(f"{name}_n")
        return compute_growth(f"{name}_s") / count if count >= ENOUGH else None

    full = all((look.metrics.kv_cache_usage or 0) > 0.95 for look in with_metrics if look.metrics)
    if full and last.waiting:
        yield KV_PRESSURE.make_finding(
            subject, f"{last.kv_cache_usage:.0%} in use, {last.waiting:.0f} requests wait"
        )
    if (preempted := compute_growth("preemptions")) >= ENOUGH:
        yield PREEMPTIONS.make_finding(subject, f"{preempted:.0f} in {seconds:.1f} s")
    queue, prefill, first_token = (
        compute_mean("queue"),
        compute_mean("prefill"),
        compute_mean("first"),
    )
    between, decode = compute_mean("between"), compute_growth("decode_s")
    total = compute_mean("whole")
    if queue is not None and total and queue > 0.5 * total and queue > 1.0:
        yield QUEUEING.make_finding(subject, f"{queue:.1f} s of {total:.1f} s for each request")
    if first_token and queue is not None and prefill is not None:
        rest = first_token - queue - prefill
        if rest > 0.5 * first_token and rest > 1.0:
            yield FIRST_TOKEN.make_finding(
                subject,
                f"{first_token:.2f} s, of which {queue:.2f} s in the queue and {prefill:.2f} s of "
                "prefill",
            )
    tokens = compute_growth("between_n")
    if between and decode and between > 0.2:
        engine = decode / tokens
        if engine < 0.5 * between:
            yield NEXT_TOKEN.make_finding(
                subject, f"{between:.2f} s, of which {engine:.2f} s in the engine"
            )
    errors, responses = compute_growth("errors"), compute_growth("answers")
    failed, finished = compute_growth("failed"), compute_growth("finished")
    if errors and errors >= FULL_SHARE * responses:
        yield ERRORS.make_finding(
            subject, f"{errors:.0f} of {responses:.0f} responses have a 5xx status"
        )
    elif failed and failed >= FULL_SHARE * finished:
        yield ERRORS.make_finding(
            subject, f"{failed:.0f} of {finished:.0f} requests ended with an error"
        )


CHECKS: tuple[Callable[[ServerSnapshot], Iterator[Finding]], ...] = (
    check_missing_processes,
    check_halted_processes,
    check_orphaned_processes,
    check_canary,
    check_traffic,
    check_agents,
    check_patches,
    check_installed_packages,
    check_machine,
    check_security,
    check_response_store,
    check_stack_access,
)


def format_process_name(process: ProcessState) -> str:
    """How findings name a process."""
    return f"{choose_process_title(process.title, process.role, process)} {process.pid}"


def format_bytes(count: float) -> str:
    """Bytes for a person."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
