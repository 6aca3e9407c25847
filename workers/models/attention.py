"""Causal softmax attention with grouped key-value heads, optional QK norm, biases and a sliding window.

Does not know caches or parallelism. Shapes: B batch, S sequence, H heads, D head_dim.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.model import ModelSpec
from workers.models.rope import apply_rope


class Attention(nn.Module):
    """`[B, S, hidden]` → `[B, S, hidden]`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = spec.head_dim, spec.heads, spec.kv_heads
        self.window, self.dropout, self.interleaved = spec.window, spec.dropout, spec.rope.interleaved
        qkv_bias = spec.bias != "none"
        self.q = nn.Linear(spec.hidden, spec.heads * spec.head_dim, bias=qkv_bias)
        self.k = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=qkv_bias)
        self.v = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=qkv_bias)
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.bias == "all")
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, *rope, self.interleaved), apply_rope(k, *rope, self.interleaved)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self._window_mask(x),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.window is None or x.shape[1] <= self.window,
            enable_gqa=self.kv_heads != self.heads,
        )
        return cast(Tensor, self.o(out.transpose(1, 2).flatten(-2)))

    def _window_mask(self, x: Tensor) -> Tensor | None:
        """True where query i may see key j: i - window < j <= i; None where plain causal says the same."""
        length = x.shape[1]
        if self.window is None or length <= self.window:
            return None
        distance = torch.arange(length, device=x.device)[:, None] - torch.arange(length, device=x.device)[None, :]
        return (distance >= 0) & (distance < self.window)
