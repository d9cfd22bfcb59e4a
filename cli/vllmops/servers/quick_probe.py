"""``vllmops probe`` of an instance, from files and without Typer: it runs every few seconds.

A watch keeps its verdict in the instance's folder. Without one, the heartbeats tell what they can:
whether the server is ready and has started, and never that a stall is sure.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ..model.agent_socket import get_socket_directory
from ..model.probe import OVER, PATIENCE_S, VITAL, WORDS, ProbeResult, judge_state
from ..model.process_identity import read_boot_id, read_stat_fields
from ..model.targets import NAME
from ..support.files import read_private_file
from ..support.home import require_safe_folder, resolve_home

FILE = "verdict.json"
MOST_BYTES = 16 << 20


def answer_probe(arguments: list[str]) -> int | None:
    """Answer a probe; returns the exit code, None for what the command itself has to do.

    Args:
        arguments: what was typed after ``probe``.
    """
    match arguments:
        case [option] | [option, ("-t" | "--target" | "-t="), _] if option[2:] in WORDS:
            name = (
                arguments[2]
                if len(arguments) > 1
                else os.environ.get("VLLMOPS_TARGET") or find_only_instance()
            )
        case _:
            return None
    if not NAME.fullmatch(name or "") or name.isdigit():
        return None
    verdict_ = read_verdict(require_safe_folder(resolve_home() / "instances" / name))
    if verdict_ is None:
        return None
    kind = option[2:]
    print(f"{name} is {verdict_.format_answer(kind)}")
    return 0 if verdict_.has_passed(kind) else 1


def find_only_instance() -> str:
    """The name of the only instance that has not ended; empty if there is none, or several."""
    root = resolve_home() / "instances"
    names = [
        entry.name
        for entry in (os.scandir(root) if root.is_dir() else ())
        if (record := read_json_object(require_safe_folder(root / entry.name) / "instance.json"))
        and record["state"] not in OVER
    ]
    return names[0] if len(names) == 1 else ""


def read_verdict(folder: Path) -> ProbeResult | None:
    """The verdict on an instance; None if it has no record.

    Args:
        folder: the instance's own.
    """
    record = read_json_object(folder / "instance.json")
    if record is None:
        return None
    if record["state"] != "ready":
        return judge_state(record["state"], record["stage"])
    kept = read_json_object(folder / FILE)
    same = kept and (kept["start"], kept["boot"]) == (record["started_at"], read_boot_id())
    if kept and same and time.monotonic() < kept["until"]:
        found = ProbeResult(*kept["verdict"])
        if found.started:  # else it has become ready since
            return found
    return judge_by_heartbeats(record)


def judge_by_heartbeats(record: dict[str, Any]) -> ProbeResult:
    """The verdict by the heartbeats alone.

    Args:
        record: of the instance, which is ready.
    """
    unready: dict[str, None] = {}
    vital = [process for process in record["processes"] if process["role"] in VITAL]
    gone = [process for process in vital if not is_running(process)]
    slow = [f"{p['role']} {p['pid']} is gone" for p in gone]
    for process in vital:
        beat = read_json_object(get_socket_directory(resolve_home()) / f"{process['pid']}.beat")
        if not beat or beat.get("start_ticks") != process["start_ticks"] or process in gone:
            continue
        if why := beat.get("unready"):
            unready[why] = None
        age_s = max(time.monotonic() - beat["monotonic"], 0.0)
        for name, said in (
            ("still_s", "requests are pending and no token is produced"),
            ("loop_s", "the event loop runs nothing"),
        ):
            if (beat.get(name) or 0.0) + age_s >= PATIENCE_S:
                what = said if age_s < PATIENCE_S else "the heartbeat has stopped"
                slow.append(f"{process['role']} {process['pid']}: {what}")
                break
    if vital and len(gone) == len(vital):
        return ProbeResult(live=False, ready=False, started=False, reason="its processes are gone")
    nodes = [record["note"]] if record["note"] else []
    return judge_state("ready", unready=unready, stall="; ".join([*slow, *nodes]))


def is_running(process: dict[str, Any]) -> bool:
    """Whether a process of a record is alive."""
    try:
        fields = read_stat_fields(process["pid"])
    except OSError:
        return False
    return int(fields[19]) == process["start_ticks"] and fields[0] not in {"Z", "X"}


def read_json_object(path: Path) -> dict[str, Any] | None:
    """A JSON object in a file of this user's; None if there is none that can be read."""
    try:
        content = json.loads(read_private_file(path, None, MOST_BYTES))
    except (OSError, ValueError):  # ValueError: caught in the middle of a write
        return None
    return content if isinstance(content, dict) else None
