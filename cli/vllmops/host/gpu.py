"""GPU memory per process, if there are GPUs and nvidia-ml-py is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ..protocol.server import Gpu


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
            throttled=None
            if brakes is None
            else bool(
                brakes
                & (
                    nvml.nvmlClocksThrottleReasonHwSlowdown
                    | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
                    | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
                )
            ),
            bad_memory=ask(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        )
