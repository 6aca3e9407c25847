"""Devices of a machine: GPUs by NVML, else CPU slots."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from workers.agent.inventory import Machine

GIB = 2**30


class FakeNvml:
    """Two H100s as the driver reports them; the second does not report its power."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetCpuAffinity(self, handle: int, words: int) -> list[int]:
        return [0b1100, *[0] * (words - 1)]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 * GIB, used=3 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError
        return 412_500

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 61

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=4711)] if handle == 0 else []


def test_gpus_are_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    machine = Machine(name="n1", address="127.0.0.1", slots=4)
    inventory = machine.inventory()
    assert [(d.index, d.kind, d.catalogue, d.uuid, d.cores) for d in inventory.devices] == [
        (0, "gpu", "h100-80g", "GPU-0", [2, 3]),
        (1, "gpu", "h100-80g", "GPU-1", [2, 3]),
    ]
    assert inventory.versions["driver"] == "570.1"
    first, second = machine.samples({})
    assert (first.utilization, first.memory_used_bytes, first.power_w, first.temperature_c) == (
        0.75,
        3 * GIB,
        412.5,
        61.0,
    )
    assert first.processes == [4711] and second.power_w is None


def test_slots_share_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = Machine(name="n1", address="127.0.0.1", slots=3)
    inventory = machine.inventory()
    assert [(d.kind, d.catalogue) for d in inventory.devices] == [("cpu", "cpu")] * 3
    assert sum(d.memory_bytes for d in inventory.devices) <= inventory.memory_bytes
    samples = machine.samples({1: [os.getpid()]})
    assert [sample.memory_used_bytes == 0 for sample in samples] == [True, False, True]
    assert samples[1].processes == [os.getpid()] and inventory.versions["python"]


def test_slots_of_ended_ranks_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = Machine(name="n1", address="127.0.0.1", slots=1)
    assert machine.samples({0: [2**22 + 5]})[0].memory_used_bytes == 0
