"""Causal softmax attention over heads already made: masks, scale and dropout around torch's own kernels.

Does not know projections, positions or caches. Shapes: B batch, S sequence, H heads, D head_dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.models.document_attention import document_attention
from workers.models.documents import Documents


def attend(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    *,
    window: int | None,
    dropout: float = 0.0,
    scale: float | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """`[B, S, H · D of v]`. Fewer key-value heads are shared by groups of query heads (GQA, arXiv 2305.13245).

    `scale` defaults to 1 / sqrt(D of q); a `window` w lets position i see j with i - w < j <= i. Of `documents` packed
    into the sequences a position sees its own alone.
    """
    if documents is not None and not dropout:
        return document_attention(q_BSHD, k_BSHD, v_BSHD, documents, window=window, scale=scale).flatten(-2)
    if documents is not None:
        return _each_alone(q_BSHD, k_BSHD, v_BSHD, documents, window=window, dropout=dropout, scale=scale)
    length = q_BSHD.shape[1]
    windowed = window is not None and length > window
    out = functional.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2),
        k_BSHD.transpose(1, 2),
        v_BSHD.transpose(1, 2),
        attn_mask=_window_mask(length, window, q_BSHD.device) if windowed and window is not None else None,
        dropout_p=dropout,
        is_causal=not windowed,
        scale=scale,
        enable_gqa=k_BSHD.shape[2] != q_BSHD.shape[2],
    )
    return out.transpose(1, 2).flatten(-2)


def _each_alone(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, documents: Documents, **how: Any) -> Tensor:
    """A call for each document, because torch's kernels draw dropout's masks themselves."""
    lines = [x.flatten(0, 1)[None] for x in (q_BSHD, k_BSHD, v_BSHD)]
    parts = [attend(*(x[:, start:stop] for x in lines), **how) for start, stop in pairwise(documents.places)]
    return torch.cat(parts, dim=1).view(*q_BSHD.shape[:2], -1)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where query i may see key j."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)
