"""GPU errors in the kernel's log. Nothing here writes into the real one: all doctors read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmops.collect.machine import kernel_log


def record(age_s: float, text: str) -> str:
    us = int((time.clock_gettime(time.CLOCK_MONOTONIC) - age_s) * 1e6)
    return f"4,1234,{us},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"


def test_read_xids_skips_records_before_the_server_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = [
        record(900, "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, before the server began"),
        record(50, "NVRM: Xid (PCI:0000:3b:00): 79, pid=8, GPU has fallen off the bus."),
        record(40, "usb 1-1: new device"),
        record(30, "NVRM: Xid (0000:5e:00): 94, Contained"),
        "no record at all",
    ]
    monkeypatch.setattr(kernel_log, "read_records", lambda _: iter(log))
    (tmp_path / "kmsg").touch()
    first, second = kernel_log.read_xids(600, tmp_path / "kmsg")
    assert (first.gpu, first.number) == ("0000:3b:00", 79)
    assert first.text == "pid=8, GPU has fallen off the bus."
    assert first.age_s == pytest.approx(50, abs=40)
    assert (second.gpu, second.number, second.text) == ("0000:5e:00", 94, "Contained")


JOURNAL = """\
[    10.000001] node7 kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=7, before the server began
[{at:.6f}] node7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=8, GPU has fallen off the bus.
[{at:.6f}] node7 kernel: usb 1-1: NVRM: Xid
-- No entries --
"""


def test_the_journal_where_the_log_may_not_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a program that stands for journalctl: here is no systemd."""
    at_s = time.clock_gettime(time.CLOCK_MONOTONIC) - 50
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{JOURNAL.format(at=at_s)}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(kernel_log, "JOURNAL_S", 60.0)  # a busy machine
    (xid,) = kernel_log.read_xids(100, tmp_path / "none")
    assert (xid.gpu, xid.number, xid.text) == (
        "0000:3b:00",
        79,
        "pid=8, GPU has fallen off the bus.",
    )
    assert xid.age_s == pytest.approx(50, abs=40)


@pytest.mark.parametrize("script", ["exit 1", "sleep 600", "head -c 99 /dev/urandom"])
def test_a_journal_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(kernel_log, "JOURNAL_S", 0.2)
    assert kernel_log.read_xids(100, tmp_path / "none") == ()


def readable() -> Iterator[str]:
    return kernel_log.read_records(kernel_log.KMSG)


def test_the_real_log_is_read_to_its_end() -> None:
    assert all(line.split(",")[0].isdecimal() for line in readable())


def test_without_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_log.read_xids(600, tmp_path / "none") == ()
    (tmp_path / "empty").touch()
    assert kernel_log.read_xids(600, tmp_path / "empty") == ()
