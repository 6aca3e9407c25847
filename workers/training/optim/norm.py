"""Gradient norms over plain and sharded tensors, in total and by layer, and combined clip and
unscale.

Does not depend on optimizers or loss scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor

_CHUNK = 1 << 17  # numbers: 1 MiB in fp64


class Norms:
    """Squared norms by parameter group; their sum over ranks and groups is the squared global norm.

    In fp64, so that the clip factor does not depend on the sharding: fp32 partial sums differ by
    1e-7, which Adam's first steps amplify to 1e-4 of the loss within 20 steps.
    """

    def __init__(self, groups: Sequence[int], holders: Sequence[int], *, count: int) -> None:
        """Parameter i is in group `groups[i]` of `count`.

        `holders[i]` ranks of the world hold the same shard of it as this one, so that each number
        counts once. Meshes may differ between parameters.
        """
        self.holders = list(holders)
        members: list[list[int]] = [[] for _ in range(count)]
        for index, group in enumerate(groups):
            members[group].append(index)
        # rows of equal length, padded with the index of a zero: scatter sums have no fixed order
        # on CUDA
        widest = max(map(len, members))
        self.members = [each + [len(self.holders)] * (widest - len(each)) for each in members]
        self._cached: tuple[Tensor, Tensor] | None = None

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's share of each group's squared norm, `[count]` fp64, from a tensor per
        parameter.
        """
        squares = _squares([local_tensor(tensor) for tensor in tensors])
        holders, members = self._on(squares.device)
        return torch.cat([squares / holders, squares.new_zeros(1)])[members].sum(1)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._cached is None or self._cached[0].device != device:
            holders = torch.tensor(self.holders, dtype=torch.float64, device=device)
            self._cached = holders, torch.tensor(self.members, dtype=torch.int64, device=device)
        return self._cached


def local_norm(tensors: Sequence[Tensor]) -> float:
    """The norm of all tensors together, of this rank's shards."""
    return math.sqrt(float(_squares([local_tensor(tensor) for tensor in tensors]).sum()))


@torch.no_grad()
def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Each tensor's sum of squares, `[len(tensors)]` fp64."""
    if not tensors:  # a stage whose weights are all frozen
        return torch.zeros(0, dtype=torch.float64)
    if tensors[0].device.type != "cpu":
        return torch.stack(
            list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
        ).square()
    # torch's fp64 norm of 15M numbers takes 37 ms on a CPU, chunks that fit a cache 7 ms
    wide = torch.empty(_CHUNK, dtype=torch.float64)
    sums = []
    for tensor in tensors:
        chunks = (
            wide[: chunk.numel()].copy_(chunk) for chunk in torch.split(tensor.reshape(-1), _CHUNK)
        )
        sums.append(sum(torch.dot(chunk, chunk).item() for chunk in chunks))
    return torch.tensor(sums, dtype=torch.float64)


def clip_factor(*, norm: float, limit: float | None) -> float:
    """The factor of clipping, at most 1; 1e-6 in the denominator as in
    torch.nn.utils.clip_grad_norm_.
    """
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def clip_factor_on_device(*, norm: Tensor, limit: float | None) -> Tensor:
    """`clip_factor` of a norm that only the device knows, of the norm's shape and dtype."""
    return torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_(
    gradients: list[Tensor], *, norm: float, limit: float | None, loss_scale: float = 1.0
) -> None:
    """Remove the loss scale and clip the global norm (given without that scale) to `limit`, in one
    pass.
    """
    factor = clip_factor(norm=norm, limit=limit)
    if factor != 1.0 or loss_scale != 1.0:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor / loss_scale)
