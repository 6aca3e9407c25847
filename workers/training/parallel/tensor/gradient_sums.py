"""Sums partial gradients over the tensor-parallel axis, once per step, in one all-reduce.

Partial are those of norms over parts of the sequence, latents before heads, fewer key-value heads
than ranks, and biases added once; they stay partial while micro-batches accumulate. Does not depend
on which parameters those are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()
def sum_partial(parameters: Iterable[Tensor]) -> None:
    """Sum every partial `grad` in place over its partial mesh axes; collective.

    Other gradients, plain tensors included, do not change.
    """
    partial: dict[tuple[Any, int, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        for axis, placement in enumerate(getattr(grad, "placements", ())):
            if placement.is_partial():
                partial.setdefault((grad.device_mesh, axis, grad.dtype), []).append(parameter)
    for (mesh, axis, _), summed in partial.items():
        grads: list[Any] = [parameter.grad for parameter in summed]
        flat = torch.cat([grad.to_local().reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=mesh.get_group(axis))
        chunks = torch.split(flat, [grad.to_local().numel() for grad in grads])
        for parameter, grad, chunk in zip(summed, grads, chunks, strict=True):
            local, placements = grad.to_local(), list(grad.placements)
            local.copy_(chunk.view(local.shape))
            placements[axis] = Replicate()
            parameter.grad = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride()
            )
