"""Cross-entropy over whole logits whose gradient takes the logits' own memory: one tensor of their
size, not three.

`torch.nn.functional.cross_entropy` keeps log-probabilities and makes two more tensors in its
backward pass; with a
vocabulary of 32,000 that is more traffic than all blocks of a small model. Does not know models, or
sharded logits.
Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# rows are done a piece at a time that stays in the cache between its passes; a GPU wants large ones
_PIECE_BYTES = {"cpu": 1 << 21, "cuda": 1 << 28}


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, ignored: int) -> Tensor:
    """`[N]` fp32: -log softmax of each target, 0 where the target is `ignored`. `logits_NV` is fp32
    and used up.

    Losses and gradients are those of `functional.cross_entropy` to rounding.
    """
    found = _CrossEntropy.apply(logits_NV, targets_N, ignored)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, ignored: int) -> Tensor:
        """Leaves the softmax where the logits were, if a backward pass is to come."""
        losses = torch.empty(logits_NV.shape[0], dtype=torch.float32, device=logits_NV.device)
        skipped = targets_N == ignored
        places = targets_N.masked_fill(skipped, 0).unsqueeze(1)
        rows = max(1, _PIECE_BYTES.get(logits_NV.device.type, 1 << 28) // (4 * logits_NV.shape[1]))
        learns = ctx.needs_input_grad[0]
        for logits, place, loss in zip(
            *(torch.split(each, rows) for each in (logits_NV, places, losses)), strict=True
        ):
            softmax, largest = logits.softmax(1), logits.amax(1, keepdim=True)
            # the sum of exponentials is one over the largest probability, which is never tiny
            loss.copy_(
                (largest - logits.gather(1, place) - softmax.amax(1, keepdim=True).log()).squeeze(1)
            )
            if learns:
                logits.copy_(softmax)
        if learns:
            ctx.save_for_backward(logits_NV, targets_N)
            ctx.ignored = ignored
        return losses.masked_fill_(skipped, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """In place, so that a second backward pass is an error of autograd's."""
        softmax, targets_N = ctx.saved_tensors
        skipped = targets_N == ctx.ignored
        scale = gradients[0].masked_fill(skipped, 0.0).unsqueeze(1)
        softmax.mul_(scale)
        softmax.scatter_add_(1, targets_N.masked_fill(skipped, 0).unsqueeze(1), -scale)
        return softmax, None, None
