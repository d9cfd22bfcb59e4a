"""A bundle: what one attaches to a bug report, in one file, without secrets.

One is made in two steps::

    contents = collecting.collect_contents(server, tell=…)
    path, index = bundle.write_bundle(contents, path)

`load_bundle` puts a ServerSnapshot together again, with its stacks, caches and memory.
"""

from __future__ import annotations

import contextlib
import errno
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .. import __version__
from ..model import json_text as text
from ..model import snapshot_files
from ..model.bundle_index import BundleGap, BundleIndex, BundlePart
from ..model.caches import CacheSnapshot
from ..model.server_snapshot import ServerSnapshot
from ..model.stacks import StacksSnapshot
from ..model.step_recording import StepsRecording
from ..observe.memory import recorder
from ..redaction.redactor import Redactor
from ..support.errors import VllmopsError
from ..support.files import make_not_written_error as file_not_written
from ..support.files import write_atomically
from . import fatal_messages, tar_archive
from .parts import LOG_LINES, STACKS, BundleContents, UnredactedPart

S = TypeVar("S", bound=msgspec.Struct)
# A log of 48 MiB takes a busy machine 20 s. Clients can make one that takes it hours.
REDACT_S = 120.0

# A line and its end, or the last one, which may be empty.
LINE = re.compile(r"[^\n]*\n|[^\n]+\Z|(?<=\n)\Z|\A\Z")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOTE = "review it before you share it: vllmops finds secrets by their names or their forms"
UNREDACTED = "nothing is redacted: it may contain keys, tokens and prompts"
INDEX, MESSAGES = "index.json", "messages.jsonl"
PARTS = {
    INDEX: "what the bundle holds, what is missing, and what was redacted",
    "doctor.txt": "findings, for a person",
    "doctor.json": "findings, stalls, and what the stacks say",
    "server.json": "processes, heartbeats, agents, patches, metrics over time, machine, GPUs",
    "stacks.jsonl": f"{STACKS} samples of the stacks of all processes, one if something has died",
    "caches.json": "multimodal and encoder caches",
    "memory.jsonl": "the newest recording of its memory",
    "steps.jsonl": "the last steps of its engines",
    MESSAGES: "messages that ended a thread of an engine",
    "metrics.txt": "/metrics as it is",
    "log.txt": f"the beginning and the last {LOG_LINES} lines of its log",
    "supervisor.txt": "its supervisor's log",
    "configuration.json": "command line, environment, record",
    "versions.json": "vLLM, torch, all packages, Python, kernel, drivers",
    "collect_env.txt": "output of vLLM's collect_env",
}
ABOUT_PROC = "status, limits, cgroup, files, threads with their place in the kernel, memory"
READ = {INDEX, "server.json", "stacks.jsonl", "caches.json", "memory.jsonl", "steps.jsonl"}
# In JSON, what a terminal would take for a command; a stranger's bundle may hold some.
CONTROL = re.compile(
    rb"(\\\\)|\\u00(?:0[0-8b-fB-F]|1[0-9a-fA-F]|7[fF]|[89][0-9a-fA-F])|\\[bfr]"
    rb"|\x7f|\xc2[\x80-\x9f]"
)


