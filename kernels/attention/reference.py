"""Attention by its formula, dense, in fp32 (fp64 for fp64): the reference for every kernel.

Holds all scores at once. Shapes: B batch, Q queries, K keys, H heads, G query heads per key-value
head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.spec import AttentionSpec


def reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, D_v] in q's dtype, log-sum-exp [B, H, Q]); zeros and -inf for a query that
    sees no key.
    """
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    group = q.shape[2] // k.shape[2]
    keys = k.to(wide).repeat_interleave(group, dim=2)
    values = v.to(wide).repeat_interleave(group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    visible = visible_QK(q.shape[1], k.shape[1], spec, q.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    unseeing = ~visible.any(-1)
    probabilities = (scores - lse.masked_fill(unseeing, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, values).to(q.dtype), lse


def visible_QK(queries: int, keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """[Q, K] bool: True if a query sees a key; the last query aligns with the last key."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if spec.causal:
        visible &= key <= position
    if spec.window:
        visible &= key > position - spec.window
    return visible
