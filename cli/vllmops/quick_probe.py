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

from .files import read_private
from .home import home, own
from .protocol.identity import boot_id, stat
from .protocol.probe import OVER, PATIENCE_S, VITAL, WORDS, Verdict, judge
from .protocol.socket import sockets
from .targets import NAME

FILE = "verdict.json"
MOST_BYTES = 16 << 20


def quick(words: list[str]) -> int | None:
    """Answer a probe; returns the exit code, None for what the command itself has to do.

    Args:
        words: what was typed after ``probe``.
    """
    match words:
        case [option] | [option, ("-t" | "--target" | "-t="), _] if option[2:] in WORDS:
            name = words[2] if len(words) > 1 else os.environ.get("VLLMOPS_TARGET") or only()
        case _:
            return None
    if not NAME.fullmatch(name or "") or name.isdigit():
        return None
    verdict_ = verdict(own(home() / "instances" / name))
    if verdict_ is None:
        return None
    kind = option[2:]
    print(f"{name} is {verdict_.line(kind)}")
    return 0 if verdict_.says(kind) else 1


def only() -> str:
    """The name of the only instance that has not ended; empty if there is none, or several."""
    root = home() / "instances"
    names = [
        entry.name
        for entry in (os.scandir(root) if root.is_dir() else ())
        if (record := read(own(root / entry.name) / "instance.json"))
        and record["state"] not in OVER
    ]
    return names[0] if len(names) == 1 else ""


def verdict(folder: Path) -> Verdict | None:
    """The verdict on an instance; None if it has no record.

    Args:
        folder: the instance's own.
    """
    record = read(folder / "instance.json")
    if record is None:
        return None
    if record["state"] != "ready":
        return judge(record["state"], record["stage"])
    kept = read(folder / FILE)
    same = kept and (kept["start"], kept["boot"]) == (record["started_at"], boot_id())
    if kept and same and time.monotonic() < kept["until"]:
        found = Verdict(*kept["verdict"])
        if found.started:  # else it has become ready since
            return found
    return by_heartbeats(record)


def by_heartbeats(record: dict[str, Any]) -> Verdict:
    """The verdict by the heartbeats alone.

    Args:
        record: of the instance, which is ready.
    """
    unready: dict[str, None] = {}
    vital = [process for process in record["processes"] if process["role"] in VITAL]
    gone = [process for process in vital if not runs(process)]
    slow = [f"{p['role']} {p['pid']} is gone" for p in gone]
    for process in vital:
        beat = read(sockets(home()) / f"{process['pid']}.beat")
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
        return Verdict(live=False, ready=False, started=False, reason="its processes are gone")
    nodes = [record["note"]] if record["note"] else []
    return judge("ready", unready=unready, stall="; ".join([*slow, *nodes]))


def runs(process: dict[str, Any]) -> bool:
    """Whether a process of a record is alive."""
    try:
        fields = stat(process["pid"])
    except OSError:
        return False
    return int(fields[19]) == process["start_ticks"] and fields[0] not in {"Z", "X"}


def read(path: Path) -> dict[str, Any] | None:
    """A JSON object in a file of this user's; None if there is none that can be read."""
    try:
        content = json.loads(read_private(path, None, MOST_BYTES))
    except (OSError, ValueError):  # ValueError: caught in the middle of a write
        return None
    return content if isinstance(content, dict) else None
