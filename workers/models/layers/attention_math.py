"""Causal softmax attention over heads already made: by `kernels`, which chooses what runs, or as
the formula stands.

Does not know projections, positions or caches. Shapes: B batch, S sequence, H heads, D head_dim.
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

_FEWEST_QUERIES = 256  # of a window's pieces: shorter ones cost more calls than they save


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
    """`[B, S, H · D of v]`. Fewer key-value heads are shared by groups of query heads (GQA, arXiv
    2305.13245).

    `scale` defaults to 1 / sqrt(D of q); a `window` w lets position i see j with i - w < j <= i. Of
    `documents` packed
    into the sequences a position sees its own alone.
    """
    if documents is not None and not dropout:
        return document_attention(
            q_BSHD, k_BSHD, v_BSHD, documents, window=window, scale=scale
        ).flatten(-2)
    if documents is not None:
        return _each_alone(
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
    """`attend` with every score in memory: softmax(scale · q kᵀ where seen) v (arXiv 1706.03762,
    eq. 1).
    """
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
    """torch's own call, by whichever of its kernels it picks: no other drops, no other is seen by
    torch.compile.
    """
    facts: dict[str, object] = {
        "dtype": q_BSHD.dtype,
        "dropout": bool(dropout),
        "window": window is not None,
    }
    if torch.compiler.is_compiling():
        record_choice("attention", facts, "torch", "torch.compile sees torch's operators")
    else:
        choose("attention", facts, [Candidate("own", "no kernel drops"), Candidate("torch")])
    heads = q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2), v_BSHD.transpose(1, 2)
    how: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scale,
        "enable_gqa": k_BSHD.shape[2] != q_BSHD.shape[2],
    }
    if window is None:
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, **how)
    else:
        out = _within_window(*heads, window, **how)
    return out.transpose(1, 2).flatten(-2)


def _within_window(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, window: int, **how: Any
) -> Tensor:
    """`[B, H, S, D of v]`, a window's queries at a time with the keys that they see: neither a mask
    nor scores of the
    whole square. Of 4096 positions, 4 heads of 64, a window of 512 and dropout, forward and
    backward on one core: 0.8 s
    and 0.3 GB, where one call takes 6.9 s and 1.1 GB."""
    length, parts = q_BHSD.shape[2], []
    step = max(window, _FEWEST_QUERIES)
    for first in range(0, length, step):
        until, low = min(length, first + step), max(0, first - window + 1)
        seen = _window_mask(until - low, window, q_BHSD.device)[first - low :]
        given = q_BHSD[:, :, first:until], k_BHSD[:, :, low:until], v_BHSD[:, :, low:until]
        parts.append(functional.scaled_dot_product_attention(*given, attn_mask=seen, **how))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _each_alone(
    q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, documents: Documents, **how: Any
) -> Tensor:
    """A call for each document, because torch's kernels draw dropout's masks themselves."""
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
