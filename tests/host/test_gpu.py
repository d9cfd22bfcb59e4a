"""GPU memory, by a module that stands for nvidia-ml-py: tests run where there is no GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from vllmops.host.gpu import Gpus


class BrokenError(Exception):
    pass


def module(processes: object, *, init: object = None) -> SimpleNamespace:
    def fail_or_pass() -> None:
        if init:
            raise BrokenError

    def running(handle: int) -> object:
        if isinstance(processes, BrokenError):
            raise processes
        return processes

    return SimpleNamespace(
        NVMLError=BrokenError,
        nvmlInit=fail_or_pass,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1000 + handle),
        nvmlDeviceGetComputeRunningProcesses=running,
    )


def test_by_gpu_and_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(pid=7, usedGpuMemory=300), SimpleNamespace(pid=8, usedGpuMemory=None)]
    monkeypatch.setitem(sys.modules, "pynvml", module(found))
    assert Gpus().used() == ([1000, 1001], {7: 600})


def test_a_driver_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module(BrokenError()))
    assert Gpus().used() == ([1000, 1001], {})


def test_no_driver_and_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module([], init=True))
    assert Gpus().used() == ([], {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().used() == ([], {})
