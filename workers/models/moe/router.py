"""Routing of tokens to experts with weights: softmax or sigmoid scores, groups, a balancing bias.

Does not depend on experts, losses or parallelism. Shapes: B batch, S sequence, E experts, K experts
per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import Moe
from workers.models.layers.operations import KernelOperations


class Router(nn.Module):
    """`[B, S, hidden]` → weights `[B, S, K]`, experts `[B, S, K]` and scores `[B, S, E]`, weights
    and scores in fp32.

    Outside training the scores are not needed and are empty if a kernel computes the routing.

    The bias (`choice_bias`, DeepSeek-V3's e_score_correction_bias, arXiv 2408.15664) affects only
    the choice of experts, not the weights; it is a buffer that the training loop updates.
    """

    operations: type[KernelOperations] = KernelOperations
    choice_bias: Tensor | None

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        self.register_buffer("choice_bias", torch.zeros(moe.experts) if moe.bias_update else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, experts and scores of each token."""
        # always in fp32: rounded logits would change the choice of experts
        logits = functional.linear(x.float(), self.weight.float())
        routed = self.operations.routed(logits, self.moe, self.choice_bias)
        if routed is not None and not (self.training and torch.is_grad_enabled()):
            return *routed, logits[..., :0]
        scores = logits.softmax(-1) if self.moe.scoring == "softmax" else logits.sigmoid()
        if routed is not None:
            return *routed, scores
        with torch.no_grad():
            chosen = self._choose(scores)
        weights = scores.gather(-1, chosen)
        if self.moe.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.moe.routed_scale, chosen, scores

    def _choose(self, scores: Tensor) -> Tensor:
        preference = scores if self.choice_bias is None else scores + self.choice_bias
        if self.moe.groups is not None:
            preference = preference.masked_fill(~self._group_mask(preference), float("-inf"))
        return preference.topk(self.moe.top_k, dim=-1).indices

    def _group_mask(self, preference: Tensor) -> Tensor:
        """True for experts of the best groups.

        Groups are ranked by their best expert (DeepSeek-V2, softmax scores) or by the sum of their
        best two (DeepSeek-V3, sigmoid scores).
        """
        groups = self.moe.groups or 1
        grouped = preference.reshape(*preference.shape[:-1], groups, -1)
        best = min(2 if self.moe.scoring == "sigmoid" else 1, grouped.shape[-1])
        selected = (
            grouped.topk(best, dim=-1)
            .values.sum(-1)
            .topk(self.moe.groups_per_token or groups, dim=-1)
            .indices
        )
        mask = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=preference.device).scatter(
            -1, selected, True
        )
        return mask.unsqueeze(-1).expand_as(grouped).flatten(-2)
