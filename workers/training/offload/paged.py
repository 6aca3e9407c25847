"""Optimizer states in a GPU's unified memory, which the driver moves to the host when it is full.

As QLoRA's paged optimizers (arXiv 2305.14314, section 3): a step with long texts evicts states to
the host instead of running out of memory. Updates run on the GPU as before. Does not depend on
update rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.runtime.exit_codes import UserError
from workers.training.optim.build import fill_state
from workers.training.optim.parameter_layout import data_owner
from workers.training.optim.zero1 import get_optimizer_state

SMALLEST = 4096  # elements; smaller states stay where they are, as they share pages with others
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: any stream may use it


class Pages(Protocol):
    """Memory that can move between device and host."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, type and device in such memory."""
        ...


class UnifiedMemory:
    """CUDA's managed memory, by the driver's own interface.

    Raises UserError on a device without it.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UserError(
                "train.optimizer.paged: paging moves states between a GPU's memory and the host's, "
                f"this device is a {device.type.upper()}, whose states are on the host already. "
                "Use paged false."
            )
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UserError(
                f"train.optimizer.paged: the driver's library cannot be loaded ({error}). "
                "Use paged false, or offload optimizer."
            ) from None
        self.device = device

    def empty_like(self, tensor: Tensor) -> Tensor:
        """See `Pages`. Raises MemoryError if the driver has none."""
        torch.cuda.current_stream(self.device).synchronize()  # the device's context exists
        block = _Block(self._driver, tensor.numel() * tensor.element_size())
        flat = torch.as_tensor(block, device=self.device)  # keeps the block alive
        return flat.view(tensor.dtype).view(tensor.shape)


class _Block:
    """Bytes of managed memory, freed with the last tensor that uses them."""

    def __init__(self, driver: Any, size: int) -> None:
        self._driver, self._pointer = driver, ctypes.c_uint64()
        code = driver.cuMemAllocManaged(
            ctypes.byref(self._pointer), ctypes.c_size_t(size), ctypes.c_uint(_ATTACH_GLOBAL)
        )
        if code:
            raise MemoryError(f"cuMemAllocManaged of {size:,} bytes failed with code {code}")
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._pointer.value, False),
            "version": 3,
        }

    def __del__(self) -> None:
        pointer = getattr(self, "_pointer", None)
        if pointer is not None and pointer.value:
            self._driver.cuMemFree_v2(pointer)


def page_states(optimizer: Optimizer, parameters: Iterable[Tensor], pages: Pages) -> int:
    """Create the states of all parameters in `pages`, one parameter after another; their bytes.

    The weights do not change. Every rank must call it with as many parameters.
    """
    moved: set[int] = set()
    total = 0
    for parameter in parameters:
        fill_state(optimizer, [parameter])
        for entry in get_optimizer_state(optimizer).values():
            for state in entry.values():
                if not isinstance(state, Tensor) or id(state) in moved:
                    continue
                moved.add(id(state))
                owner = data_owner(state)
                if owner.numel() >= SMALLEST:
                    paged = pages.empty_like(owner)
                    paged.copy_(owner)
                    owner.data = paged
                    total += owner.numel() * owner.element_size()
    return total
