"""A vocabulary sharded over ranks by rows: embedding lookup, and cross-entropy of sharded logits.

Exact for any number of ranks: rows are split as `torch.chunk` does, so the last ranks may have
fewer, or none. Torch's row-wise embedding gives every rank a gradient of the full table; its
`loss_parallel` needs the backward pass inside its context, which a pipeline schedule prevents.
Shapes: N tokens, V vocabulary, of which a rank has rows `start` to `stop`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional

from workers.models.layers.head import vocab_rows
from workers.models.linear_variants import variant_of
from workers.training.parallel.tensor.region import Redistribute, distribute, reduced


class ShardedEmbedding(nn.Embedding):
    """An embedding of which each rank looks up its rows `start` to `stop`; `leave` sums."""

    mesh: DeviceMesh
    start: int
    stop: int
    leave: Redistribute

    def forward(self, input: Tensor) -> Tensor:
        """Token ids `[B, S]` → `[B, S, hidden]`, redistributed."""
        weight: Any = self.weight
        own, foreign = weight.to_local(), (input < self.start) | (input >= self.stop)
        if self.start == self.stop:  # no rows, but a gradient, of no elements
            rows = own.sum() + own.new_zeros(*input.shape, own.shape[1])
        else:
            rows = functional.embedding((input - self.start).masked_fill(foreign, 0), own)
        # a clone: an in-place operation would drop fully_shard's hooks on an output that is a view
        return self.leave(rows.masked_fill(foreign.unsqueeze(-1), 0.0), self.mesh).clone()


def shard_embedding(
    embedding: nn.Embedding, outside: Placement, mesh: DeviceMesh
) -> ShardedEmbedding:
    """The embedding with its rows sharded over `mesh` and its output in `outside`."""
    distribute(embedding, "weight", embedding.weight, Shard(0), mesh)
    start, stop = vocab_rows(embedding.num_embeddings, mesh)
    return variant_of(
        embedding, ShardedEmbedding, mesh=mesh, start=start, stop=stop, leave=reduced(outside)
    )


def cross_entropy(logits: Tensor, targets_N: Tensor, *, ignored: int) -> Tensor:
    """`[N]` fp32: -log softmax of each target, 0 if the target is `ignored`.

    `logits` is a DTensor `[…, V]` sharded over its last dim; every rank gets the same losses,
    computed in fp32. Two all-reduces: one maximum, then two sums per token.
    """
    sharded: Any = logits
    mesh, vocab = sharded.device_mesh, logits.shape[-1]
    local = sharded.to_local().flatten(0, -2)
    start, stop = vocab_rows(vocab, mesh)
    losses = _CrossEntropy.apply(local, targets_N, start, stop, ignored, mesh.get_group())  # type: ignore[no-untyped-call]
    return cast(Tensor, losses)


def gather_logits(logits: Tensor, rows: list[int], columns: list[int]) -> Tensor:
    """Full-vocabulary logits `[len(rows), V]` at (row, column) of sharded `[B, S, V]`."""
    sharded: Any = logits
    shape = torch.Size((len(rows), logits.shape[-1]))
    selected = DTensor.from_local(
        sharded.to_local()[rows, columns],
        sharded.device_mesh,
        [Shard(1)],
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )
    return selected.full_tensor()


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
