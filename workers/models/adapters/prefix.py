"""Attention with trained keys and values before those of the text (prefix tuning, P-tuning v2).

Shapes: B batch, S sequence, H heads, D head_dim, n virtual tokens. Does not depend on rotary
positions: virtual keys are not rotated, and the text's positions begin at n.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from workers.models.layers.documents import Documents


def attend_with_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor],
    *,
    window: int | None,
    dropout: float = 0.0,
    documents: Documents | None = None,
) -> Tensor:
    """`attend` where every query also sees `n` virtual tokens; `[B, S, H D]`.

    `prefix`: keys and values `[H_kv D, n]` (arXiv 2101.00190; 2110.07602).
    """
    batch, length, _, width = q.shape
    keys, values = (
        torch.cat(
            [each.T.to(x.dtype).reshape(each.shape[1], -1, width).expand(batch, -1, -1, -1), x],
            dim=1,
        )
        for each, x in zip(prefix, (k, v), strict=True)
    )
    place = torch.arange(length, device=q.device)
    distance = place[:, None] - place[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if documents is not None:
        begins = place - documents.positions()
        seen = seen & (begins[..., :, None] == begins[..., None, :])
        seen = seen[:, None] if seen.ndim == 3 else seen
    virtual = seen.new_ones((*seen.shape[:-1], keys.shape[1] - length))
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=torch.cat([virtual, seen], dim=-1),
        dropout_p=dropout,
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return out.transpose(1, 2).flatten(-2)
