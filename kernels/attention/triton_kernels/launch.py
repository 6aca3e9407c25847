"""Launches of the attention kernels, with checked arguments. Tensors are [B, S, H, D]; ragged
batches have B = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.attention.spec import AttentionSpec, Bounds
from kernels.attention.triton_kernels.backward_keys_values import (
    attention_keys_values_backward_kernel,
)
from kernels.attention.triton_kernels.backward_queries import attention_queries_backward_kernel
from kernels.attention.triton_kernels.backward_row_sums import attention_row_sums_kernel
from kernels.attention.triton_kernels.forward import attention_forward_kernel
from kernels.attention.triton_kernels.launch_args import (
    choose_section,
    choose_splits,
    count_tiles,
    get_config,
    get_constants,
    get_scalars,
    get_strides,
    make_addressable,
)
from kernels.attention.triton_kernels.launch_tma import forward_tma, tma_why_not
from kernels.jit import cdiv, next_power_of_2


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, D_v], log-sum-exp [B, H, Q] fp32)."""
    batch, queries, heads, _ = q.shape
    out = torch.empty(batch, queries, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    q, k, v = make_addressable(q), make_addressable(k), make_addressable(v)
    chosen = get_config("attention_forward", q, v, spec)
    if chosen["tma"] and bounds is None and tma_why_not(q, k, v, spec) is None:
        return forward_tma(q, k, v, out, lse, spec)
    tiles, lanes = count_tiles(q, bounds.cu_q if bounds else None, chosen["block_m"]), batch * heads
    with runtime.device_guard(q):
        attention_forward_kernel[(tiles * lanes,)](
            q,
            k,
            v,
            out,
            lse,
            *((bounds.cu_q, bounds.cu_k) if bounds else (None, None)),
            *get_strides(q),
            *get_strides(k),
            *get_strides(v),
            *get_strides(out),
            *lse.stride()[:2],
            queries,
            k.shape[1],
            heads,
            heads // k.shape[2],
            len(bounds.cu_q) - 1 if bounds else 0,
            tiles,
            lanes,
            choose_section(k, v, lanes, heads, bounds),
            spec.window,
            *get_scalars(spec)[2:],
            **get_constants(q, v, spec, bounds, chosen),
        )
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor | None,
    grad_lse: Tensor | None,
    bounds: Bounds | None,
    spec: AttentionSpec,
    needs_grad: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v, as `needs_grad` requests; the log-sum-exp's gradient is subtracted
    from the row sums.
    """
    batch, queries, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if queries == 0 or keys == 0 or batch == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    grad = make_addressable(torch.zeros_like(out) if grad is None else grad)
    q, k, v = make_addressable(q), make_addressable(k), make_addressable(v)
    delta = torch.empty_like(lse)
    grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
    ends = (bounds.cu_q, bounds.cu_k) if bounds else (None, None)
    sequences = len(bounds.cu_q) - 1 if bounds else 0
    group = heads // kv_heads
    with runtime.device_guard(q):
        block = tuning.config("attention_row_sums")
        attention_row_sums_kernel[(cdiv(queries, block["block_m"]) * batch * heads,)](
            out,
            grad,
            grad_lse if grad_lse is not None else delta,
            delta,
            *get_strides(out),
            *get_strides(grad),
            *lse.stride()[:2],
            queries,
            heads,
            batch * heads,
            DV=v.shape[-1],
            DP=max(16, next_power_of_2(v.shape[-1])),
            HAS_DLSE=grad_lse is not None,
            BM=block["block_m"],
            num_warps=block["num_warps"],
        )
        if needs_grad[1] or needs_grad[2]:
            chosen = get_config("attention_keys_values", q, v, spec)
            tiles = count_tiles(k, ends[1], chosen["block_n"])
            splits = choose_splits(tiles * batch * kv_heads, group, q.device)
            kv_sums, lanes = kv_heads * splits, batch * kv_heads * splits
            sum_k, sum_v = dk, dv
            if splits > 1:
                sum_k, sum_v = (
                    torch.empty(
                        batch, keys, kv_sums, x.shape[-1], dtype=torch.float32, device=x.device
                    )
                    for x in (k, v)
                )
            attention_keys_values_backward_kernel[(tiles * lanes,)](
                q,
                k,
                v,
                grad,
                lse,
                delta,
                sum_k,
                sum_v,
                *ends,
                *get_strides(q),
                *get_strides(k),
                *get_strides(v),
                *get_strides(grad),
                *get_strides(sum_k),
                *get_strides(sum_v),
                *lse.stride()[:2],
                queries,
                keys,
                kv_sums,
                splits,
                group // splits,
                sequences,
                tiles,
                lanes,
                choose_section(q, grad, lanes, kv_heads, bounds),
                *get_scalars(spec),
                **get_constants(q, v, spec, bounds, chosen),
            )
            if splits > 1:
                dk = sum_k.unflatten(2, (kv_heads, splits)).sum(3).to(k.dtype)
                dv = sum_v.unflatten(2, (kv_heads, splits)).sum(3).to(v.dtype)
        if needs_grad[0]:
            chosen = get_config("attention_queries", q, v, spec)
            tiles, lanes = count_tiles(q, ends[0], chosen["block_m"]), batch * heads
            attention_queries_backward_kernel[(tiles * lanes,)](
                q,
                k,
                v,
                grad,
                lse,
                delta,
                dq,
                *ends,
                *get_strides(q),
                *get_strides(k),
                *get_strides(v),
                *get_strides(grad),
                *get_strides(dq),
                *lse.stride()[:2],
                queries,
                keys,
                heads,
                group,
                sequences,
                tiles,
                lanes,
                choose_section(k, v, lanes, heads, bounds),
                *get_scalars(spec),
                **get_constants(q, v, spec, bounds, chosen),
            )
    return (
        dq if needs_grad[0] else None,
        dk if needs_grad[1] else None,
        dv if needs_grad[2] else None,
    )
