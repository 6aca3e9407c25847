"""The run's memory metrics: state and activations counted once an attempt, what the process holds
at every logged step.

Knows which tensors belong to which category; counting is `workers.metrics.memory`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.metrics.memory import (
    SavedForBackward,
    capacity_bytes,
    held_bytes,
    process_memory,
    storage_keys,
)
from workers.training.optim import masters_of, state_of
from workers.training.parallel.parallelize import Parallel
from workers.training.recompute.memory_budget import in_flight

_TOLD = ("params", "grads", "optimizer", "activations", "buffers")
_WORDS = {"params": "weights", "grads": "gradients", "optimizer": "optimizer state"}


def describe_memory(values: Mapping[str, float]) -> str:
    """What a rank held, in a few words: `weights 57.1 MiB, activations 1.20 GiB; 2.31 of 22.9 GiB
    in use`.
    """
    sizes = {
        name: values.get(f"memory/{name}_bytes", 0.0) for name in (*_TOLD, "allocated", "capacity")
    }
    told = ", ".join(
        f"{_WORDS.get(name, name)} {_size(sizes[name])}" for name in _TOLD if sizes[name]
    )
    return f"{told}; {_size(sizes['allocated'])} of {_size(sizes['capacity'])} in use"


def _size(held_bytes: float) -> str:
    return (
        f"{held_bytes / 2**30:.2f} GiB" if held_bytes >= 2**30 else f"{held_bytes / 2**20:.1f} MiB"
    )


class MemoryMetrics:
    """Categories in bytes of this rank. Shapes do not change from step to step, so one step's count
    holds for all.

    `params`, `grads`, `optimizer`: this rank's shards. `activations`: what autograd keeps of a
    micro-batch at the end
    of its forward pass, times the micro-batches that a pipeline rank holds at once. `buffers`:
    buffers, and whole or
    cast copies of weights at that moment. `other`: the rest of what the process has allocated (on a
    CPU its resident
    memory, Python and libraries included). What the plan offloads counts as `offloaded` alone, be
    it in the host's
    memory, which a CPU shares with it, or on a disk.
    """

    def __init__(self, parallel: Parallel, device: torch.device, *, local_world_size: int) -> None:
        self.device = device
        self._parallel = parallel
        self._parts = len(parallel.parts)  # whose forward passes are not counted yet
        self._activations = self._gathered = 0
        self._buffers = held_bytes(buffer for part in parallel.parts for buffer in part.buffers())
        self._offload = parallel.plan.offload
        self._weights_away = parallel.plan.offloads_weights
        self._bytes = {
            "params": held_bytes(p for part in parallel.parts for p in part.parameters())
        }
        self._capacity = capacity_bytes(device, local_world_size=local_world_size)
        self._masters = 0
        self._state_counted = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass of a part; of every part's first one it is counted what it keeps."""
        if not self._parts:
            yield
            return
        parallel = self._parallel
        for casts in parallel.casts:
            casts.watch = True
        with SavedForBackward() as saved:
            yield
        gathered = parallel.gathered_weights()
        weights = storage_keys([*parallel.parameters().values(), *gathered])
        self._activations += saved.held(without=weights)
        self._gathered = max(self._gathered, held_bytes(gathered))
        self._parts -= 1
        for casts in parallel.casts:
            casts.watch = False
            if not self._parts:
                casts.copies.clear()
        if not self._parts:
            flight = in_flight(parallel.plan, parallel.world.axis("pp").rank)
            self._bytes |= {
                "activations": round(flight * self._activations),
                "buffers": self._buffers + self._gathered,
            }

    def count_state(self, gradients: list[Tensor], optimizer: Optimizer) -> None:
        """Told after an update, gradients still there; counts at the first."""
        if self._state_counted:
            return
        state = [
            x
            for entry in state_of(optimizer).values()
            for x in entry.values()
            if isinstance(x, Tensor)
        ]
        self._bytes |= {"grads": held_bytes(gradients), "optimizer": held_bytes(state)}
        self._masters = held_bytes(masters_of(optimizer))
        self._state_counted = True

    def values(self) -> dict[str, float]:
        """All `memory/..._bytes` metrics at this moment."""
        allocated, reserved = process_memory(self.device)
        here, away = self._split()
        if self.device.type == "cpu":  # the host's memory is the device's own
            in_memory = sum(
                size
                for name, size in away.items()
                if name != "optimizer" or self._offload != "nvme"
            )
        else:
            in_memory = 0
        whole = {
            **here,
            **({"offloaded": sum(away.values())} if self._offload != "none" else {}),
            "other": max(0, allocated - sum(here.values()) - in_memory),
            "allocated": allocated,
            "reserved": reserved,
            "capacity": self._capacity,
        }
        return {f"memory/{name}_bytes": float(value) for name, value in whole.items()}

    def _split(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by category on the device, 0 for what is offloaded, and bytes that are."""
        gone = [] if self._offload == "none" else ["optimizer"]
        gone += ["params", "grads"] if self._weights_away else []
        away = {name: self._bytes[name] for name in gone if name in self._bytes}
        return self._bytes | dict.fromkeys(away, 0), away | {"masters": self._masters}
