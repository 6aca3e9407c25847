"""Removes the padding of a micro-batch: rows become documents of one sequence, or are cut.

Does not depend on models or objectives. Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor
from torch.nn import functional

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.models.layers.documents import Documents
from workers.training.parallel.batch_sharding import IGNORED, Batch, TopTokens

_MULTIPLE = 8  # kernels prefer sequence lengths that are a multiple


class Unpadding:
    """How micro-batches lose their padding under a plan.

    `joins`: rows become documents of a single sequence, which has almost no padding. Sequences of a
    micro-batch stay apart if the balance loss counts them (experts) or each is split over ranks
    (cp); they are then cut to the longest.
    """

    def __init__(self, plan: ParallelPlan, model: ModelSpec, *, compiled: bool) -> None:
        # a pipeline's stages exchange tensors of one shape, compiled code is for one shape
        self.works = plan.pp == 1 and not compiled
        self.joins = plan.cp == 1 and model.moe is None
        self.multiple = lcm(_MULTIPLE, 2 * plan.cp * plan.tp)

    def apply(self, batch: Batch, lengths: Sequence[int]) -> Batch:
        """The batch of complete sequences without padding; `lengths` are its rows' positions
        before their padding.
        """
        if not self.works:
            return batch
        if self.joins:
            return self._join(batch, lengths)
        length = min(self._rounded(max(lengths, default=1)), batch.length)
        if length == batch.length or batch.documents is not None:
            return batch
        return _map(batch, lambda each, _: each[:, :length].contiguous(), length)

    def _join(self, batch: Batch, lengths: Sequence[int]) -> Batch:
        if batch.documents is not None:
            raise ValueError("rows with documents of their own cannot be joined")
        total = sum(lengths)
        length = self._rounded(max(total, 1))
        rows = range(len(lengths))
        places = torch.cat(
            [torch.arange(lengths[row]) + row * batch.length for row in rows]
            or [torch.empty(0, dtype=torch.int64)]
        ).to(batch.inputs.device)
        starts = [0] if not lengths else [sum(lengths[:row]) for row in rows]
        if 0 < total < length:
            starts.append(total)

        def join(each: Tensor, filler: int) -> Tensor:
            flat = each.flatten(0, 1).index_select(0, places)
            missing = (0, 0) * (flat.dim() - 1) + (0, length - total)
            return functional.pad(flat, missing, value=filler).unsqueeze(0)

        joined = _map(batch, join, length)
        documents = Documents([starts], length, batch.inputs.device)
        return replace(joined, documents=documents, places=places)

    def _rounded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


def _map(batch: Batch, change: Callable[[Tensor, int], Tensor], length: int) -> Batch:
    """The batch with changed tensors; `change` takes each with the value of new positions."""
    teacher = batch.reference
    if isinstance(teacher, TopTokens):
        teacher = TopTokens(change(teacher.tokens, 0), change(teacher.logprobs, 0))
    return replace(
        batch,
        inputs=change(batch.inputs, 0),
        targets=change(batch.targets, IGNORED),
        weights=None if batch.weights is None else change(batch.weights, 0),
        values={name: change(each, 0) for name, each in batch.values.items()},
        reference=teacher,
        length=length,
    )
