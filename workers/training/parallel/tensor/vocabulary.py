"""A vocabulary sharded over ranks by rows: the embedding's lookup, and cross-entropy over sharded
logits.

Exact where the number of ranks does not divide the vocabulary: rows lie as `torch.chunk` cuts them,
the last ranks may
hold fewer, or none. Torch's row-wise embedding gives every rank a gradient of the whole table; its
`loss_parallel`
wants the backward pass within its context too, where a pipeline's schedule stands between.
Shapes: N tokens, V vocabulary, of which a rank holds rows `start` to `stop`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from workers.models.layers.head import vocab_rows
from workers.training.parallel.tensor.region import distribute, reduced


class VocabularyRows(ParallelStyle):
    """An embedding of which each rank looks up its own rows; the sum lies in `outside`."""

    def __init__(self, outside: Placement) -> None:
        super().__init__()
        self.outside = outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        distribute(module, "weight", module.weight, Shard(0), device_mesh)
        start, stop = vocab_rows(module.num_embeddings, device_mesh)
        leave = reduced(self.outside)

        def forward(tokens: Tensor) -> Tensor:
            weight: Any = module.weight
            own, foreign = weight.to_local(), (tokens < start) | (tokens >= stop)
            if start == stop:  # nothing to look up, yet a gradient, of no elements
                found = own.sum() + own.new_zeros(*tokens.shape, own.shape[1])
            else:
                found = functional.embedding((tokens - start).masked_fill(foreign, 0), own)
            # a clone, because fully_shard's hooks on an output that is a view are lost with an
            # operation in place
            return leave(found.masked_fill(foreign.unsqueeze(-1), 0.0), device_mesh).clone()

        replaced: Any = module
        replaced.forward = forward
        return module


def cross_entropy(logits: Tensor, targets_N: Tensor, *, ignored: int) -> Tensor:
    """`[N]` fp32: -log softmax of each target, 0 where the target is `ignored`.

    `logits` is a DTensor `[…, V]` sharded over its last dim; every rank gets the same losses,
    computed in fp32 whatever
    the logits' dtype. Two messages: one maximum, then two sums a token.
    """
    sharded: Any = logits
    mesh, vocab = sharded.device_mesh, logits.shape[-1]
    local = sharded.to_local().flatten(0, -2)
    start, stop = vocab_rows(vocab, mesh)
    found = _CrossEntropy.apply(local, targets_N, start, stop, ignored, mesh.get_group())  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


def gather_logits(logits: Tensor, rows: list[int], places: list[int]) -> Tensor:
    """Of `logits` as above, `[B, S, V]`, those of the whole vocabulary at some rows' places:
    `[len(rows), V]`.
    """
    sharded: Any = logits
    shape = torch.Size((len(rows), logits.shape[-1]))
    found = DTensor.from_local(
        sharded.to_local()[rows, places],
        sharded.device_mesh,
        [Shard(1)],
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )
    return found.full_tensor()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        start: int,
        stop: int,
        ignored: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        logits, count = logits_NV.float(), targets_N.shape[0]
        most = logits.amax(1) if stop > start else logits.new_full((count,), float("-inf"))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        shifted = logits - most.unsqueeze(1)
        own = (targets_N >= start) & (targets_N < stop)
        place = (targets_N - start).masked_fill(~own, 0).unsqueeze(1)
        sums = logits.new_zeros(2, count)
        if stop > start:
            sums[0] = shifted.gather(1, place).squeeze(1).masked_fill(~own, 0.0)
            sums[1] = shifted.exp_().sum(1)
        dist.all_reduce(sums, group=group)
        target, total = sums
        ctx.save_for_backward(shifted.div_(total.unsqueeze(1)), place, own, targets_N == ignored)
        ctx.dtype = logits_NV.dtype
        losses: Tensor = (total.log() - target).masked_fill(targets_N == ignored, 0.0)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        softmax, place, own, skipped = ctx.saved_tensors
        scale = gradients[0].masked_fill(skipped, 0.0).unsqueeze(1)
        grad = softmax * scale
        if grad.shape[1]:
            grad.scatter_add_(1, place, -scale * own.unsqueeze(1))
        return grad.to(ctx.dtype), None, None, None, None, None
