"""Attention through low ranks: MLA (DeepSeek-V2, arXiv 2405.04434) and MFA (arXiv 2412.19255), as
trained.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from tests.orchestrator.planner.model.activations.blocks import Core, RmsNorm, Rotary, Style
from workers.contracts.specs.model import ModelSpec
from workers.models.layers.rope import apply_rope


class Mla(nn.Module):
    """Keys and values are expanded from the latent; one rotary key is shared by all heads."""

    def __init__(self, spec: ModelSpec, style: Style) -> None:
        super().__init__()
        assert spec.mla is not None
        self.heads, self.mla = spec.heads, spec.mla
        mla, query = spec.mla, spec.heads * (spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim)
        if mla.q_lora_rank:
            self.q_down = nn.Linear(spec.hidden, mla.q_lora_rank, bias=False)
            self.q_norm = RmsNorm(mla.q_lora_rank, style)
        self.q_up = nn.Linear(mla.q_lora_rank or spec.hidden, query, bias=False)
        self.kv_down = nn.Linear(spec.hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_norm = RmsNorm(mla.kv_lora_rank, style)
        self.kv_up = nn.Linear(
            mla.kv_lora_rank, spec.heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False
        )
        self.o = nn.Linear(spec.heads * mla.v_head_dim, spec.hidden, bias=False)
        self.core = Core(spec, style)

    def forward(self, x: Tensor, rope: Rotary) -> Tensor:
        assert rope is not None
        mla, heads = self.mla, (self.heads, -1)
        q = self.q_up(self.q_norm(self.q_down(x)) if mla.q_lora_rank else x).unflatten(-1, heads)
        plain, turned = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        q = torch.cat([plain, apply_rope(turned, *rope, True)], -1)
        latent, shared = self.kv_down(x).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, heads)
        plain, v = kv.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        turned = apply_rope(shared.unsqueeze(2), *rope, True).expand(-1, -1, self.heads, -1)
        k = torch.cat([plain, turned], -1)
        # a view would keep the keys' part of the up-projection's output alive
        return cast(
            Tensor,
            self.o(self.core(q.transpose(1, 2), k.transpose(1, 2), v.contiguous().transpose(1, 2))),
        )


class Mfa(nn.Module):
    """Many query heads from a low rank, one key and value head."""

    def __init__(self, spec: ModelSpec, style: Style) -> None:
        super().__init__()
        assert spec.mfa is not None
        self.width, mfa = spec.mfa.head_dim, spec.mfa
        self.q_down = nn.Linear(spec.hidden, mfa.qk_rank, bias=False)
        self.q_norm = RmsNorm(mfa.qk_rank, style)
        self.q_up = nn.Linear(mfa.qk_rank, mfa.heads * mfa.head_dim, bias=False)
        self.k, self.v = (nn.Linear(spec.hidden, mfa.head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(mfa.heads * mfa.head_dim, spec.hidden, bias=False)
        self.core = Core(spec, style)

    def forward(self, x: Tensor, rope: Rotary) -> Tensor:
        assert rope is not None
        q = self.q_up(self.q_norm(self.q_down(x)))
        q, k, v = (each.unflatten(-1, (-1, self.width)) for each in (q, self.k(x), self.v(x)))
        q, k = apply_rope(q, *rope, False), apply_rope(k, *rope, False)
        return cast(
            Tensor, self.o(self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))
        )
