"""Cross-entropy over full logits whose gradient overwrites the logits: one tensor, not three.

`torch.nn.functional.cross_entropy` saves log-probabilities and allocates two more tensors in its
backward pass; with a vocabulary of 32,000 that is more traffic than all blocks of a small model.
Does not depend on models or sharding. Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# rows per chunk: a chunk stays in the CPU's cache between its passes; a GPU needs large ones
_CHUNK_BYTES = {"cpu": 1 << 21, "cuda": 1 << 28}


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, ignored: int) -> Tensor:
    """`[N]` fp32: -log softmax of each target, 0 if it is `ignored`. Overwrites `logits_NV`, fp32.

    Losses and gradients are those of `functional.cross_entropy` up to rounding.
    """
    losses = _CrossEntropy.apply(logits_NV, targets_N, ignored)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, ignored: int) -> Tensor:
        """Writes the softmax over the logits if a backward pass follows."""
        losses = torch.empty(logits_NV.shape[0], dtype=torch.float32, device=logits_NV.device)
        skipped = targets_N == ignored
        places = targets_N.masked_fill(skipped, 0).unsqueeze(1)
        rows = max(1, _CHUNK_BYTES.get(logits_NV.device.type, 1 << 28) // (4 * logits_NV.shape[1]))
        needs_gradient = ctx.needs_input_grad[0]
        for logits, place, loss in zip(
            *(torch.split(each, rows) for each in (logits_NV, places, losses)), strict=True
        ):
            softmax, largest = logits.softmax(1), logits.amax(1, keepdim=True)
            # the sum of exponentials is one over the largest probability, which is never tiny
            loss.copy_(
                (largest - logits.gather(1, place) - softmax.amax(1, keepdim=True).log()).squeeze(1)
            )
            if needs_gradient:
                logits.copy_(softmax)
        if needs_gradient:
            ctx.save_for_backward(logits_NV, targets_N)
            ctx.ignored = ignored
        return losses.masked_fill_(skipped, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """In place, so a second backward pass is an autograd error."""
        softmax, targets_N = ctx.saved_tensors
        skipped = targets_N == ctx.ignored
        scale = gradients[0].masked_fill(skipped, 0.0).unsqueeze(1)
        softmax.mul_(scale)
        softmax.scatter_add_(1, targets_N.masked_fill(skipped, 0).unsqueeze(1), -scale)
        return softmax, None, None
