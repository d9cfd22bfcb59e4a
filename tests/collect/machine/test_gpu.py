"""GPUs, by modules that stand for nvidia-ml-py and amdsmi: tests run where there is no GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from vllmops.collect.machine.gpu import AmdGpus, NvidiaGpus


class BrokenError(Exception):
    pass


def module(processes: object, *, init: object = None) -> SimpleNamespace:
    def fail_or_pass() -> None:
        if init:
            raise BrokenError

    def list_running_processes(handle: int) -> object:
        if isinstance(processes, BrokenError):
            raise processes
        return processes

    return SimpleNamespace(
        NVMLError=BrokenError,
        nvmlInit=fail_or_pass,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1000 + handle, total=2000),
        nvmlDeviceGetComputeRunningProcesses=list_running_processes,
    )


def test_by_gpu_and_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(pid=7, usedGpuMemory=300), SimpleNamespace(pid=8, usedGpuMemory=None)]
    monkeypatch.setitem(sys.modules, "pynvml", module(found))
    assert NvidiaGpus().read_used_memory() == ([1000, 1001], {7: 600})


def test_a_driver_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module(BrokenError()))
    assert NvidiaGpus().read_used_memory() == ([1000, 1001], {})


def test_no_driver_and_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module([], init=True))
    assert NvidiaGpus().read_used_memory() == ([], {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvidiaGpus().read_used_memory() == ([], {})


def test_throttle_reasons_are_read_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    found = module([SimpleNamespace(pid=7, usedGpuMemory=300)])
    found.nvmlClocksThrottleReasonGpuIdle = 1
    found.nvmlClocksThrottleReasonSwPowerCap = 4
    found.nvmlClocksThrottleReasonHwSlowdown = 8
    found.nvmlClocksThrottleReasonAll = 13
    found.nvmlClocksThrottleReasonNone = 0
    found.NVML_CLOCK_SM = 1
    found.nvmlDeviceGetClockInfo = lambda _, kind: 300 * kind
    found.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 12 if handle else 1
    monkeypatch.setitem(sys.modules, "pynvml", found)
    idle, hot = NvidiaGpus().observe_gpus()
    assert (idle.throttled, idle.slowed_by) == (False, ("GpuIdle",))
    assert (hot.throttled, hot.slowed_by) == (True, ("HwSlowdown", "SwPowerCap"))
    assert (hot.clock_mhz, hot.most_mhz, hot.by_pid) == (300, None, {7: 300})


def test_errors_that_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells those that come while it is listened to; they are kept for later looks."""
    found = module([])
    told = [SimpleNamespace(device="a", eventData=79), SimpleNamespace(device="b", eventData=31)]

    def wait(events: object, milliseconds: int) -> object:
        assert (events, milliseconds) == ("set", 0)
        if not told:
            raise BrokenError
        return told.pop(0)

    registered: list[tuple[object, ...]] = []
    found.nvmlEventTypeXidCriticalError = 8
    found.nvmlEventSetCreate = lambda: "set"
    found.nvmlDeviceRegisterEvents = lambda *words: registered.append(words)
    found.nvmlEventSetWait_v2 = wait
    found.nvmlDeviceGetPciInfo = lambda device: SimpleNamespace(
        busId={"a": b"00000000:3B:00.0", "b": "00000001:5E:00.0"}[device]
    )
    monkeypatch.setitem(sys.modules, "pynvml", found)
    gpus = NvidiaGpus()
    assert gpus.collect_xids() == []
    assert not registered
    gpus.subscribe_to_xids()
    assert registered == [(0, 8, "set"), (1, 8, "set")]
    for _ in range(2):
        assert [(xid.gpu, xid.number) for xid in gpus.collect_xids()] == [
            ("0000:3b:00", 79),
            ("0001:5e:00", 31),
        ]


def test_a_driver_that_tells_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module([]))
    gpus = NvidiaGpus()
    gpus.subscribe_to_xids()
    assert gpus.collect_xids() == []


def smi(**functions: object) -> SimpleNamespace:
    return SimpleNamespace(
        amdsmi_init=lambda: None, amdsmi_get_processor_handles=lambda: ["a"], **functions
    )


def test_gpus_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    found = smi(
        amdsmi_get_gpu_activity=lambda _: {"gfx_activity": 100, "umc_activity": "N/A"},
        amdsmi_get_power_info=lambda _: {
            "current_socket_power": "N/A",
            "average_socket_power": 140,
            "power_limit": 750_000_000,
        },
        amdsmi_get_gpu_vram_usage=lambda _: {"vram_total": 1024, "vram_used": 3},
        AmdSmiClkType=SimpleNamespace(GFX="gfx"),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT="hot"),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT="now"),
        amdsmi_get_clock_info=lambda _, kind: {"clk": 132, "max_clk": 2100} if kind else {},
        amdsmi_get_temp_metric=lambda *words: 61 if words == ("a", "hot", "now") else None,
        amdsmi_get_violation_status=lambda _: {
            "active_ppt_pwr": True,
            "active_hbm_thrm": True,
            "active_vr_thrm": False,
            "active_socket_thrm": "N/A",
        },
        amdsmi_get_gpu_process_list=lambda _: [
            {"pid": 7, "mem": 900, "memory_usage": {"vram_mem": 700}},
            {"pid": 8, "mem": 0, "memory_usage": {"vram_mem": 0}},
            "N/A",
        ],
    )
    monkeypatch.setitem(sys.modules, "amdsmi", found)
    (gpu,) = AmdGpus().observe_gpus()
    assert (gpu.utilization, gpu.memory_busy, gpu.watts, gpu.limit_watts) == (
        1.0,
        None,
        140.0,
        750.0,
    )
    assert (gpu.used_bytes, gpu.total_bytes, gpu.name) == (3 << 20, 1 << 30, "")
    assert (gpu.clock_mhz, gpu.most_mhz, gpu.celsius) == (132, 2100, 61)
    assert (gpu.throttled, gpu.slowed_by) == (True, ("hbm_thrm", "ppt_pwr"))
    assert gpu.by_pid == {7: 700}


@pytest.mark.parametrize("found", [None, SimpleNamespace(), smi()])
def test_no_amd_or_one_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace | None
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", found)
    assert [(gpu.utilization, gpu.name) for gpu in AmdGpus().observe_gpus()] in ([], [(None, "")])
