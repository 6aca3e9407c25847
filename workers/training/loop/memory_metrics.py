"""Memory metrics: state and activations counted once per attempt, process memory at logged steps.

Assigns tensors to categories; `workers.metrics.memory` counts bytes.
"""

from __future__ import annotations

from collections import Counter
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
from workers.training.objectives.frozen_module import FrozenModule
from workers.training.optim import get_master_weights, get_optimizer_state
from workers.training.parallel.parallelize import Parallel
from workers.training.recompute.memory_budget import in_flight

_CATEGORIES = ("params", "reference", "grads", "optimizer", "activations", "buffers")
_LABELS = {
    "params": "weights",
    "reference": "weights of the reference or teacher",
    "grads": "gradients",
    "optimizer": "optimizer state",
}


def describe_memory(values: Mapping[str, float]) -> str:
    """Like `weights 57.1 MiB, activations 1.20 GiB; 2.31 of 22.9 GiB in use`."""
    sizes = {
        name: values.get(f"memory/{name}_bytes", 0.0)
        for name in (*_CATEGORIES, "allocated", "capacity")
    }
    categories = ", ".join(
        f"{_LABELS.get(name, name)} {_size(sizes[name])}" for name in _CATEGORIES if sizes[name]
    )
    return f"{categories}; {_size(sizes['allocated'])} of {_size(sizes['capacity'])} in use"


def _size(held_bytes: float) -> str:
    return (
        f"{held_bytes / 2**30:.2f} GiB" if held_bytes >= 2**30 else f"{held_bytes / 2**20:.1f} MiB"
    )


class MemoryMetrics:
    """Bytes per category on this rank. Shapes are the same in all steps, so one is counted.

    `params`, `grads`, `optimizer`, `reference` (a frozen second module): this rank's shards.
    `activations`: tensors that autograd saves of a micro-batch by the end of its forward pass,
    times the micro-batches in flight on a pipeline rank. `buffers`: buffers, and gathered or cast
    copies of weights at that time. `other`: the rest of the peak that the process has allocated (on
    a CPU its resident memory, Python and libraries included). What the plan offloads counts as
    `offloaded` only, in the host's memory, which is also the CPU device's, or on disk.
    """

    def __init__(
        self,
        parallel: Parallel,
        device: torch.device,
        *,
        local_world_size: int,
        frozen: FrozenModule | None = None,
    ) -> None:
        """`frozen`: a second module, whose weights are a category of their own."""
        self.device = device
        self._parallel = parallel
        self._parts = len(parallel.parts)  # not counted yet
        self._activations = self._gathered = 0
        self._buffers = held_bytes(buffer for part in parallel.parts for buffer in part.buffers())
        self._offload = parallel.plan.offload
        self._weights_offloaded = parallel.plan.offloads_weights
        self._bytes = {
            "params": held_bytes(p for part in parallel.parts for p in part.parameters())
        }
        if frozen is not None:
            self._bytes["reference"] = frozen.bytes
        self._capacity = capacity_bytes(device, local_world_size=local_world_size)
        # of the optimized modules, `masters` among their categories: the first update of either
        # may be skipped, so the second module's may come first
        self._state: dict[str, int] = {}
        self._second: dict[str, int] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass of a part; counts the saved tensors of each part's first."""
        if not self._parts:
            yield
            return
        parallel = self._parallel
        for casts in parallel.casts:
            casts.watch = True
        with SavedForBackward() as saved:
            yield
        gathered = parallel.gathered_weights()
        weights = storage_keys([*parallel.stored_weights(), *gathered])
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
        """Call after an update, before gradients are freed; counts once."""
        if not self._state:
            self._state = _state_bytes(gradients, optimizer)

    def count_second(
        self, weights: list[Tensor], gradients: list[Tensor], optimizer: Optimizer
    ) -> None:
        """Add another trained module to the categories, after its update; counts once."""
        if not self._second:
            params = held_bytes(weights)
            self._second = {"params": params, **_state_bytes(gradients, optimizer)}

    def values(self) -> dict[str, float]:
        """All `memory/..._bytes` metrics now."""
        allocated, reserved = process_memory(self.device)
        on_device, offloaded = self._split()
        if self.device.type == "cpu":  # the host's memory is the device's own
            in_memory = sum(
                size
                for name, size in offloaded.items()
                if name != "optimizer" or self._offload != "nvme"
            )
        else:
            in_memory = 0
        values = {
            **on_device,
            **({"offloaded": sum(offloaded.values())} if self._offload != "none" else {}),
            "other": max(0, allocated - sum(on_device.values()) - in_memory),
            "allocated": allocated,
            "reserved": reserved,
            "capacity": self._capacity,
        }
        return {f"memory/{name}_bytes": float(value) for name, value in values.items()}

    def _split(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by category on the device (0 if offloaded), and offloaded bytes."""
        sizes = Counter(self._bytes)
        sizes.update(self._state)
        sizes.update(self._second)
        masters = sizes.pop("masters", 0)
        names = [] if self._offload == "none" else ["optimizer"]
        names += ["params", "grads"] if self._weights_offloaded else []
        offloaded = {name: sizes[name] for name in names if name in sizes}
        return dict(sizes) | dict.fromkeys(offloaded, 0), offloaded | {"masters": masters}


def _state_bytes(gradients: list[Tensor], optimizer: Optimizer) -> dict[str, int]:
    """Of a module after its update: gradients, the optimizer's state, master weights."""
    state = [
        x
        for entry in get_optimizer_state(optimizer).values()
        for x in entry.values()
        if isinstance(x, Tensor)
    ]
    return {
        "grads": held_bytes(gradients),
        "optimizer": held_bytes(state),
        "masters": held_bytes(get_master_weights(optimizer)),
    }
