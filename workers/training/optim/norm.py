"""The gradient norm over plain and sharded tensors, whole and by layer, and the one multiplication
that clips and
unscales. Does not know optimizers or loss scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor

_PIECE = 1 << 17  # numbers: 1 MiB in fp64


class Norms:
    """Squared norms by group of parameters; summed over all ranks and groups they are the global
    one's square.

    In fp64, so that clipping multiplies by the same factor however gradients are sharded: fp32
    partial sums differ by
    1e-7, which Adam's first steps blow up to 1e-4 of the loss within 20 steps.
    """

    def __init__(self, groups: Sequence[int], holders: Sequence[int], *, count: int) -> None:
        """Parameter i is one of group `groups[i]` of `count`, and `holders[i]` ranks of the world
        hold the same part of
        it as this one does: each number counts once. Meshes may differ from parameter to parameter.
        """
        self.holders = list(holders)
        members: list[list[int]] = [[] for _ in range(count)]
        for place, group in enumerate(groups):
            members[group].append(place)
        # rows of equal length, filled up with a zero's place: a scatter's sums would have no fixed
        # order on CUDA
        widest = max(map(len, members))
        self.members = [each + [len(self.holders)] * (widest - len(each)) for each in members]
        self._kept: tuple[Tensor, Tensor] | None = None

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's share of each group's square, `[count]` fp64, of one tensor a parameter in
        their order.
        """
        squares = _squares([local_tensor(tensor) for tensor in tensors])
        holders, members = self._on(squares.device)
        return torch.cat([squares / holders, squares.new_zeros(1)])[members].sum(1)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._kept is None or self._kept[0].device != device:
            holders = torch.tensor(self.holders, dtype=torch.float64, device=device)
            self._kept = holders, torch.tensor(self.members, device=device)
        return self._kept


def norm_of(tensors: Sequence[Tensor]) -> float:
    """The norm of all of them together, of what lies on this rank."""
    return math.sqrt(float(_squares([local_tensor(tensor) for tensor in tensors]).sum()))


@torch.no_grad()
def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Each one's sum of squares, `[len(tensors)]` fp64."""
    if tensors[0].device.type != "cpu":
        return torch.stack(
            list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
        ).square()
    # torch's norm widens number by number on a CPU: 37 ms of 15M, where pieces that fit a cache
    # take 7
    wide = torch.empty(_PIECE, dtype=torch.float64)
    found = []
    for tensor in tensors:
        pieces = (
            wide[: piece.numel()].copy_(piece) for piece in torch.split(tensor.reshape(-1), _PIECE)
        )
        found.append(sum(torch.dot(piece, piece).item() for piece in pieces))
    return torch.tensor(found, dtype=torch.float64)


def factor_of(*, norm: float, limit: float | None) -> float:
    """By which clipping multiplies, 1 where it does not; torch's own 1e-6 in the denominator."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


@torch.no_grad()
def scale_(
    gradients: list[Tensor], *, norm: float, limit: float | None, loss_scale: float = 1.0
) -> None:
    """Take the loss scale out, and bring the global norm (without that scale) to `limit` where it
    is above.

    One pass for both.
    """
    factor = factor_of(norm=norm, limit=limit)
    if factor != 1.0 or loss_scale != 1.0:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor / loss_scale)
