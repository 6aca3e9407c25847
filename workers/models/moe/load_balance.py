"""Load balancing of experts: the auxiliary loss and the load counters of one layer.

Does not depend on routing or steps. Shapes: B batch, S sequence, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import Moe


class LoadBalance(nn.Module):
    """Identity whose backward pass counts loads and adds the auxiliary loss's gradient.

    The backward pass runs once per micro-batch, also if the forward pass is recomputed, and in the
    pipeline stage of the layer. Does nothing outside training.
    """

    def __init__(self, moe: Moe) -> None:
        super().__init__()
        self.experts, self.coefficient = moe.experts, moe.aux_loss
        self.gradient_scale = 0.0
        # replaceable: from the assignments counted here, `[B, E]`, to those of full sequences
        self.whole_counts: Callable[[Tensor], Tensor] = lambda assigned_BE: assigned_BE
        self.recorded: Tensor | None = (
            None  # E loads and the summed auxiliary loss since the last `take`
        )

    def forward(self, out: Tensor, scores_BSE: Tensor, chosen_BSK: Tensor) -> Tensor:
        """`out` itself; records loads of `chosen_BSK` in the backward pass."""
        if not (self.training and torch.is_grad_enabled()):
            return out
        assigned_BE = functional.one_hot(chosen_BSK, self.experts).sum((1, 2))
        whole_BE = self.whole_counts(assigned_BE)
        loss = balance_loss(scores_BSE, whole_BE, top_k=chosen_BSK.shape[2]) * self.coefficient
        passed: Tensor = _Through.apply(out, loss, assigned_BE.sum(0), self)  # type: ignore[no-untyped-call]
        return passed

    def add(self, loads_E: Tensor, loss: Tensor) -> None:
        """Add loads and the auxiliary loss of one micro-batch."""
        statistics = torch.cat((loads_E.double(), loss.double().reshape(1)))
        self.recorded = statistics if self.recorded is None else self.recorded + statistics


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, loss: Tensor, loads_E: Tensor, balance: LoadBalance
    ) -> Tensor:
        ctx.loss, ctx.loads_E, ctx.balance = loss.detach(), loads_E, balance
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.balance.add(ctx.loads_E, ctx.loss)
        return gradients[0], torch.full_like(ctx.loss, ctx.balance.gradient_scale), None, None


def balance_loss(scores_BSE: Tensor, assigned_BE: Tensor, *, top_k: int) -> Tensor:
    """Sum over sequences of Σ_e f_e · P_e (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20), before its
    coefficient.

    f_e is the share of a sequence's assignments times E, P_e its mean normalized score: 1 if
    balanced. It is computed per sequence, so it does not depend on how a batch is distributed over
    ranks and micro-batches. For scores of a part of each sequence, with assignments of the full
    sequence, it is that part's contribution to the sum.
    """
    total_B1 = assigned_BE.sum(1, keepdim=True)
    share_BE = assigned_BE * (assigned_BE.shape[1] / total_B1)
    mean_BE = (scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)).sum(1) * (top_k / total_B1)
    return (share_BE * mean_BE).sum()
