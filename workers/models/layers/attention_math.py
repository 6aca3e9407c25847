"""Causal softmax attention of projected heads: by `kernels`, which chooses one, or by the formula.

Does not depend on projections, positions or caches. Shapes: B batch, S sequence, H heads, D
head_dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels import attention
from kernels.dispatch import Candidate, choose, record_choice
from workers.models.layers.document_attention import document_attention
from workers.models.layers.documents import Documents

_MIN_QUERIES = 256  # per chunk of a window: shorter chunks need too many calls


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
    """`[B, S, H · D of v]`; groups of query heads share a key-value head (GQA, arXiv 2305.13245).

    `scale` defaults to 1 / sqrt(D of q). With a `window` w position i sees j with i - w < j <= i.
    With packed `documents` a position sees only its own document.
    """
    if documents is not None and not dropout:
        return document_attention(
            q_BSHD, k_BSHD, v_BSHD, documents, window=window, scale=scale
        ).flatten(-2)
    if documents is not None:
        return _document_by_document(
            q_BSHD, k_BSHD, v_BSHD, documents, window=window, dropout=dropout, scale=scale
        )
    if window is not None and q_BSHD.shape[1] <= window:
        window = None
    if dropout or torch.compiler.is_compiling():
        return _by_torch(q_BSHD, k_BSHD, v_BSHD, window, dropout, scale)
    out = attention(q_BSHD, k_BSHD, v_BSHD, causal=True, window=window, scale=scale)
    assert isinstance(out, Tensor)
    return out.flatten(-2)


def plain_attend(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    *,
    window: int | None,
    dropout: float = 0.0,
    scale: float | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """`attend` with all scores in memory: softmax(mask(scale · q kᵀ)) v (arXiv 1706.03762)."""
    shared = q_BSHD.shape[2] // k_BSHD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSHD.repeat_interleave(shared, 2), v_BSHD))
    v = v.repeat_interleave(shared, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = _window_mask(q.shape[2], window, q.device)
    if documents is not None:
        begins = torch.arange(q.shape[2], device=q.device) - documents.positions()
        seen = seen & (begins[..., :, None] == begins[..., None, :]).unsqueeze(-3)
    shares = scores.masked_fill(~seen, -torch.inf).softmax(
        -1, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    return (functional.dropout(shares.to(q.dtype), dropout) @ v).transpose(1, 2).flatten(-2)


def _by_torch(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    window: int | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """torch's own operator: the only one with dropout, and the only one that torch.compile sees."""
    facts: dict[str, object] = {
        "dtype": q_BSHD.dtype,
        "dropout": bool(dropout),
        "window": window is not None,
    }
    if torch.compiler.is_compiling():
        record_choice("attention", facts, "torch", "torch.compile optimizes torch's operators")
    else:
        choose("attention", facts, [Candidate("own", "no kernel has dropout"), Candidate("torch")])
    heads = q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2), v_BSHD.transpose(1, 2)
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scale,
        "enable_gqa": k_BSHD.shape[2] != q_BSHD.shape[2],
    }
    if window is None:
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, **options)
    else:
        out = _within_window(*heads, window, **options)
    return out.transpose(1, 2).flatten(-2)


def _within_window(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, window: int, **how: Any
) -> Tensor:
    """`[B, H, S, D of v]` by chunks of `window` queries with the keys that they see.

    Avoids masks and scores of the full square: 4096 positions, 4 heads of 64, a window of 512 and
    dropout, forward and backward on one core, take 0.8 s and 0.3 GB instead of 6.9 s and 1.1 GB.
    """
    length, parts = q_BHSD.shape[2], []
    step = max(window, _MIN_QUERIES)
    for first in range(0, length, step):
        until, low = min(length, first + step), max(0, first - window + 1)
        seen = _window_mask(until - low, window, q_BHSD.device)[first - low :]
        heads = q_BHSD[:, :, first:until], k_BHSD[:, :, low:until], v_BHSD[:, :, low:until]
        parts.append(functional.scaled_dot_product_attention(*heads, attn_mask=seen, **how))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _document_by_document(
    q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, documents: Documents, **how: Any
) -> Tensor:
    """One call per document, because torch's kernels generate dropout masks themselves."""
    lines = [x.flatten(0, 1)[None] for x in (q_BSHD, k_BSHD, v_BSHD)]
    parts = [
        attend(*(x[:, start:stop] for x in lines), **how)
        for start, stop in pairwise(documents.places)
    ]
    return torch.cat(parts, dim=1).view(*q_BSHD.shape[:2], -1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """True where query i may see key j, `[S, S]`."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
