"""The recording of an engine's last steps: a file that outlives the process, read by anybody later.

The file is a head in JSON and a ring of records of one size, each with a checksum: the process may
be killed in the middle of a write, so a reader takes what is whole and drops the rest.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal
from zlib import crc32

import msgspec

from .agent_state import LAST_AT, SCHEMA, AgentAnswer, Moment, Seconds, Whole
from .process_identity import ProcessIdentity
from .ranks import Placement, ServerMembership

FORMAT: Final = 1
SUFFIX: Final = ".steps"
HEAD_BYTES: Final = 2048
FILE_BYTES: Final = 2_000_000  # of a recording, at most
RECORDED_S: Final = 300.0  # what a recording holds at least, once the engine has worked that long

# sequence, first step, when it began, seconds, steps, ended, tokens, requests, running, waiting,
# deferred, KV use, phase; and the checksum of these.
FIELDS: Final = struct.Struct("<QIdfHHIHHHHHH")
CHECKSUM: Final = struct.Struct("<I")
pack, checksum = FIELDS.pack, CHECKSUM.pack  # to look them up each time costs more
RECORD: Final = struct.Struct("<QIdfHHIHHHHHHI")
SLOTS: Final = (FILE_BYTES - HEAD_BYTES) // RECORD.size
# Steps that begin within this time share a record, so that the ring lasts for `RECORDED_S`.
SHARED_S: Final = RECORDED_S / SLOTS

MOST: Final = 0xFFFF
KV_PARTS: Final = 10_000
UNKNOWN: Final = MOST
SCHEDULING, EXECUTING, ENDED = 0, 1, 2
Phase = Literal["scheduling", "executing", "ended"]
PHASES: Final[tuple[Phase, ...]] = ("scheduling", "executing", "ended")
OVERLAP: Final = 8  # records, the newest, among which one may still be open


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A step of an engine, or several that began within some milliseconds.

    Args:
        number: of the first one; the scheduler counts them.
        began_at: when the first one began, in seconds since the epoch.
        seconds: from then to what was written last: for steps that ended, to the last one's end.
        steps: how many.
        ended: how many of them ended.
        tokens, requests: scheduled; tokens in all of them, requests in the largest one.
        running, waiting, deferred: requests after the last of them, or once it was scheduled;
            `waiting` for a place, `deferred` for something else: a transfer, a grammar.
        kv_cache_usage: the largest share of the KV cache's blocks in use, 0 to 1; None if unknown.
        phase: of the last one: ``scheduling``, ``executing`` (until its output has been taken) or
            ``ended``.
    """

    number: Whole
    began_at: Moment
    seconds: Seconds
    steps: Whole
    ended: Whole
    tokens: Whole
    requests: Whole
    running: Whole
    waiting: Whole
    deferred: Whole
    kv_cache_usage: float | None
    phase: Phase

    @property
    def ended_at(self) -> float:
        """Seconds since the epoch; of steps that did not end, what is known last."""
        return self.began_at + self.seconds

    @property
    def is_complete(self) -> bool:
        """Whether all of them ended."""
        return self.ended >= self.steps


class StepsHead(msgspec.Struct, frozen=True, kw_only=True):
    """Whose recording it is.

    Args:
        format: of the file.
        pid: process id.
        start_ticks, boot: with the pid its `ProcessIdentity`.
        parent, session: the process that started it, and its session; a dead server is known by
            them.
        started_at: when the recording began, in seconds since the epoch.
        standing: whose it is, its node and its ranks.
    """

    format: int = FORMAT
    pid: int
    start_ticks: int = 0
    boot: str = ""
    parent: int = 0
    session: int = 0
    started_at: Moment = 0.0
    standing: ServerMembership = ServerMembership()

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks, self.boot)

    @property
    def related_pids(self) -> tuple[int, ...]:
        """The pids by which its server may be named."""
        return self.pid, self.parent, self.session


class StepsFile(AgentAnswer, frozen=True, kw_only=True):
    """A recording as an agent gives it: to read it here would cost the engine milliseconds.

    Args:
        role, pid: of the process.
        content: of the file; empty where the process has recorded nothing.
    """

    role: str
    pid: int
    content: bytes


class StepsRecording(AgentAnswer, frozen=True, kw_only=True):
    """What a recording holds.

    Args:
        role, pid: of the process.
        head: its head; None where the process has recorded nothing.
        alive: whether the process still ran when it was read.
        read_at: when it was read, in seconds since the epoch.
        steps: oldest first.
    """

    kind: Literal["steps"] = "steps"
    schema: int = SCHEMA
    role: str = "engine"
    pid: int
    head: StepsHead | None = None
    alive: bool = True
    read_at: Moment = 0.0
    steps: tuple[Step, ...] = ()

    @property
    def open_step(self) -> Step | None:
        """The oldest steps that did not end, None if all did."""
        # Steps overlap where vLLM schedules ahead; long ago, one without an end was given up.
        return next((step for step in self.steps[-OVERLAP:] if not step.is_complete), None)


