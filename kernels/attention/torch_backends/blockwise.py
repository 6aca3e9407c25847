"""Attention in plain torch operations, block by block: memory grows linearly with the length.

Used if no faster kernel can run (a softcap on a CPU, odd dtypes). Online softmax forward,
recomputation backward, any device. Shapes: B batch, Hk key-value heads, R rows (query heads of a
group × queries of a block), N keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.attention.spec import AttentionSpec

_QUERIES = 256
_KEYS = 512  # with 256 queries: 0.5 MiB of scores per head


def blockwise(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, D_v], log-sum-exp [B, H, Q]) of [B, S, H, D] tensors; both have gradients."""
    out, lse = _Blockwise.apply(q, k, v, spec)
    return out, lse


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, spec)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None and grad_lse is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(q, k, v, out, lse, grad, grad_lse, ctx.spec), None


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    wide = _wide(q)
    batch, queries, heads, _ = q.shape
    out = q.new_zeros(batch, queries, heads, v.shape[-1])
    lse = torch.full((batch, heads, queries), -torch.inf, dtype=wide, device=q.device)
    for a, b in _ranges(0, queries, _QUERIES):
        rows = _rows(q[:, a:b], k.shape[2], wide)
        top = rows.new_full((*rows.shape[:3], 1), -torch.inf)
        total = torch.zeros_like(top)
        acc = rows.new_zeros(*rows.shape[:3], v.shape[-1])
        for lo, hi in _ranges(*_visible_range(a, b, queries, k.shape[1], spec), _KEYS):
            scores, _ = _scores(rows, k, a, b, queries, lo, hi, spec)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == -torch.inf, 0.0)
            probabilities = scores.sub_(base).exp_()
            fade = (top - base).exp_()
            total = total * fade + probabilities.sum(-1, keepdim=True)
            acc = acc.mul_(fade).add_(probabilities @ _columns(v, lo, hi, wide))
            top = higher
        out[:, a:b] = _unrows(acc / total.masked_fill(total == 0, 1.0), heads).to(q.dtype)
        lse[:, :, a:b] = (top + total.log()).unflatten(2, (-1, b - a)).flatten(1, 2).squeeze(-1)
    return out, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor | None,
    grad_lse: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(q)
    queries, kv_heads = q.shape[1], k.shape[2]
    dq = torch.zeros_like(q)
    dk = torch.zeros((k.shape[0], kv_heads, k.shape[1], k.shape[3]), dtype=wide, device=k.device)
    dv = torch.zeros((v.shape[0], kv_heads, v.shape[1], v.shape[3]), dtype=wide, device=v.device)
    if grad is None:
        grad = torch.zeros_like(out)
    for a, b in _ranges(0, queries, _QUERIES):
        rows, d_out = _rows(q[:, a:b], kv_heads, wide), _rows(grad[:, a:b], kv_heads, wide)
        loss = (d_out * _rows(out[:, a:b], kv_heads, wide)).sum(-1, keepdim=True)
        if grad_lse is not None:
            loss = loss - _per_row(grad_lse[:, :, a:b], kv_heads)
        base = _per_row(lse[:, :, a:b], kv_heads)
        base = base.masked_fill(base == -torch.inf, torch.inf)
        d_rows = torch.zeros_like(rows)
        for lo, hi in _ranges(*_visible_range(a, b, queries, k.shape[1], spec), _KEYS):
            scores, capped = _scores(rows, k, a, b, queries, lo, hi, spec, keep_capped=True)
            probabilities = scores.sub_(base).exp_()
            dv[:, :, lo:hi] += probabilities.mT @ d_out
            slope = probabilities.mul_(d_out @ _columns(v, lo, hi, wide).mT - loss)
            if capped is not None:
                slope *= 1 - capped * capped
            slope *= spec.scale
            d_rows += slope @ _columns(k, lo, hi, wide)
            dk[:, :, lo:hi] += slope.mT @ rows
        dq[:, a:b] = _unrows(d_rows, q.shape[2]).to(q.dtype)
    return dq, dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _scores(
    rows: Tensor,
    k: Tensor,
    a: int,
    b: int,
    queries: int,
    lo: int,
    hi: int,
    spec: AttentionSpec,
    keep_capped: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, Hk, R, N] of queries a..b and keys lo..hi, -inf if masked; and tanh(score / cap)
    if capped, which is overwritten unless `keep_capped`.
    """
    scores = rows @ _columns(k, lo, hi, rows.dtype).mT
    capped = None
    if spec.softcap:
        capped = scores.mul_(spec.scale / spec.softcap).tanh_()
        scores = capped * spec.softcap if keep_capped else capped.mul_(spec.softcap)
    else:
        scores *= spec.scale
    shift = k.shape[1] - queries
    if spec.causal and (hi - 1 > a + shift or (spec.window and lo <= b - 1 + shift - spec.window)):
        position = torch.arange(a + shift, b + shift, device=rows.device)[:, None]
        key = torch.arange(lo, hi, device=rows.device)[None, :]
        hidden = key > position
        if spec.window:
            hidden |= key <= position - spec.window
        scores.unflatten(2, (-1, b - a)).masked_fill_(hidden, -torch.inf)
    return scores, capped


def _visible_range(a: int, b: int, queries: int, keys: int, spec: AttentionSpec) -> tuple[int, int]:
    """The range of keys that any of the queries a..b sees."""
    if not spec.causal:
        return 0, keys
    shift = keys - queries
    low = max(0, a + shift - spec.window + 1) if spec.window else 0
    return low, max(low, min(keys, b + shift))


def _ranges(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    return ((x, min(x + step, high)) for x in range(low, high, step))


def _rows(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[B, queries, H, D] -> [B, Hk, group · queries, D]: one matrix product per key-value head
    serves its group.
    """
    return torch.unflatten(x.to(dtype).transpose(1, 2), 1, (kv_heads, -1)).flatten(2, 3)


def _unrows(x: Tensor, heads: int) -> Tensor:
    return torch.unflatten(x, 2, (heads // x.shape[1], -1)).flatten(1, 2).transpose(1, 2)


def _per_row(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, queries] -> [B, Hk, group · queries, 1]."""
    return torch.unflatten(x, 1, (kv_heads, -1)).flatten(2, 3).unsqueeze(-1)


def _columns(x: Tensor, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
    return x[:, lo:hi].transpose(1, 2).to(dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
