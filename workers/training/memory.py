"""The run's memory metrics: state and activations counted once an attempt, what the process holds at every logged step.

Knows which tensors belong to which category; counting is `workers.metrics.memory`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.metrics.memory import capacity_bytes, held_bytes, process_memory
from workers.training.optim import state_of
from workers.training.parallelize import Parallel


class MemoryBook:
    """Categories in bytes of this rank. Shapes do not change from step to step, so one step's count holds for all.

    `params`, `grads`, `optimizer`: this rank's shards. `activations`: what autograd keeps of one micro-batch at the end
    of its forward pass. `buffers`: buffers, and whole or cast copies of weights at that moment. `other`: the rest of
    what the process has allocated (on a CPU its resident memory, Python and libraries included).
    """

    def __init__(self, parallel: Parallel, device: torch.device, *, local_world_size: int) -> None:
        self.device = device
        self.counted = False
        self._buffers = held_bytes(parallel.decoder.buffers())
        self._bytes = {"params": held_bytes(parallel.parameters().values())}
        self._capacity = capacity_bytes(device, local_world_size=local_world_size)
        self._state_counted = False

    def count_forward(self, *, activations: int, gathered: int) -> None:
        """Told at the end of the attempt's first forward pass."""
        self._bytes |= {"activations": activations, "buffers": self._buffers + gathered}
        self.counted = True

    def count_state(self, gradients: list[Tensor], optimizer: Optimizer) -> None:
        """Told after an update, gradients still there; counts at the first."""
        if self._state_counted:
            return
        state = [x for entry in state_of(optimizer).values() for x in entry.values() if isinstance(x, Tensor)]
        self._bytes |= {"grads": held_bytes(gradients), "optimizer": held_bytes(state)}
        self._state_counted = True

    def values(self) -> dict[str, float]:
        """All `memory/..._bytes` metrics at this moment."""
        allocated, reserved = process_memory(self.device)
        whole = {
            **self._bytes,
            "other": max(0, allocated - sum(self._bytes.values())),
            "allocated": allocated,
            "reserved": reserved,
            "capacity": self._capacity,
        }
        return {f"memory/{name}_bytes": float(value) for name, value in whole.items()}
