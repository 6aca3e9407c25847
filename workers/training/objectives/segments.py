"""Sums over the answers of preference rows, under context parallelism too.

Does not depend on losses. Shapes: B batch, S positions of this rank, N answers of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from workers.training.data.rows import Row, Segment
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.context.ring_chunks import rank_spans
from workers.training.parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class Answer:
    """A segment, the index of its row in the micro-batch, and its number of targets with loss."""

    row: int
    segment: Segment
    tokens: int


def answers_of(rows: Sequence[Row]) -> list[Answer]:
    """The answers of rows in order."""
    return [
        Answer(index, each, int((row.weights[each.start : each.stop] > 0).sum()))
        for index, row in enumerate(rows)
        for each in row.segments
    ]


def sum_by_answer(values_BS: Tensor, answers: Sequence[Answer], batch: Batch, axis: Axis) -> Tensor:
    """The sum of `values_BS` at the positions of each answer, `[N]`, on every rank of `axis`.

    The gradient of a sum goes to this rank's positions: each rank differentiates the same loss.
    """
    return _sum_spans(values_BS, answers, batch, axis, last=False)


def value_at_end(values_BS: Tensor, answers: Sequence[Answer], batch: Batch, axis: Axis) -> Tensor:
    """`values_BS` at the last token of each answer, `[N]`, on every rank; see `sum_by_answer`."""
    return _sum_spans(values_BS, answers, batch, axis, last=True)


def pairs_of(answers: Sequence[Answer], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of each pair's chosen and rejected answer, and its row, `[P]` each."""
    places = {(each.row, each.segment.pair, each.segment.role): i for i, each in enumerate(answers)}
    pairs = [
        (index, places[each.row, each.segment.pair, "rejected"], each.row)
        for index, each in enumerate(answers)
        if each.segment.role == "chosen"
    ]
    chosen, rejected, rows = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 3).T.to(device)
    return chosen, rejected, rows


def _sum_spans(
    values_BS: Tensor, answers: Sequence[Answer], batch: Batch, axis: Axis, *, last: bool
) -> Tensor:
    """`last`: of each answer its last position only."""
    numbers = torch.full((len(values_BS), batch.length), len(answers), dtype=torch.int64)
    for number, answer in enumerate(answers):
        first = answer.segment.stop - 1 if last else answer.segment.start
        numbers[answer.row, first : answer.segment.stop] = number
    if axis.size > 1:
        spans = rank_spans(batch.length, axis.size, axis.rank)
        numbers = torch.cat([numbers[:, span.start : span.stop] for span in spans], dim=1)
    numbers = numbers.flatten().to(values_BS.device)
    sums = values_BS.new_zeros(len(answers) + 1).index_add(0, numbers, values_BS.flatten())[:-1]
    return sums if axis.size == 1 else cast(Tensor, _SumOverRanks.apply(sums, axis.group))  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total_N = own_N.clone()
        dist.all_reduce(total_N, group=group)
        return total_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
