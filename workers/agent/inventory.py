"""Hardware inventory and utilization of this node: GPUs by NVML, else CPU slots.

A device that does not answer is left out of a sample, never guessed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil

from workers.agent.device_health import DeviceHealth
from workers.contracts.catalog.devices import identify
from workers.contracts.wire.node_messages import (
    DeviceInfo,
    DeviceSample,
    Isolation,
    NodeInventory,
)
from workers.contracts.wire.versions import RELEASE

DEFAULT_SLOTS = 4


class Machine:
    """This machine's devices; `slots` is the number of CPU devices if there is no GPU."""

    def __init__(
        self,
        *,
        name: str,
        address: str,
        slots: int | None,
        isolation: Isolation | None = None,
        topology: str | None = None,
    ) -> None:
        self.name, self.address, self._topology = name, address, topology
        self._isolation = isolation
        self.broker_user: Literal["own", "shared"] = "shared"
        self._nvml = _nvml()
        self._handles = self._gpu_handles()
        self._health = DeviceHealth(self._nvml, self._handles)
        self._known: dict[int, DeviceInfo] = {}  # GPUs that have answered, by index
        self._slots = slots or DEFAULT_SLOTS
        self._processes: dict[int, psutil.Process] = {}

    def inventory(self) -> NodeInventory:
        """Devices, memory, cores and versions."""
        versions = {"python": platform.python_version(), "orrery": RELEASE}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["torch"] = importlib.metadata.version("torch")
        if self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                versions["driver"] = str(self._nvml.nvmlSystemGetDriverVersion())
        memory = psutil.virtual_memory().total
        return NodeInventory(
            name=self.name,
            address=self.address,
            hostname=socket.gethostname(),
            cores=os.cpu_count() or 1,
            memory_bytes=memory,
            devices=self._gpus() if self._handles else self._cpu_slots(memory),
            versions=versions,
            isolation=self._isolation,
            topology=self._topology,
            broker_user=self.broker_user,
        )

    def problems(self) -> dict[int, str]:
        """Why devices cannot be used, by index; reads new errors of the driver."""
        if self._handles:
            self._health.poll()
        problems = {index: self._health.problem(index) for index in range(len(self._handles))}
        return {index: problem for index, problem in problems.items() if problem is not None}

    def samples(self, ranks: Mapping[int, list[int]]) -> list[DeviceSample]:
        """One sample per device; `ranks` are process ids by device index, for CPU slots."""
        if self._handles:
            return [
                sample for index in range(len(self._handles)) if (sample := self._gpu_sample(index))
            ]
        self._processes = {
            pid: process
            for pid, process in self._processes.items()
            if any(pid in pids for pids in ranks.values())
        }
        return [self._slot_sample(index, ranks.get(index, [])) for index in range(self._slots)]

    def _gpu_handles(self) -> list[Any]:
        if self._nvml is None:
            return []
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError:
            return []
        return [self._handle(index) for index in range(count)]

    def _handle(self, index: int) -> Any:
        """The device's handle; None, which every query refuses, for a lost device."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError:
            return None

    def _gpus(self) -> list[DeviceInfo]:
        """All GPUs; one that no longer answers as it last was, with its problem."""
        problems = self.problems()
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(self._nvml.NVMLError, TypeError, ValueError):
                self._known[index] = self._gpu(index, handle)
        return [
            info.model_copy(update={"problem": problems.get(index)})
            for index, info in sorted(self._known.items())
        ]

    def _gpu(self, index: int, handle: Any) -> DeviceInfo:
        product = str(self._nvml.nvmlDeviceGetName(handle))
        memory = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        return DeviceInfo(
            index=index,
            kind="gpu",
            name=product,
            memory_bytes=memory,
            catalogue=identify(product, memory),
            uuid=str(self._nvml.nvmlDeviceGetUUID(handle)),
            cores=self._near_cores(handle),
        )

    def _near_cores(self, handle: Any) -> list[int] | None:
        words = ((os.cpu_count() or 1) + 63) // 64
        try:
            masks = self._nvml.nvmlDeviceGetCpuAffinity(handle, words)
        except self._nvml.NVMLError:
            return None
        return [
            word * 64 + bit
            for word, mask in enumerate(masks)
            for bit in range(64)
            if int(mask) >> bit & 1
        ]

    def _gpu_sample(self, index: int) -> DeviceSample | None:
        nvml, handle = self._nvml, self._handles[index]

        def query(read: Any) -> Any:
            try:
                return read()
            except (nvml.NVMLError, TypeError, ValueError):
                return None

        memory = query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        if memory is None:
            return None
        rates = query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = query(lambda: nvml.nvmlDeviceGetPowerUsage(handle))  # mW
        temperature = query(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        )
        processes = query(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        return DeviceSample(
            index=index,
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=int(memory.used),
            power_w=None if power is None else power / 1000,
            temperature_c=None if temperature is None else float(temperature),
            processes=[int(process.pid) for process in processes],
            throttled=self._health.throttled(index),
        )

    def _cpu_slots(self, memory: int) -> list[DeviceInfo]:
        cores, product = os.cpu_count() or 1, _cpu_name()
        return [
            DeviceInfo(
                index=i,
                kind="cpu",
                name=product,
                memory_bytes=memory // self._slots,
                catalogue="cpu",
                cores=[i % cores],
            )
            for i in range(self._slots)
        ]

    def _slot_sample(self, index: int, pids: list[int]) -> DeviceSample:
        """Utilization of the slot's rank; a process's first sample is 0, as psutil measures between
        samples.
        """
        used, busy = 0, 0.0
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = self._processes.setdefault(pid, psutil.Process(pid))
                busy += process.cpu_percent(None) / 100
                used += process.memory_info().rss
        return DeviceSample(
            index=index,
            utilization=round(min(1.0, busy), 3),
            memory_used_bytes=used,
            processes=pids,
        )


def _nvml() -> Any:
    """The initialized NVML binding; None on a machine without an NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
