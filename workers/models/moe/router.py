"""Which experts each token goes to, with what weight: softmax or sigmoid scores, groups, a
balancing bias.

Does not know experts, losses or parallelism. Shapes: B batch, S sequence, E experts, K chosen a
token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import Moe
from workers.models.layers.operations import Chosen


class Router(nn.Module):
    """`[B, S, hidden]` → weights `[B, S, K]`, experts `[B, S, K]` and scores `[B, S, E]`, weights
    and scores in fp32.

    Outside training, where nobody balances by them, a kernel that makes weights and choice leaves
    the scores empty.

    The bias (`choice_bias`, DeepSeek-V3's e_score_correction_bias, arXiv 2408.15664) decides the
    choice alone, never
    the weight; it is state that the training loop moves, not a parameter.
    """

    operations: type[Chosen] = Chosen
    choice_bias: Tensor | None

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        self.register_buffer("choice_bias", torch.zeros(moe.experts) if moe.bias_update else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # in fp32 whatever the model computes in: rounded logits flip choices
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
        wanted = scores if self.choice_bias is None else scores + self.choice_bias
        if self.moe.groups is not None:
            wanted = wanted.masked_fill(~self._groups_kept(wanted), float("-inf"))
        return wanted.topk(self.moe.top_k, dim=-1).indices

    def _groups_kept(self, wanted: Tensor) -> Tensor:
        """True for experts of the best groups: by their best expert (DeepSeek-V2, softmax scores),
        or by the sum of
        their best two (DeepSeek-V3, sigmoid scores)."""
        groups = self.moe.groups or 1
        grouped = wanted.reshape(*wanted.shape[:-1], groups, -1)
        best = min(2 if self.moe.scoring == "sigmoid" else 1, grouped.shape[-1])
        kept = (
            grouped.topk(best, dim=-1)
            .values.sum(-1)
            .topk(self.moe.groups_per_token or groups, dim=-1)
            .indices
        )
        mask = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=wanted.device).scatter(
            -1, kept, True
        )
        return mask.unsqueeze(-1).expand_as(grouped).flatten(-2)
