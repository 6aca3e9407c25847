"""Paged attention by its definition, one sequence and one query at a time in fp32 (fp64 stays
fp64).

Shapes: T query tokens of all sequences, B sequences, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    cu: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[T, H, Dv]` and the log-sum-exp of each query's scores `[T, H]` (natural; -inf where
    it sees no key).
    """
    dtype = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    heads, kv_heads, page = q_THD.shape[1], k_cache.shape[2], k_cache.shape[1]
    out = torch.zeros(q_THD.shape[0], heads, v_cache.shape[3], dtype=dtype, device=q_THD.device)
    lse = torch.full((q_THD.shape[0], heads), float("-inf"), dtype=dtype, device=q_THD.device)
    for sequence, length in enumerate(lens.tolist()):
        first, last = int(cu[sequence]), int(cu[sequence + 1])
        pages = table[sequence, : -(-length // page)].long()
        keys = _read_rows(k_cache, pages, length, dtype, scales and scales[0])
        values = _read_rows(v_cache, pages, length, dtype, scales and scales[1])
        for token in range(first, last):
            position = length - (last - token)
            start = 0 if window is None else max(0, position - window + 1)
            if position < start:
                continue
            visible = slice(start, position + 1)
            k = keys[visible].repeat_interleave(heads // kv_heads, dim=1)
            v = values[visible].repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("hd,nhd->hn", q_THD[token].to(dtype), k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            lse[token] = scores.logsumexp(-1)
            out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out, lse


def _read_rows(
    cache: Tensor, pages: Tensor, length: int, dtype: torch.dtype, scales: Tensor | None
) -> Tensor:
    """A sequence's rows `[length, G, D]`, times their scales if the cache is quantized."""
    blocks = (
        cache.view(torch.uint8)[pages].view(cache.dtype) if cache.itemsize == 1 else cache[pages]
    )
    rows = blocks.flatten(0, 1)[:length].to(dtype)
    return (
        rows
        if scales is None
        else rows * scales[pages].flatten(0, 1)[:length].to(dtype).unsqueeze(-1)
    )
