"""Paged attention with torch's kernels: gathers pages of similar sequences, then runs one fused
attention.

Used on a CPU. Groups come from the plan. Shapes: n sequences, S queries, L keys, G kv heads, R
query heads per kv head, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.paged_kv.page_plan import Group, PagePlan, visible_keys

MAX_MASK_ELEMENTS = 1 << 22
"""Largest mask: a long prefill's queries are processed in chunks, so memory is linear in the
length.
"""


def gather_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    plan: PagePlan,
    *,
    values: int,
    scale: float,
    window: int | None,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """`[T, H, values]` in q's dtype; queries that see no key give zeros.

    Without a v_cache the values are the first columns of the keys (latent attention).
    """
    out: Tensor | None = None
    # 500x slower on CPU
    dtype = torch.float32 if q_THD.dtype == torch.float16 and not q_THD.is_cuda else q_THD.dtype
    for group in plan.groups(window):
        q = q_THD if group.tokens is None else q_THD.index_select(0, group.tokens)
        k = _read_pages("k", k_cache, plan, group, dtype, scales and scales[0])
        v = (
            k[..., :values]
            if v_cache is None
            else _read_pages("v", v_cache, plan, group, dtype, scales and scales[1])
        )
        if group.queries == 1 or group.visible is not None:
            result = _attend_grouped(q.to(dtype), k, v, group, scale, softcap)
        else:
            result = _attend_single(q.to(dtype), k, v, group, scale, softcap, window)
        if group.tokens is None:
            return result.to(q_THD.dtype)
        if out is None:
            out = q_THD.new_zeros(*q_THD.shape[:2], values)
        out.index_copy_(0, group.tokens, result.to(q_THD.dtype))
    return out if out is not None else q_THD.new_zeros(*q_THD.shape[:2], values)


def _read_pages(
    role: str,
    cache: Tensor,
    plan: PagePlan,
    group: Group,
    dtype: torch.dtype,
    scales: Tensor | None,
) -> Tensor:
    """`[n, L, G, D]`: a view if a single sequence's blocks are consecutive, else a copy."""
    rows = _gather_pages(role, cache, plan, group)
    if scales is not None:
        rows = rows.to(dtype) * _gather_pages(role + " scales", scales, plan, group).to(
            dtype
        ).unsqueeze(-1)
    elif rows.dtype != dtype:
        rows = rows.to(dtype)
    if group.padding is not None:  # unwritten cache rows may hold NaN, which no mask removes
        rows.flatten(0, 1).index_fill_(0, group.padding, 0.0)
    return rows[:, group.skip : group.skip + group.length]


def _gather_pages(role: str, cache: Tensor, plan: PagePlan, group: Group) -> Tensor:
    if cache.dtype == torch.float8_e4m3fn:  # as bytes: not every torch device indexes e4m3
        return _gather_pages(role, cache.view(torch.uint8), plan, group).view(cache.dtype)
    blocks, page = cache.shape[:2]
    count = len(group.pages)
    if group.consecutive is not None and cache.is_contiguous():
        return cache[group.consecutive : group.consecutive + count].view(
            1, count * page, *cache.shape[2:]
        )
    if cache.is_contiguous():  # copies whole blocks: 3x faster than indexing
        flat = cache.view(blocks, -1)
        if torch.is_grad_enabled() and cache.requires_grad:
            rows_taken = flat.index_select(0, group.pages)
        else:
            rows_taken = torch.index_select(
                flat, 0, group.pages, out=plan.scratch(role, cache, count, flat.shape[1])
            )
    else:
        rows_taken = cache[group.pages]
    return rows_taken.view(group.sequences, count // group.sequences * page, *cache.shape[2:])


def _attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float, softcap: float
) -> Tensor:
    """Query heads of a kv head and queries of a sequence become rows of one product, so keys are
    read once: `[n · S, H, D]` over `[n, L, G, D]`.
    """
    n, s, kv = group.sequences, group.queries, k.shape[2]
    heads, width = q.shape[1], q.shape[2]
    rows = heads // kv
    grouped = q.view(n, s, kv, rows, width).permute(0, 2, 3, 1, 4).reshape(n, kv, rows * s, width)
    mask = None
    if group.visible is not None:
        mask = group.visible.unsqueeze(1)
        if s > 1:
            mask = mask.repeat(1, 1, rows, 1)
    result = _attend(grouped, k.transpose(1, 2), v.transpose(1, 2), mask, scale, softcap)
    return result.view(n, kv, rows, s, -1).permute(0, 3, 1, 2, 4).reshape(n * s, heads, -1)


def _attend_single(
    q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float, softcap: float, window: int | None
) -> Tensor:
    """One sequence's queries: `[S, H, D]` over `[1, L, G, D]`; kv heads form the batch, so none is
    copied.
    """
    s, heads, width = q.shape
    kv, length = k.shape[2], k.shape[1]
    rows = heads // kv
    q_GRSD = q.view(s, kv, rows, width).permute(1, 2, 0, 3)
    k_GRLD = k[0].transpose(0, 1).unsqueeze(1).expand(kv, rows, length, width)
    v_GRLD = v[0].transpose(0, 1).unsqueeze(1).expand(kv, rows, length, v.shape[3])
    if group.causal and not softcap:
        result = scaled_dot_product_attention(q_GRSD, k_GRLD, v_GRLD, is_causal=True, scale=scale)
        return result.permute(2, 0, 1, 3).reshape(s, heads, -1)
    out = q.new_empty(s, heads, v.shape[3])
    step = max(64, MAX_MASK_ELEMENTS // length)
    for first in range(0, s, step):
        last = min(s, first + step)
        position = torch.arange(first, last, device=q.device) + (group.skip + length - s)
        stop = length - s + last  # later keys are masked for all of these queries
        mask = visible_keys(position, stop, group.skip, window)
        result = _attend(
            q_GRSD[:, :, first:last], k_GRLD[:, :, :stop], v_GRLD[:, :, :stop], mask, scale, softcap
        )
        out[first:last] = result.permute(2, 0, 1, 3).reshape(last - first, heads, -1)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    if not softcap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh(torch.matmul(q, k.transpose(-1, -2)) * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), v)
