"""Samples the machine of a program: CPU, memory, network and NVIDIA GPUs. Standard library only.

Reads Linux's /proc and the NVIDIA management library of the driver; what is missing is left out.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any


class Sampler:
    """Metrics by name; rates and CPU use are since the last call."""

    def __init__(self) -> None:
        self._cpu, self._net, self._at = _cpu_times(), _network(), time.monotonic()
        self._gpus = _Gpus.load()

    def sample(self) -> dict[str, float]:
        """The metrics now; empty where nothing can be read."""
        values: dict[str, float] = {}
        cpu, net, at = _cpu_times(), _network(), time.monotonic()
        if cpu and self._cpu and cpu[1] > self._cpu[1]:
            idle = (cpu[0] - self._cpu[0]) / (cpu[1] - self._cpu[1])
            values["system/cpu_utilization"] = min(1.0, max(0.0, 1.0 - idle))
        seconds = max(1e-6, at - self._at)
        if net and self._net:
            values["system/network_received_bytes_per_s"] = max(0, net[0] - self._net[0]) / seconds
            values["system/network_sent_bytes_per_s"] = max(0, net[1] - self._net[1]) / seconds
        self._cpu, self._net, self._at = cpu, net, at
        return {**values, **_memory(), **(self._gpus.sample() if self._gpus else {})}


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _cpu_times() -> tuple[float, float] | None:
    """`(idle, total)` ticks of all CPUs since the start of the machine: proc(5), /proc/stat."""
    for line in _lines("/proc/stat"):
        if line.startswith("cpu "):
            ticks = [float(word) for word in line.split()[1:9]]
            return ticks[3] + ticks[4], sum(ticks)
    return None


def _network() -> tuple[float, float] | None:
    """`(received, sent)` bytes of all interfaces but the loopback: proc(5), /proc/net/dev."""
    received = sent = 0.0
    lines = _lines("/proc/net/dev")[2:]
    for line in lines:
        name, _, rest = line.partition(":")
        if name.strip() != "lo":
            words = rest.split()
            received, sent = received + float(words[0]), sent + float(words[8])
    return (received, sent) if lines else None


def _memory() -> dict[str, float]:
    """Memory in use of the machine and of this process, in bytes."""
    sizes = {}
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            sizes[name] = float(rest.split()[0]) * 1024
    values = {}
    if len(sizes) == 2:
        values["system/memory_bytes"] = sizes["MemTotal"] - sizes["MemAvailable"]
    pages = _lines("/proc/self/statm")
    if pages:
        size = os.sysconf("SC_PAGE_SIZE")
        values["system/process_memory_bytes"] = float(pages[0].split()[1]) * size
    return values


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Bytes(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Gpus:
    """The GPUs that this program may use, by the driver's library (nvml.h)."""

    def __init__(self, library: Any, handles: list[tuple[int, Any]]) -> None:
        self._library, self._handles = library, handles

    @classmethod
    def load(cls) -> _Gpus | None:
        """None without a driver, and if the program may use no GPU."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2():
                return None
            count = ctypes.c_uint()
            if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return None
            handles = []
            for index in _visible(count.value):
                handle = ctypes.c_void_p()
                if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                    handles.append((index, handle))
        except (OSError, AttributeError):
            return None
        return cls(library, handles) if handles else None

    def sample(self) -> dict[str, float]:
        """Mean over the GPUs as `device/NAME`, and each as `device/INDEX/NAME`."""
        values: dict[str, float] = {}
        sums: dict[str, list[float]] = {}
        for index, handle in self._handles:
            for name, value in self._one(handle).items():
                values[f"device/{index}/{name}"] = value
                sums.setdefault(name, []).append(value)
        means = {f"device/{name}": sum(each) / len(each) for name, each in sums.items()}
        return means if len(self._handles) == 1 else {**means, **values}

    def _one(self, handle: Any) -> dict[str, float]:
        library, values = self._library, {}
        rates, memory, number = _Rates(), _Bytes(), ctypes.c_uint()
        if not library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
            values["utilization"] = rates.gpu / 100
        if not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            values["memory_bytes"] = float(memory.used)
        if not library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(number)):
            values["power_w"] = number.value / 1000
        if not library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(number)):
            values["temperature_c"] = float(number.value)
        return values


def _visible(count: int) -> list[int]:
    """The indices that CUDA_VISIBLE_DEVICES leaves; all of them if it names GPUs otherwise."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        return list(range(count))
    return [int(word) for word in words if int(word) < count]
