"""Gradients that ranks of the tensor-parallel axis hold as parts of a sum: summed once a step, in
one message.

Norms over parts of the sequence, latents before heads, key-value heads fewer than ranks, biases
added once. Their
gradients stay parts while micro-batches accumulate. Does not know which parameters those are.
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
    """Sum every partial `grad` in place over the mesh axes on which it is partial; all ranks of
    them call it together.

    Others, plain tensors among them, stay as they are.
    """
    travelling: dict[tuple[Any, int, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        for axis, placement in enumerate(getattr(grad, "placements", ())):
            if placement.is_partial():
                travelling.setdefault((grad.device_mesh, axis, grad.dtype), []).append(parameter)
    for (mesh, axis, _), summed in travelling.items():
        grads: list[Any] = [parameter.grad for parameter in summed]
        flat = torch.cat([grad.to_local().reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=mesh.get_group(axis))
        pieces = torch.split(flat, [grad.to_local().numel() for grad in grads])
        for parameter, grad, piece in zip(summed, grads, pieces, strict=True):
            local, placements = grad.to_local(), list(grad.placements)
            local.copy_(piece.view(local.shape))
            placements[axis] = Replicate()
            parameter.grad = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride()
            )
