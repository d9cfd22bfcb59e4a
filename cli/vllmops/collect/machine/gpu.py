"""What the drivers say of GPUs: NVIDIA's through nvidia-ml-py, AMD's through amdsmi."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from ...model.server_snapshot import Gpu, Xid

SLOWED = "nvmlClocksThrottleReason"  # how NVML's reasons begin
# What amdsmi says of the moment; the first of thermal limits.
AMD_BRAKES = (
    "active_prochot_thrm",
    "active_socket_thrm",
    "active_vr_thrm",
    "active_hbm_thrm",
    "active_ppt_pwr",
)
MOST_EVENTS = 100  # read at once
BRAKES = frozenset({"HwSlowdown", "HwThermalSlowdown", "SwThermalSlowdown"})


class NvidiaGpus:
    """The GPUs of this machine; none if the driver can't be asked."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.events: Any = None
        self.reported_xids: list[tuple[str, int, float]] = []
        try:
            import pynvml  # noqa: PLC0415
        except ImportError:
            return
        self.nvml = pynvml
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self.handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except pynvml.NVMLError:
            self.handles = []

    def subscribe_to_xids(self) -> None:
        """Have the driver tell of errors from now on; some virtual GPUs can't."""
        if not self.handles:
            return
        nvml = self.nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self.handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except (nvml.NVMLError, AttributeError):
            return
        self.events = events

    def collect_xids(self) -> list[Xid]:
        """The errors that the driver told since `subscribe_to_xids`."""
        for _ in range(MOST_EVENTS if self.events else 0):
            nvml = self.nvml
            try:
                event = nvml.nvmlEventSetWait_v2(self.events, 0)
                address = nvml.nvmlDeviceGetPciInfo(event.device).busId
            except (nvml.NVMLError, AttributeError):  # a time-out: there is no more
                break
            self.reported_xids.append(
                (format_pci_address(address), int(event.eventData), time.monotonic())
            )
        now = time.monotonic()
        return [
            Xid(gpu, number, "told by NVML", now - at) for gpu, number, at in self.reported_xids
        ]

    def read_used_memory(self) -> tuple[list[int], dict[int, int]]:
        """Bytes in use of each GPU, and by pid on all of them.

        In a container the driver may report the pids of the host, or none.
        """
        by_gpu: list[int] = []
        by_pid: Counter[int] = Counter()
        for handle in self.handles:
            try:
                by_gpu.append(self.nvml.nvmlDeviceGetMemoryInfo(handle).used)
                for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    by_pid[process.pid] += process.usedGpuMemory or 0
            except self.nvml.NVMLError:
                continue  # some virtual GPUs report neither
        return by_gpu, {pid: count for pid, count in by_pid.items() if count}

    def observe_gpus(self) -> list[Gpu]:
        """The state of each GPU; a value that the driver does not report is None."""
        return [self.observe_gpu(index, handle) for index, handle in enumerate(self.handles)]

    def observe_gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self.nvml

        def query_or_none(read: Callable[[], Any]) -> Any:
            try:
                return read()
            except (nvml.NVMLError, AttributeError):
                return None

        memory = query_or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = query_or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        watts = query_or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = query_or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        brakes = query_or_none(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        slowed_by = self.decode_throttle_reasons(brakes or 0)
        processes = query_or_none(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        return Gpu(
            index=index,
            name=str(query_or_none(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
            used_bytes=memory and memory.used,
            total_bytes=memory and memory.total,
            utilization=None if rates is None else rates.gpu / 100,
            memory_busy=None if rates is None else rates.memory / 100,
            watts=None if watts is None else watts / 1000,
            limit_watts=None if limit is None else limit / 1000,
            celsius=query_or_none(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            clock_mhz=query_or_none(
                lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            most_mhz=query_or_none(
                lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            throttled=None if brakes is None else bool(BRAKES & set(slowed_by)),
            slowed_by=slowed_by,
            by_pid={p.pid: p.usedGpuMemory for p in processes if p.usedGpuMemory},
            bad_memory=query_or_none(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        )

    def decode_throttle_reasons(self, bits: int) -> tuple[str, ...]:
        """NVML's names of what lowers a clock."""
        bits_of = {
            name.removeprefix(SLOWED): bit
            for name, bit in vars(self.nvml).items()
            if name.startswith(SLOWED) and isinstance(bit, int)
        }
        return tuple(
            sorted(name for name, bit in bits_of.items() if bit.bit_count() == 1 and bits & bit)
        )


class AmdGpus:
    """AMD's GPUs of this machine; none without amdsmi, which comes with ROCm."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        try:
            import amdsmi  # noqa: PLC0415
        except Exception:  # ImportError, or whatever its library raises where there is no driver
            return
        self.smi = amdsmi
        try:
            amdsmi.amdsmi_init()
            self.handles = list(amdsmi.amdsmi_get_processor_handles())
        except Exception:  # its exceptions have no common class in older versions
            self.handles = []

    def observe_gpus(self) -> list[Gpu]:
        """The state of each GPU; a value that the driver does not report is None."""
        return [self.observe_gpu(index, handle) for index, handle in enumerate(self.handles)]

    def observe_gpu(self, index: int, handle: Any) -> Gpu:
        def query_amdsmi(name: str, *words: Any) -> Any:
            """What a function of amdsmi answers: a dictionary, empty if it fails."""
            try:
                return getattr(self.smi, name)(handle, *words) or {}
            except Exception:
                return {}

        activity, power = (
            query_amdsmi("amdsmi_get_gpu_activity"),
            query_amdsmi("amdsmi_get_power_info"),
        )
        memory, name = (
            query_amdsmi("amdsmi_get_gpu_vram_usage"),
            query_amdsmi("amdsmi_get_gpu_asic_info"),
        )
        used, total = find_number(memory, "vram_used"), find_number(memory, "vram_total")
        busy, memory_busy = (
            find_number(activity, "gfx_activity"),
            find_number(activity, "umc_activity"),
        )
        limit = find_number(power, "power_limit")
        clocks = query_amdsmi("amdsmi_get_clock_info", self.find_enum_value("AmdSmiClkType", "GFX"))
        most_mhz = find_number(clocks, "max_clk")
        celsius = query_amdsmi(
            "amdsmi_get_temp_metric",
            self.find_enum_value("AmdSmiTemperatureType", "HOTSPOT"),
            self.find_enum_value("AmdSmiTemperatureMetric", "CURRENT"),
        )
        limits = query_amdsmi("amdsmi_get_violation_status")
        slowed_by = tuple(sorted(name for name in AMD_BRAKES if limits.get(name) is True))
        return Gpu(
            index=index,
            name=str(name.get("market_name", "")),
            used_bytes=None if used is None else int(used) << 20,
            total_bytes=None if total is None else int(total) << 20,
            utilization=None if busy is None else busy / 100,
            memory_busy=None if memory_busy is None else memory_busy / 100,
            watts=find_number(
                power, "current_socket_power", "average_socket_power", "socket_power"
            ),
            # Some versions give microwatts.
            limit_watts=limit if limit is None or limit < MOST_WATTS else limit / 1e6,
            celsius=int(celsius) if isinstance(celsius, int | float) else None,
            clock_mhz=int_or_none(find_number(clocks, "clk", "cur_clk")),
            most_mhz=int_or_none(most_mhz),
            throttled=any("thrm" in name for name in slowed_by) if limits else None,
            slowed_by=tuple(name.removeprefix("active_") for name in slowed_by),
            by_pid=dict(
                filter(
                    None,
                    map(parse_process_memory, query_amdsmi("amdsmi_get_gpu_process_list") or ()),
                )
            ),
        )

    def find_enum_value(self, enum: str, name: str) -> Any:
        """A word of amdsmi's; None where this version has it not."""
        return getattr(getattr(self.smi, enum, None), name, None)


def parse_process_memory(process: Any) -> tuple[int, int] | None:
    """Pid and bytes of the GPU's memory of a process in amdsmi's list; None without."""
    if not isinstance(process, dict):
        return None
    used = process.get("memory_usage")
    vram = find_number(used if isinstance(used, dict) else {}, "vram_mem") or find_number(
        process, "mem"
    )
    pid = process.get("pid")
    return (pid, int(vram)) if isinstance(pid, int) and vram else None


def int_or_none(value: float | None) -> int | None:
    return None if value is None else int(value)


def format_pci_address(address: str | bytes) -> str:
    """A PCI address as the kernel's log writes it, of NVML's ``00000000:3B:00.0``."""
    text = address.decode() if isinstance(address, bytes) else address
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


@cache
def open_drivers() -> tuple[NvidiaGpus, AmdGpus]:
    """The drivers, loaded once for those who ask again and again."""
    nvidia = NvidiaGpus()
    nvidia.subscribe_to_xids()
    return nvidia, AmdGpus()


def observe_gpus() -> tuple[Gpu, ...]:
    """The state of each GPU of this machine."""
    return tuple(state for driver in open_drivers() for state in driver.observe_gpus())


def collect_xids() -> tuple[Xid, ...]:
    """The errors that NVIDIA's driver told this process; for the kernel's log see `kmsg`."""
    nvidia, _ = open_drivers()
    return tuple(nvidia.collect_xids())


MOST_WATTS = 100_000


def find_number(answer: dict[str, Any], *names: str) -> float | None:
    """The first of some fields that is a number; amdsmi writes "N/A" where it has none."""
    values = (answer.get(name) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float)), None)
