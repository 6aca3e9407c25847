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


class FaultyNvml(FakeNvml):
    """`lost` devices do not answer; the other attributes are the driver's findings."""

    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.events: list[Any] = []
        self.ecc = 0
        self.remapped = (0, 0, 0, 0)
        self.throttle = 0

    def _answer(self, handle: int | None, value: Any) -> Any:
        if handle is None or handle in self.lost:
            raise self.NVMLError("GPU is lost")
        return value

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return self._answer(index, index)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._answer(handle, super().nvmlDeviceGetName(handle))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return self._answer(handle, super().nvmlDeviceGetMemoryInfo(handle))

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert events == "events" and kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.events:
            raise self.NVMLError("Timeout")
        return self.events.pop(0)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.ecc if handle == 1 else 0

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self.remapped if handle == 1 else (0, 0, 0, 0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.throttle


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyNvml:
    nvml = FaultyNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def problems(machine: Machine) -> list[str | None]:
    return [device.problem for device in machine.inventory().devices]


def test_a_lost_gpu_leaves_the_rest_of_the_node_working(faulty: FaultyNvml) -> None:
    machine = Machine(name="n1", address="127.0.0.1", slots=4)
    assert problems(machine) == [None, None]
    faulty.lost = {0}
    first, second = problems(machine)
    assert first is not None and "GPU is lost" in first and second is None
    assert machine.inventory().devices[0].uuid == "GPU-0"
    assert [sample.index for sample in machine.samples({})] == [1]
    faulty.lost = set()
    assert problems(machine) == [None, None]


def test_a_gpu_that_is_lost_at_the_start_keeps_no_node_from_joining(faulty: FaultyNvml) -> None:
    faulty.lost = {0}
    machine = Machine(name="n1", address="127.0.0.1", slots=4)
    assert [device.index for device in machine.inventory().devices] == [1]


@pytest.mark.parametrize(
    ("findings", "reason"),
    [
        ({"events": [SimpleNamespace(device=1, eventData=79)]}, "XID 79"),
        ({"ecc": 3}, "3 uncorrected memory errors"),
        ({"remapped": (0, 1, 1, 0)}, "waits to be remapped"),
        ({"remapped": (0, 1, 0, 1)}, "cannot be remapped"),
    ],
)
def test_a_fault_makes_only_its_gpu_unusable(faulty, findings, reason) -> None:
    machine = Machine(name="n1", address="127.0.0.1", slots=4)
    vars(faulty).update(findings)
    first, second = problems(machine)
    assert first is None and second is not None and reason in second


def test_an_xid_of_the_application_does_not_count(faulty: FaultyNvml) -> None:
    machine = Machine(name="n1", address="127.0.0.1", slots=4)
    faulty.events = [SimpleNamespace(device=1, eventData=31)]
    assert problems(machine) == [None, None]


def test_throttling_is_reported(faulty: FaultyNvml) -> None:
    machine = Machine(name="n1", address="127.0.0.1", slots=4)
    assert machine.samples({})[0].throttled is None
    faulty.throttle = 0x40 | 0x80
    assert machine.samples({})[0].throttled == "thermal (hardware), power brake"
