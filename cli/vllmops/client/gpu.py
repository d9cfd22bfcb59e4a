"""What processes use of the GPUs, where there are any and nvidia-ml-py is installed."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Gpus:
    """The GPUs of this machine; none of them where the driver can't be asked."""

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
            self.handles = [pynvml.nvmlDeviceGetHandleByIndex(each) for each in range(count)]
        except pynvml.NVMLError:
            self.handles = []

    def used(self) -> tuple[list[int], dict[int, int]]:
        """Bytes in use of each GPU, and by pid on all of them.

        In a container the driver may tell the host's pids, or none.
        """
        by_gpu: list[int] = []
        by_pid: Counter[int] = Counter()
        for handle in self.handles:
            try:
                by_gpu.append(self.nvml.nvmlDeviceGetMemoryInfo(handle).used)
                for each in self.nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    by_pid[each.pid] += each.usedGpuMemory or 0
            except self.nvml.NVMLError:
                continue  # some virtual GPUs tell neither
        return by_gpu, {pid: count for pid, count in by_pid.items() if count}
