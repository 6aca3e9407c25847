"""An update rule's states in one record of a file: taken there after its step, and brought back
before the next.

Knows states by parameter and key, not what they mean.
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
from workers.training.optim.parameter_layout import lender, with_local

_ALIGNED = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where in the record one state tensor lies; `state` is the tensor the rule holds, which lends
    its memory.
    """

    parameter: Tensor
    key: str
    state: Tensor
    shape: torch.Size
    dtype: torch.dtype
    offset: int

    def of(self, record: Tensor) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return record[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class StatesOnDisk:
    """States of `rule`. Between `put` and `take` the rule's state tensors hold no memory.

    The rule makes its states in its first step; from then on they are the same tensors of the same
    shapes.
    """

    def __init__(self, rule: Optimizer, disk: Disk) -> None:
        self.rule, self.disk = rule, disk
        self._slots: list[_Slot] = []
        self._extent: Extent | None = None
        self._coming: Future[Tensor] | None = None
        self._record: Tensor | None = None

    def expect(self) -> None:
        """Start reading; nothing to read before the first step."""
        if self._extent is not None:
            self._coming = self.disk.read(self._extent)

    def take(self) -> None:
        """Wait for what `expect` began: the rule's states are there. Raises OSError."""
        if self._coming is not None:
            record, self._coming = self._coming.result(), None
            for slot in self._slots:
                lender(slot.state).data = slot.of(record)
            self._record = record

    def put(self) -> None:
        """Start writing; the rule's states let go of their memory. Raises OSError."""
        first = self._extent is None
        if first:
            self._lay_out()
        if self._extent is None:
            return  # no gradient yet, so no state
        record = self._record if self._record is not None else self.disk.buffer(self._extent.size)
        for slot in self._slots:
            held, place = lender(slot.state), slot.of(record)
            if held.data_ptr() != place.data_ptr():  # made in this step, or not in place
                place.copy_(held)
            held.data = torch.empty(0, dtype=slot.dtype)
        self._record = None
        if first:
            _trim()
        self.disk.write(self._extent, record)

    def mapped(self) -> dict[Tensor, dict[str, Any]]:
        """The states by parameter, over the file: what is written to them is in it.

        For between steps only.
        """
        found = {parameter: dict(entry) for parameter, entry in self.rule.state.items()}
        if self._extent is not None:
            record = self.disk.mapped(self._extent)
            for slot in self._slots:
                found[slot.parameter][slot.key] = with_local(slot.state, slot.of(record))
        return found

    def _lay_out(self) -> None:
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
            self._extent = self.disk.claim(offset)


def _trim() -> None:
    """Give freed memory back to the system, where the C library can.

    glibc does not use the freed place of an aligned tensor for the next one of its size: of 256 MB
    of states made and
    freed 16 MB at a time, 240 MB stayed resident.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
