"""One tensor-parallel rank's block: its heads and its share of the MLP's width, collectives
replaced by their shapes.

A gathered sequence is as many copies of the rank's part, a scattered one its first part: bytes are
the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.orchestrator.planner.model.activations.blocks import (
    Attention,
    Block,
    Mlp,
    Rotary,
    Style,
    drop,
)
from workers.contracts.specs.model import ModelSpec


class GatheredLinear(torch.autograd.Function):
    """Gathers the sequence, multiplies, and keeps the rank's part alone, as Megatron-LM's
    column-split linear.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, ranks: int) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.ranks = ranks
        return functional.linear(torch.cat([part] * ranks, 1), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        part, weight = ctx.saved_tensors
        whole = torch.cat([part] * ctx.ranks, 1).flatten(0, 1)
        to_part = (grads[0] @ weight).narrow(1, 0, part.shape[1])
        return to_part, grads[0].flatten(0, 1).T @ whole, None


class Column(nn.Linear):
    ranks = 1

    def forward(self, x: Tensor) -> Tensor:
        return GatheredLinear.apply(x, self.weight, self.ranks)


class RankBlock(Block):
    """`[B, S / ranks, hidden]` in and out with sequence parallelism, else `[B, S, hidden]`."""

    def __init__(
        self, spec: ModelSpec, style: Style, ranks: int, *, sequence: bool, regathers: bool
    ) -> None:
        share = spec.model_copy(
            update={
                "heads": spec.heads // ranks,
                "kv_heads": max(1, spec.kv_heads // ranks),
                "bias": "none",
            }
        )
        super().__init__(spec, style, Attention(share, style), Mlp(share, style, spec.ffn // ranks))
        self.ranks, self.sequence, self.regathers = ranks, sequence, regathers
        if sequence and regathers:
            for module in (self.attn.q, self.attn.k, self.attn.v, self.mlp.gate, self.mlp.up):
                if module is not None:
                    module.__class__, module.ranks = Column, ranks

    def forward(self, x: Tensor, rope: Rotary) -> Tensor:
        x = x + drop(
            self._scattered(self.attn(self._gathered(self.attn_norm(x)), rope)),
            self.dropout,
            self.style,
        )
        return x + drop(
            self._scattered(self.mlp(self._gathered(self.mlp_norm(x)))), self.dropout, self.style
        )

    def _gathered(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.ranks, 1) if self.sequence and not self.regathers else x

    def _scattered(self, x: Tensor) -> Tensor:
        return x.narrow(1, 0, x.shape[1] // self.ranks) if self.sequence else x
