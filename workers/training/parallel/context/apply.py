"""Context parallelism: each rank of an axis computes some positions of every sequence, and what
needs them all.

Attention goes round a ring (`ring`), embeddings turn by the held positions, routers count over
whole sequences. Does
not know losses or gradients: a rank's are those of its positions. Shapes: B batch, S positions, E
experts, K chosen.
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
from workers.training.parallel.context.ring_chunks import held_spans
from workers.training.parallel.mesh import Axis


def apply_context(decoder: Decoder, axis: Axis) -> None:
    """Make `decoder`, or a part of it, take the positions of each sequence that `shard_sequence` gives this
    rank of `axis`.
    """
    if axis.size == 1:
        return
    decoder.placement = RankPositions(axis)
    found: Any
    for found in decoder.modules():
        if isinstance(found, AttentionBase | LatentAttention):
            found.attend = partial(ring_attend, group=axis.group)
        elif isinstance(found, LoadBalance):
            found.whole_counts = partial(_summed, axis.group)
        elif isinstance(found, RoutedMlp):
            found.drop_beyond_capacity = partial(_drop_of_whole, axis)


def shard_sequence(inputs_BS: Tensor, targets_BS: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Of whole sequences the positions that this rank of `axis` holds, `[B, S / axis.size]` each."""
    if axis.size == 1:
        return inputs_BS, targets_BS
    held = rank_positions(inputs_BS.shape[1], axis, inputs_BS.device)
    return inputs_BS[:, held], targets_BS[:, held]


class RankPositions:
    """A decoder's `placement`: the positions that this rank of `axis` holds, kept per length."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._kept: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, tokens: int, device: torch.device) -> tuple[int, Tensor]:
        length = tokens * self.axis.size
        if (length, device) not in self._kept:
            self._kept[length, device] = rank_positions(length, self.axis, device)
        return length, self._kept[length, device]


def rank_positions(
    length: int, axis: Axis, device: torch.device, rank: int | None = None
) -> Tensor:
    """Which of `length` positions this rank of `axis` holds, or the one at place `rank`."""
    spans = held_spans(length, axis.size, axis.rank if rank is None else rank)
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _summed(group: dist.ProcessGroup | None, assigned_BE: Tensor) -> Tensor:
    whole_BE = assigned_BE.clone()
    dist.all_reduce(whole_BE, group=group)
    return whole_BE


def _drop_of_whole(
    axis: Axis,
    chosen_BSK: Tensor,
    *,
    experts: int,
    capacity: float,
    documents: Documents | None = None,
) -> Tensor:
    """What is dropped depends on every earlier token and, of a second choice, on all first ones:
    choices are gathered,
    dropped by the whole sequence, and cut again."""
    parts = [
        torch.empty_like(chosen_BSK, memory_format=torch.contiguous_format)
        for _ in range(axis.size)
    ]
    dist.all_gather(parts, chosen_BSK.contiguous(), group=axis.group)
    length = chosen_BSK.shape[1] * axis.size
    places = [rank_positions(length, axis, chosen_BSK.device, rank) for rank in range(axis.size)]
    whole_BSK = torch.empty_like(torch.cat(parts, dim=1))
    whole_BSK[:, torch.cat(places)] = torch.cat(parts, dim=1)
    kept_BSK = drop_beyond_capacity(
        whole_BSK, experts=experts, capacity=capacity, documents=documents
    )
    return kept_BSK[:, places[axis.rank]]
