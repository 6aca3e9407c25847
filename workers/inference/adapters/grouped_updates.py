"""Low-rank updates of many adapters in one step: x Aᵀ, then out += (x Aᵀ) B, of each row's slot.

After Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285). Shapes: T rows, K inputs, N outputs,
S slots, R rank, J factors of linears with one input (R rows of A each). Does not depend on modules.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.moe import grouped_matmul
from workers.inference.adapters.token_groups import TokenGroups

_ALIGNED = 16  # bytes: strides of torch's grouped product
_MOST_PADDED = 2.5  # rows, times those of the adapters


class Updates(Protocol):
    """The products of one step's groups; what `project` returns depends on how it is batched."""

    def project(self, x_TK: Tensor, a_SJK: Tensor) -> Tensor:
        """x Aᵀ `[..., J]` of the rows with an adapter."""
        ...

    def expand(self, inner: Tensor, b_SRN: Tensor, out_TN: Tensor) -> None:
        """Add `inner` `[..., R]` times B to the rows with an adapter, in place."""
        ...


def batched_updates(groups: TokenGroups, itemsize: int) -> Updates:
    """The fastest for these groups, by measurement.

    64 rows of 576 in 16 slots of rank 8 on a CPU: 15 µs if all slots have equally many rows, 60
    padded, 80 grouped, 200 one after another. On GPUs row counts stay on the device.
    """
    if groups.counts.device.type != "cpu":
        return Kernel(groups)
    if groups.uniform is not None:
        return Uniform(groups, *groups.uniform)
    low, high = groups.groups[0].slot, groups.groups[-1].slot + 1
    longest = max(group.count for group in groups.groups)
    if (high - low) * longest <= _MOST_PADDED * groups.total:
        return Padded(groups, low, high, longest)
    return Grouped(groups, itemsize)


class Kernel:
    """The grouped kernel of routed experts."""

    def __init__(self, groups: TokenGroups) -> None:
        self.groups = groups

    def project(self, x_TK: Tensor, a_SJK: Tensor) -> Tensor:
        """See `Updates`."""
        x = x_TK[: self.groups.total].contiguous()
        return grouped_matmul(x, a_SJK, self.groups.counts, check=False)

    def expand(self, inner: Tensor, b_SRN: Tensor, out_TN: Tensor) -> None:
        """See `Updates`."""
        weight = b_SRN.transpose(1, 2)
        update = grouped_matmul(inner.contiguous(), weight, self.groups.counts, check=False)
        out_TN[: self.groups.total].add_(update)


class Uniform:
    """A batched product over consecutive slots from `first` on, each with `rows` rows."""

    def __init__(self, groups: TokenGroups, first: int, rows: int) -> None:
        self.total, self.slots = groups.total, slice(first, first + len(groups.groups))
        self.shape = len(groups.groups), rows, -1

    def project(self, x_TK: Tensor, a_SJK: Tensor) -> Tensor:
        """See `Updates`."""
        x = x_TK[: self.total].view(self.shape)
        return torch.bmm(x, a_SJK[self.slots].transpose(1, 2))

    def expand(self, inner: Tensor, b_SRN: Tensor, out_TN: Tensor) -> None:
        """See `Updates`."""
        out = out_TN[: self.total].view(self.shape)
        if out.is_contiguous():
            out.baddbmm_(inner, b_SRN[self.slots])
        else:
            out.add_(torch.bmm(inner, b_SRN[self.slots]))


class Padded:
    """A batched product over the slots `low` to `high`, each padded to `longest` rows."""

    def __init__(self, groups: TokenGroups, low: int, high: int, longest: int) -> None:
        self.total, self.slots = groups.total, slice(low, high)
        self.shape = high - low, longest, -1
        places: list[int] = []
        for group in groups.groups:
            start = (group.slot - low) * longest
            places += range(start, start + group.count)
        self.places = torch.tensor(places)
        self.index = torch.zeros((high - low) * longest, dtype=torch.int64)
        self.index[self.places] = torch.arange(self.total)

    def project(self, x_TK: Tensor, a_SJK: Tensor) -> Tensor:
        """See `Updates`."""
        x = x_TK.index_select(0, self.index).view(self.shape)
        return torch.bmm(x, a_SJK[self.slots].transpose(1, 2))

    def expand(self, inner: Tensor, b_SRN: Tensor, out_TN: Tensor) -> None:
        """See `Updates`."""
        update = torch.bmm(inner, b_SRN[self.slots]).flatten(0, 1)
        out_TN[: self.total].add_(update.index_select(0, self.places))


class Grouped:
    """torch's grouped product, or one product after another for sizes that it does not take."""

    def __init__(self, groups: TokenGroups, itemsize: int) -> None:
        self.groups, self._itemsize = groups, itemsize

    def project(self, x_TK: Tensor, a_SJK: Tensor) -> Tensor:
        """See `Updates`."""
        return self._product(x_TK[: self.groups.total], a_SJK.transpose(1, 2), a_SJK.shape[1:])

    def expand(self, inner: Tensor, b_SRN: Tensor, out_TN: Tensor) -> None:
        """See `Updates`."""
        out_TN[: self.groups.total].add_(self._product(inner, b_SRN, b_SRN.shape[1:]))

    def _product(self, x_TK: Tensor, w_SKN: Tensor, sizes: torch.Size) -> Tensor:
        if not any(size * self._itemsize % _ALIGNED for size in sizes):
            return functional.grouped_mm(x_TK, w_SKN, offs=self.groups.ends)
        return torch.cat(
            [
                x_TK[each.first : each.first + each.count] @ w_SKN[each.slot]
                for each in self.groups.groups
            ]
        )
