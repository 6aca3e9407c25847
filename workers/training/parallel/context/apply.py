"""Context parallelism: each rank of an axis computes some positions of every sequence.

Attention runs on a ring (`ring_attention`), rotary embeddings use the rank's positions, routers
count over full sequences. Does not depend on losses or gradients: a rank's are those of its
positions. Shapes: B batch, S positions, E experts, K chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.models.decoder import Decoder
from workers.models.layers.attention import AttentionBase
from workers.models.layers.documents import Documents
from workers.models.layers.mla import LatentAttention
from workers.models.moe.experts import drop_beyond_capacity
from workers.models.moe.layer import RoutedMlp
from workers.models.moe.load_balance import LoadBalance
from workers.training.parallel.context.ring_attention import ring_attend
from workers.training.parallel.context.ring_chunks import rank_spans
from workers.training.parallel.mesh import Axis


def apply_context(decoder: Decoder, axis: Axis) -> None:
    """Make `decoder`, or a part of it, take the positions that `shard_sequence` selects."""
    if axis.size == 1:
        return
    decoder.placement = RankPositions(axis)
    module: Any
    for module in decoder.modules():
        if isinstance(module, AttentionBase | LatentAttention):
            module.attend = partial(ring_attend, group=axis.group)
        elif isinstance(module, LoadBalance):
            module.whole_counts = partial(_sum_counts, axis.group)
        elif isinstance(module, RoutedMlp):
            module.drop_beyond_capacity = partial(_drop_in_full_sequence, axis)


def shard_sequence(full_BS: Tensor, axis: Axis) -> Tensor:
    """The positions of this rank of `axis`, `[B, S / axis.size]`, of complete sequences."""
    if axis.size == 1:
        return full_BS
    return full_BS[:, rank_positions(full_BS.shape[1], axis, full_BS.device)]


class RankPositions:
    """A decoder's `placement`: the positions of this rank of `axis`, cached per length."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._cache: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, tokens: int, device: torch.device) -> tuple[int, Tensor]:
        """The full length for `tokens` local positions, and those positions in it."""
        length = tokens * self.axis.size
        if (length, device) not in self._cache:
            self._cache[length, device] = rank_positions(length, self.axis, device)
        return length, self._cache[length, device]


def rank_positions(
    length: int, axis: Axis, device: torch.device, rank: int | None = None
) -> Tensor:
    """Positions [length / ranks] int64 of this rank of `axis`, or of the one at index `rank`."""
    spans = rank_spans(length, axis.size, axis.rank if rank is None else rank)
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _sum_counts(group: dist.ProcessGroup | None, assigned_BE: Tensor) -> Tensor:
    total_BE = assigned_BE.clone()
    dist.all_reduce(total_BE, group=group)
    return total_BE


def _drop_in_full_sequence(
    axis: Axis,
    chosen_BSK: Tensor,
    *,
    experts: int,
    capacity: float,
    documents: Documents | None = None,
) -> Tensor:
    """Gather the choices, drop by full sequences, and select this rank's.

    Drops depend on all earlier tokens and, for a second choice, on all first ones.
    """
    parts = [
        torch.empty_like(chosen_BSK, memory_format=torch.contiguous_format)
        for _ in range(axis.size)
    ]
    dist.all_gather(parts, chosen_BSK.contiguous(), group=axis.group)
    length = chosen_BSK.shape[1] * axis.size
    positions = [rank_positions(length, axis, chosen_BSK.device, rank) for rank in range(axis.size)]
    full_BSK = torch.empty_like(torch.cat(parts, dim=1))
    full_BSK[:, torch.cat(positions)] = torch.cat(parts, dim=1)
    within_capacity_BSK = drop_beyond_capacity(
        full_BSK, experts=experts, capacity=capacity, documents=documents
    )
    return within_capacity_BSK[:, positions[axis.rank]]
