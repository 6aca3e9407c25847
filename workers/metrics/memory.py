"""Memory of this rank by category, measured from the storages of tensors.

Does not depend on optimizers or wrappers.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

SLOT_BYTES = "ORRERY_SLOT_BYTES"  # in the environment of a rank on a CPU slot
_PAGE = os.sysconf("SC_PAGE_SIZE")
_largest_resident = 0  # of all calls of `process_memory` so far


def held_bytes(
    tensors: Iterable[Tensor], *, without: frozenset[int] | set[int] = frozenset()
) -> int:
    """Bytes of the distinct storages behind `tensors`; a DTensor counts by its local shard.

    `without`: storage keys.
    """
    storages = {}
    for tensor in tensors:
        storage = local_tensor(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(size for key, size in storages.items() if key not in without)


def storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    """Keys of the storages behind `tensors`."""
    return {local_tensor(tensor).untyped_storage()._cdata for tensor in tensors}


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; a plain tensor itself."""
    to_local = getattr(tensor, "_local_tensor", None)
    return tensor.detach() if to_local is None else to_local


class SavedForBackward:
    """A context that records the storages that autograd saves; `held()` returns their bytes.

    It costs a Python call per saved tensor, so it is used in one step of an attempt only.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, at)

    def held(self, *, without: set[int]) -> int:
        """Bytes still alive except storages in `without` (weights); call before the backward pass.

        Clears the record. A gathered weight that was freed after its layer counts as 0 bytes.
        """
        total = sum(
            storage.nbytes() for key, storage in self._storages.items() if key not in without
        )
        self._storages.clear()
        return total

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = local_tensor(tensor).untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor


def process_memory(device: torch.device) -> tuple[int, int]:
    """`(allocated, reserved)`: peaks since the last call.

    On a CPU the peak of resident memory since the last call, Python and libraries included, and
    the largest such peak so far. Without the right to reset the peak, the memory now.
    """
    global _largest_resident
    if device.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peaks
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _largest_resident = max(_largest_resident, peak, resident_bytes())
    try:
        peak = _resident_peak()
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    except (OSError, ValueError):
        peak = resident_bytes()
    return peak, _largest_resident


def resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _resident_peak() -> int:
    """`VmHWM`. Raises ValueError if the kernel does not report it."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise ValueError("no VmHWM in /proc/self/status")


def capacity_bytes(device: torch.device, *, local_world_size: int) -> int:
    """The memory of this rank's device, as the node reports it.

    The GPU's. On a CPU that of its slot (`SLOT_BYTES` in the environment), else this rank's share
    of the host's memory; at most its share of the cgroup's limit.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    host = [_PAGE * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits()]
    share, slot = min(host) // local_world_size, os.environ.get(SLOT_BYTES, "")
    return min(share, int(slot)) if slot.isdigit() and int(slot) else share


def _cgroup_limits() -> list[int]:
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits
