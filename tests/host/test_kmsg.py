"""GPU errors in the kernel's log. Nothing here writes into the real one: all doctors read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmops.host import kmsg


def record(age_s: float, text: str) -> str:
    us = int((time.clock_gettime(time.CLOCK_MONOTONIC) - age_s) * 1e6)
    return f"4,1234,{us},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"


def test_what_the_driver_reported_since(monkeypatch: pytest.MonkeyPatch) -> None:
    log = [
        record(900, "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, before the server began"),
        record(50, "NVRM: Xid (PCI:0000:3b:00): 79, pid=8, GPU has fallen off the bus."),
        record(40, "usb 1-1: new device"),
        record(30, "NVRM: Xid (0000:5e:00): 94, Contained"),
        "no record at all",
    ]
    monkeypatch.setattr(kmsg, "records", lambda _: iter(log))
    first, second = kmsg.xids(600)
    assert (first.gpu, first.number) == ("0000:3b:00", 79)
    assert first.text == "pid=8, GPU has fallen off the bus."
    assert first.age_s == pytest.approx(50, abs=5)
    assert (second.gpu, second.number, second.text) == ("0000:5e:00", 94, "Contained")


def readable() -> Iterator[str]:
    return kmsg.records(kmsg.KMSG)


def test_the_real_log_is_read_to_its_end() -> None:
    began = time.monotonic()
    assert all(line.split(",")[0].isdecimal() for line in readable())
    assert time.monotonic() - began < 5


def test_without_a_log(tmp_path: Path) -> None:
    assert kmsg.xids(600, tmp_path / "none") == ()
    (tmp_path / "empty").touch()
    assert kmsg.xids(600, tmp_path / "empty") == ()
