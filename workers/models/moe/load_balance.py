"""Keeping experts evenly loaded: the auxiliary loss and the load counters of one layer.

Does not know routing or steps. Shapes: B batch, S sequence, K chosen a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import Moe


class Balance(nn.Module):
    """Passes a layer's output through; its backward pass counts loads and adds the auxiliary loss's
    gradient.

    The backward pass, because it runs once a micro-batch where a recomputed forward pass runs
    twice, and runs in
    whatever stage of a pipeline the layer stands. Does nothing outside training.
    """

    def __init__(self, moe: Moe) -> None:
        super().__init__()
        self.experts, self.coefficient = moe.experts, moe.aux_loss
        self.gradient_scale = 0.0
        # settable: from the assignments counted here, `[B, E]`, to those of the whole sequences
        self.whole_counts: Callable[[Tensor], Tensor] = lambda assigned_BE: assigned_BE
        self.told: Tensor | None = None  # E loads and the summed auxiliary loss, since last taken

    def forward(self, out: Tensor, scores_BSE: Tensor, chosen_BSK: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return out
        assigned_BE = functional.one_hot(chosen_BSK, self.experts).sum((1, 2))
        whole_BE = self.whole_counts(assigned_BE)
        loss = balance_loss(scores_BSE, whole_BE, top_k=chosen_BSK.shape[2]) * self.coefficient
        passed: Tensor = _Through.apply(out, loss, assigned_BE.sum(0), self)  # type: ignore[no-untyped-call]
        return passed

    def add(self, loads_E: Tensor, loss: Tensor) -> None:
        told = torch.cat((loads_E.double(), loss.double().reshape(1)))
        self.told = told if self.told is None else self.told + told


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, loads_E: Tensor, balance: Balance) -> Tensor:
        ctx.loss, ctx.loads_E, ctx.balance = loss.detach(), loads_E, balance
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.balance.add(ctx.loads_E, ctx.loss)
        return gradients[0], torch.full_like(ctx.loss, ctx.balance.gradient_scale), None, None


def balance_loss(scores_BSE: Tensor, assigned_BE: Tensor, *, top_k: int) -> Tensor:
    """Sum over sequences of Σ_e f_e · P_e (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20), before its
    coefficient.

    f_e is the share of a sequence's assignments times E, P_e its mean normalised score: 1 when
    balanced. By sequence,
    so that a batch's loss is the same however it is spread over ranks and micro-batches. Of scores
    that are a part of
    their sequences, with assignments of the whole, it gives what that part adds to the sum.
    """
    total_B1 = assigned_BE.sum(1, keepdim=True)
    share_BE = assigned_BE * (assigned_BE.shape[1] / total_B1)
    mean_BE = (scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)).sum(1) * (top_k / total_B1)
    return (share_BE * mean_BE).sum()