HEADS = msgspec.json.Decoder(StepsHead)


@dataclass(slots=True)
class StepAccumulator:
    """The steps of one record while they are counted, with the fields of `Step`.

    Args:
        sequence: of the record.
        number: of the first step.
        began: when that began, by the monotonic clock.
        phase: the number of one of `PHASES`.
    """

    sequence: int
    number: int
    began: float
    began_at: float = field(default_factory=time.time)
    seconds: float = 0.0
    steps: int = 0
    ended: int = 0
    tokens: int = 0
    requests: int = 0
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_cache_usage: float | None = None
    phase: int = SCHEDULING
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.offset = compute_record_offset(self.sequence)


def pack_record(run: StepAccumulator) -> bytes:
    """A record; numbers beyond its fields become the largest that fit."""
    usage = run.kv_cache_usage
    kv = UNKNOWN if usage is None else int(usage * KV_PARTS)
    try:
        content = pack(  # without a tuple between: this runs three times a step
            run.sequence,
            run.number & 0xFFFFFFFF,
            run.began_at,
            run.seconds,
            run.steps,
            run.ended,
            run.tokens,
            run.requests,
            run.running,
            run.waiting,
            run.deferred,
            kv,
            run.phase,
        )
    except struct.error:  # seldom, and to look for it each time costs more
        amounts = run.steps, run.ended, run.tokens
        counts = run.requests, run.running, run.waiting, run.deferred, kv
        kept = (min(max(count, 0), MOST) for count in amounts + counts)
        began = run.sequence, run.number & 0xFFFFFFFF, run.began_at, run.seconds
        content = pack(*began, *kept, run.phase)
    return content + checksum(crc32(content))


def make_recording_name(identity: ProcessIdentity) -> str:
    """A recording's name; the pid alone may soon be another process's, above all in a container."""
    return f"{identity.pid}-{identity.start_ticks}{SUFFIX}"


def compute_record_offset(sequence: int) -> int:
    """Where in the file a record is."""
    return HEAD_BYTES + sequence % SLOTS * RECORD.size


def parse_head(content: bytes) -> StepsHead | None:
    """The head of a file; None if it is none of this format."""
    try:
        head_ = HEADS.decode(content[:HEAD_BYTES])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return head_ if head_.format == FORMAT else None


def parse_recording(content: bytes, pid: int, role: str, *, alive: bool = True) -> StepsRecording:
    """What the content of a file says; of one that is none, nothing."""
    head_ = parse_head(content)
    return StepsRecording(
        **(head_.standing if head_ else Placement()).placement_fields(),
        role=role,
        pid=pid,
        head=head_,
        alive=alive,
        read_at=time.time(),
        steps=parse_steps(content) if head_ else (),
    )


def parse_steps(content: bytes) -> tuple[Step, ...]:
    """The whole records of a file, oldest first; whatever else is in it is dropped."""
    numbered = sorted(parse_records(content), key=lambda record: record[0])
    newest = numbered[-1][0] if numbered else 0
    return tuple(step for sequence, step in numbered if sequence > newest - SLOTS)


def parse_records(content: bytes) -> Iterator[tuple[int, Step]]:
    view = memoryview(content)[HEAD_BYTES:FILE_BYTES]
    view = view[: len(view) - len(view) % RECORD.size]
    for slot, fields in enumerate(RECORD.iter_unpack(view)):
        sequence, number, began_at, seconds, count, ended, tokens, *rest = fields
        requests, running, waiting, deferred, usage, phase, kept = rest
        at = slot * RECORD.size
        if (
            sequence % SLOTS == slot
            and kept == crc32(view[at : at + FIELDS.size])
            and phase < len(PHASES)
            and count >= 1
            # NaN fails both.
            and 0 < began_at < LAST_AT
            and 0 <= seconds < LAST_AT
        ):
            yield (
                sequence,
                Step(
                    number=number,
                    began_at=began_at,
                    seconds=seconds,
                    steps=count,
                    ended=min(ended, count),
                    tokens=tokens,
                    requests=requests,
                    running=running,
                    waiting=waiting,
                    deferred=deferred,
                    kv_cache_usage=usage / KV_PARTS if usage <= KV_PARTS else None,
                    phase=PHASES[phase],
                ),
            )
