"""An update rule's states in one record of a file: written after its step, read before the next.

Does not depend on what the states mean.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.metrics.memory import local_tensor
from workers.training.offload.disk import Disk, Extent
from workers.training.optim.parameter_layout import data_owner, wrap_local

_ALIGNED = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a state tensor in the record; `state` is the rule's tensor."""

    parameter: Tensor
    key: str
    state: Tensor
    shape: torch.Size
    dtype: torch.dtype
    offset: int

    def view_in(self, record: Tensor) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return record[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class StatesOnDisk:
    """States of `rule`. Between `start_write` and `finish_read` its state tensors hold no memory.

    The rule creates its states in its first step; they keep their identity and shapes afterwards.
    """

    def __init__(self, rule: Optimizer, disk: Disk) -> None:
        self.rule, self.disk = rule, disk
        self._slots: list[_Slot] = []
        self._extent: Extent | None = None
        self._pending: Future[Tensor] | None = None
        self._record: Tensor | None = None

    def start_read(self) -> None:
        """Start reading; does nothing before the first step."""
        if self._extent is not None:
            self._pending = self.disk.read(self._extent)

    def finish_read(self) -> None:
        """Wait for `start_read` and attach the states to the rule. Raises OSError."""
        if self._pending is not None:
            record, self._pending = self._pending.result(), None
            for slot in self._slots:
                data_owner(slot.state).data = slot.view_in(record)
            self._record = record

    def start_write(self) -> None:
        """Start writing and release the rule's state memory. Raises OSError."""
        first = self._extent is None
        if first:
            self._assign_slots()
        if self._extent is None:
            return  # no gradient yet, so no state
        record = self._record if self._record is not None else self.disk.buffer(self._extent.size)
        for slot in self._slots:
            current, target = data_owner(slot.state), slot.view_in(record)
            if current.data_ptr() != target.data_ptr():  # created in this step, or replaced
                target.copy_(current)
            current.data = torch.empty(0, dtype=slot.dtype)
        self._record = None
        if first:
            _trim()
        self.disk.write(self._extent, record)

    def mapped(self) -> dict[Tensor, dict[str, Any]]:
        """State by parameter over the file, writable. Only valid between steps."""
        states = {parameter: dict(entry) for parameter, entry in self.rule.state.items()}
        if self._extent is not None:
            record = self.disk.mapped(self._extent)
            for slot in self._slots:
                states[slot.parameter][slot.key] = wrap_local(slot.state, slot.view_in(record))
        return states

    def _assign_slots(self) -> None:
        offset = 0
        for parameter, entry in self.rule.state.items():
            for key, state in entry.items():
                if isinstance(state, Tensor):
                    local = local_tensor(state)
                    self._slots.append(
                        _Slot(parameter, key, state, local.shape, local.dtype, offset)
                    )
                    offset += -(-local.nbytes // _ALIGNED) * _ALIGNED
        if self._slots:
            self._extent = self.disk.reserve(offset)


def _trim() -> None:
    """Return freed memory to the system if the C library can.

    glibc does not reuse the freed space of an aligned tensor for the next one of its size: of 256
    MB of states created and freed 16 MB at a time, 240 MB stayed resident.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