def write_bundle(
    contents: BundleContents,
    path: Path,
    *,
    redact: bool = True,
    redact_s: float = REDACT_S,
    overwrite: bool = False,
) -> tuple[Path, BundleIndex]:
    """Put a bundle on the disk, whole, readable by its owner alone.

    Where the disk is full the largest parts are left out, as many as it takes.

    Args:
        contents: what `collect_contents` gave.
        path: its name; ``-2`` and so on is added where there is such a file.
        redact: whether to take secrets and prompts out.
        redact_s: seconds for that; what takes longer is left out.
        overwrite: whether to replace a file of that name instead.

    Returns:
        Where it is, and its index.

    Raises:
        VllmopsError: ``bundle.not-written``.
    """
    redactor = Redactor(contents.known_secrets, time.monotonic() + redact_s) if redact else None
    parts: dict[str, bytes] = {}
    missing = contents.missing
    # The log comes last: clients can make it long, and it must not take the time of the others.
    for name in sorted(contents.pieces, key=lambda name: name == "log.txt"):
        try:
            parts[name] = encode_part(name, contents.pieces[name], redactor)
        except TimeoutError:
            why = f"not redacted within {redact_s:g} s: a larger --timeout gives it more time"
            missing = [*missing, BundleGap(name, why)]
    if redactor:
        redactor.deadline = math.inf  # for what the index says
    number = 1
    place = path
    while True:
        index = build_index(contents, parts, missing, redactor)
        content = tar_archive.pack_archive(
            {INDEX: format_json(index), **{part.name: parts[part.name] for part in index.parts}},
            contents.made_at,
        )
        try:
            write_atomically(place, content, overwrite=overwrite)
            return place, index
        except FileExistsError:
            number += 1
            place = make_numbered_path(path, number)
        except OSError as error:
            if error.errno not in FULL or not parts:
                raise make_not_written_error(path, error) from error
            largest = max(parts, key=lambda name: len(parts[name]))
            missing = [*missing, BundleGap(largest, f"left out: {error.strerror}")]
            del parts[largest]


def make_not_written_error(path: Path, error: OSError) -> VllmopsError:
    return file_not_written(path, error, "bundle.not-written", "choose another place with -o FILE")


def make_numbered_path(path: Path, number: int) -> Path:
    """The name with a number before its ending."""
    stem, dot, ending = path.name.partition(".tar")
    return path.with_name(f"{stem}-{number}{dot}{ending}")


def make_bundle_name(server: str, made_at: float) -> str:
    """What a bundle of a server is called that was made then, in seconds since the epoch."""
    server = re.sub(r"[^A-Za-z0-9._-]+", "-", server)  # it may be a URL
    return f"vllmops-bundle-{server}-{datetime.fromtimestamp(made_at, UTC):%Y%m%dT%H%M%SZ}.tar.gz"


def build_index(
    contents: BundleContents,
    parts: Mapping[str, bytes],
    missing: Sequence[BundleGap],
    redactor: Redactor | None,
) -> BundleIndex:
    """The index of a bundle, whose parts it puts in their order."""
    order = [name for name in PARTS if name in parts]
    order += sorted(name for name in parts if name not in PARTS)
    return BundleIndex(
        made_at=contents.made_at,
        seconds=round(contents.seconds, 3),
        vllmops=__version__,
        server=contents.server,
        redacted=redactor is not None,
        interrupted=contents.interrupted,
        parts=tuple(
            BundlePart(
                name,
                len(parts[name]),
                round(contents.pieces[name].seconds, 3),
                PARTS.get(name, ABOUT_PROC),
                contents.pieces[name].process,
            )
            for name in order
        ),
        missing=tuple(
            BundleGap(part.name, redactor.redact_text(part.reason) if redactor else part.reason)
            for part in missing
        ),
        redactions={k: count for k, count in sorted(redactor.counts.items()) if count}
        if redactor
        else {},
        note=NOTE if redactor else UNREDACTED,
    )


def encode_part(name: str, piece: UnredactedPart, redactor: Redactor | None) -> bytes:
    """A part as it is in the archive."""
    content = piece.content
    if isinstance(content, str):
        return join_lines(redact_lines(name, content, redactor) if redactor else iter([content]))
    if name.endswith(".jsonl"):
        if redactor and name == MESSAGES:
            content = fatal_messages.redact_messages(content)
        lines = (msgspec.to_builtins(item, str_keys=True) for item in content)
        redacted = (redactor.redact_data(line, log=True) if redactor else line for line in lines)
        return join_lines(chain(map(text.encode_json, redacted), [b""]))
    plain = msgspec.to_builtins(content, str_keys=True)  # those of JSON
    if redactor and name == "configuration.json":
        plain = redact_configuration(plain, redactor)
    elif redactor:
        plain = redactor.redact_data(plain, log=True)
    return format_json(plain)


def join_lines(lines: Iterator[str] | Iterator[bytes]) -> bytes:
    """Lines in one, made one by one: not all of them are in memory in two forms."""
    content = bytearray()
    for line in lines:
        content += line.encode(errors="backslashreplace") if isinstance(line, str) else line
        content += b"\n"
    return bytes(memoryview(content)[:-1])


def redact_lines(name: str, text: str, redactor: Redactor) -> Iterator[str]:
    """A part's lines without secrets, and without prompts where users' texts may be in it."""
    if name == "collect_env.txt":
        return iter([redactor.redact_assignments(text)])
    lines = (match[0].rstrip("\n") for match in LINE.finditer(text))
    match name:
        case "log.txt":
            return redactor.redact_server_log_lines(lines)
        case "metrics.txt":
            return redactor.redact_lines(lines)
    return redactor.redact_log_lines(lines)


def redact_configuration(configuration: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """A configuration whose words and variables are judged by their names."""
    record = configuration["record"] or {}
    shown: dict[str, Any] = redactor.redact_data(
        {**configuration, "command": [], "environment": {}, "record": None}, log=True
    )
    shown["command"] = redactor.redact_command_line(configuration["command"])
    shown["environment"] = redactor.redact_environment(configuration["environment"])
    if record:
        shown["record"] = {
            **redactor.redact_data(
                {**record, "command": [], "environment": {}, "watch": []}, log=True
            ),
            "command": redactor.redact_command_line(record["command"]),
            "environment": redactor.redact_environment(record["environment"]),
            "watch": redactor.redact_command_line(record["watch"]) if record.get("watch") else None,
        }
    return shown


def format_json(content: object) -> bytes:
    return msgspec.json.format(text.encode_json(content), indent=1) + b"\n"


def load_bundle(path: Path) -> ServerSnapshot:
    """What a bundle holds of a server; it may be a stranger's.

    Raises:
        VllmopsError: as `tar_archive.unpack_archive` and `translate_errors` do, or
            ``bundle.no-snapshot`` where the server was not looked at.
    """
    parts = tar_archive.unpack_archive(path, READ.__contains__)
    if INDEX not in parts:
        raise tar_archive.make_damaged_error(path, f"there is no {INDEX} in it")
    index = parse_part(path, INDEX, parts, BundleIndex)
    if "server.json" not in parts:
        whys = [gap.reason for gap in index.missing if gap.name == "server.json"]
        raise VllmopsError(
            "bundle.no-snapshot",
            f"{path} holds no snapshot of the server: {(*whys, 'the index gives no reason')[0]}",
            f"tar -xzf {path} unpacks what it holds",
        )
    with translate_errors(path, "memory.jsonl"):
        recording = parts.get("memory.jsonl")
        remembered = (
            recorder.parse_recording(path, remove_control_characters(recording))
            if recording
            else None
        )
    return msgspec.structs.replace(
        parse_part(path, "server.json", parts, ServerSnapshot),
        stacks=parse_part_lines(path, "stacks.jsonl", parts, StacksSnapshot),
        recordings=parse_part_lines(path, "steps.jsonl", parts, StepsRecording),
        caches=parse_part(path, "caches.json", parts, CacheSnapshot)
        if "caches.json" in parts
        else None,
        memory=remembered,
    )


def parse_part_lines(
    path: Path, name: str, parts: Mapping[str, bytes], kind: type[S]
) -> tuple[S, ...]:
    """A part with a snapshot in each line; raises as `translate_errors` does."""
    return tuple(
        parse_part(path, name, {name: line}, kind) for line in parts.get(name, b"").splitlines()
    )


def parse_part(path: Path, name: str, parts: Mapping[str, bytes], kind: type[S]) -> S:
    """One part; raises as `translate_errors` does."""
    with translate_errors(path, name):
        return snapshot_files.parse_snapshot(path, remove_control_characters(parts[name]), kind)


@contextlib.contextmanager
def translate_errors(path: Path, name: str) -> Iterator[None]:
    """Tell of the bundle, not of the part, that it can't be read.

    Raises:
        VllmopsError: ``bundle.damaged``, or ``file.newer`` where it is only that.
    """
    try:
        yield
    except VllmopsError as error:
        if error.code == "file.newer":
            raise
        raise tar_archive.make_damaged_error(path, f"{name}: {error.message}") from error


def remove_control_characters(content: bytes) -> bytes:
    """JSON without control characters, line ends and tabs excepted."""
    return CONTROL.sub(lambda match: match[1] or b"", content)
