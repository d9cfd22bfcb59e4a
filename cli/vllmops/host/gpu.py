"""What the drivers say of GPUs: NVIDIA's through nvidia-ml-py, AMD's through amdsmi."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from ..protocol.server import Gpu

SLOWED = "nvmlClocksThrottleReason"  # how NVML's reasons begin
BRAKES = frozenset({"HwSlowdown", "HwThermalSlowdown", "SwThermalSlowdown"})


class Gpus:
    """The GPUs of this machine; none if the driver can't be asked."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
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

    def used(self) -> tuple[list[int], dict[int, int]]:
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

    def states(self) -> list[Gpu]:
        """The state of each GPU; a value that the driver does not report is None."""
        return [self.state(index, handle) for index, handle in enumerate(self.handles)]

    def state(self, index: int, handle: Any) -> Gpu:
        nvml = self.nvml

        def ask(read: Callable[[], Any]) -> Any:
            try:
                return read()
            except (nvml.NVMLError, AttributeError):
                return None

        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        watts = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        brakes = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        slowed_by = self.reasons(brakes or 0)
        processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        return Gpu(
            index=index,
            name=str(ask(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
            used_bytes=memory and memory.used,
            total_bytes=memory and memory.total,
            busy=None if rates is None else rates.gpu / 100,
            memory_busy=None if rates is None else rates.memory / 100,
            watts=None if watts is None else watts / 1000,
            limit_watts=None if limit is None else limit / 1000,
            celsius=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            clock_mhz=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            most_mhz=ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            throttled=None if brakes is None else bool(BRAKES & set(slowed_by)),
            slowed_by=slowed_by,
            by_pid={p.pid: p.usedGpuMemory for p in processes if p.usedGpuMemory},
            bad_memory=ask(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        )

    def reasons(self, bits: int) -> tuple[str, ...]:
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

    def states(self) -> list[Gpu]:
        """The state of each GPU; a value that the driver does not report is None."""
        return [self.state(index, handle) for index, handle in enumerate(self.handles)]

    def state(self, index: int, handle: Any) -> Gpu:
        def ask(name: str, *words: Any) -> Any:
            """What a function of amdsmi answers: a dictionary, empty if it fails."""
            try:
                return getattr(self.smi, name)(handle, *words) or {}
            except Exception:
                return {}

        activity, power = ask("amdsmi_get_gpu_activity"), ask("amdsmi_get_power_info")
        memory, name = ask("amdsmi_get_gpu_vram_usage"), ask("amdsmi_get_gpu_asic_info")
        used, total = figure(memory, "vram_used"), figure(memory, "vram_total")
        busy, memory_busy = figure(activity, "gfx_activity"), figure(activity, "umc_activity")
        limit = figure(power, "power_limit")
        return Gpu(
            index=index,
            name=str(name.get("market_name", "")),
            used_bytes=None if used is None else int(used) << 20,
            total_bytes=None if total is None else int(total) << 20,
            busy=None if busy is None else busy / 100,
            memory_busy=None if memory_busy is None else memory_busy / 100,
            watts=figure(power, "current_socket_power", "average_socket_power", "socket_power"),
            # Some versions give microwatts.
            limit_watts=limit if limit is None or limit < MOST_WATTS else limit / 1e6,
        )


@cache
def drivers() -> tuple[Gpus, AmdGpus]:
    """The drivers, loaded once for those who ask again and again."""
    return Gpus(), AmdGpus()


def states() -> tuple[Gpu, ...]:
    """The state of each GPU of this machine."""
    return tuple(state for driver in drivers() for state in driver.states())


MOST_WATTS = 100_000


def figure(answer: dict[str, Any], *names: str) -> float | None:
    """The first of some fields that is a number; amdsmi writes "N/A" where it has none."""
    values = (answer.get(name) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float)), None)
