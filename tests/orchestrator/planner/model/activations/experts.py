"""A mixture of experts without dropping, loads balanced so that shapes are known: Mixtral's and
DeepSeek's kind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.orchestrator.planner.model.activations.blocks import Mlp, Style
from workers.contracts.specs.model import ModelSpec


class Experts(nn.Module):
    """Routed experts: sort tokens by expert, compute, weight, unsort; shared experts."""

    def __init__(self, spec: ModelSpec, style: Style) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe = spec.moe
        self.router = nn.Linear(spec.hidden, spec.moe.experts, bias=False)
        self.experts = nn.ModuleList(
            Mlp(spec, style, spec.moe.expert_ffn) for _ in range(spec.moe.experts)
        )
        self.shared = Mlp(spec, style, spec.moe.shared_width) if spec.moe.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens).float()
        scores = logits.sigmoid() if self.moe.scoring == "sigmoid" else logits.softmax(-1)
        weights, chosen = scores.topk(self.moe.top_k, -1)
        if self.moe.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort()
        home = order // self.moe.top_k
        parts = tokens[home].chunk(self.moe.experts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out = out * weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        mixed = out[order.argsort()].unflatten(0, (-1, self.moe.top_k)).sum(1).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)
