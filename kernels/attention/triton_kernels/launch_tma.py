"""Launch of the sm_90 forward kernel: [B, S, H, D] tensors as tables of rows, and its
requirements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import runtime
from kernels.attention.spec import AttentionSpec
from kernels.attention.triton_kernels.configs import split_head_dim
from kernels.attention.triton_kernels.forward_tma import attention_forward_tma_kernel
from kernels.attention.triton_kernels.launch_args import (
    LOG2_E,
    choose_section,
    get_config,
    get_strides,
)
from kernels.jit import UPCAST, cdiv


def tma_why_not(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    """Why the sm_90 forward kernel cannot run on these tensors; None if it can."""
    if runtime.arch(q.device) not in ("sm_90", "interpret"):
        return "no tensor memory accelerator with warp groups"
    if spec.window or spec.softcap:
        return "a window or a softcap"
    if q.dtype not in (torch.float16, torch.bfloat16) and not runtime.INTERPRET:
        return "operands are not 16 bits wide"
    if sum(split_head_dim(q.shape[-1])) != q.shape[-1] or split_head_dim(v.shape[-1]) != (
        v.shape[-1],
        0,
    ):
        return "head dims that are not powers of two"
    views = [_rows(x) for x in (q, k, v)]
    if any(view is None for view in views):
        return "strides that do not form a table of rows, or are not multiples of 16 bytes"
    block = get_config("attention_forward_tma", q, v, spec)["block_n"]
    full_blocks = k.shape[1] % block == 0
    single_sequence = q.shape[0] == 1 and all(
        view is not None and view.head_rows == 0 for view in views
    )
    return (
        None
        if full_blocks or single_sequence
        else "rows past a sequence's end belong to another sequence"
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """[B, S, H, D] as a table [rows, columns]: where head h of batch b starts."""

    rows: int
    columns: int
    stride: int
    batch_rows: int
    head_rows: int
    head_columns: int


def _rows(x: Tensor) -> _Rows | None:
    b, s, h = x.stride()[:3]
    aligned = 16 // x.element_size()
    if x.data_ptr() % 16 or s % aligned or s == 0:
        return None
    b = b if x.shape[0] > 1 else 0
    h = h if x.shape[2] > 1 else 0
    if b % s or (h >= s and h % s) or h < 0 or b < 0:
        return None
    # heads are adjacent in a row, as in [B, S, H, D]; else stacked, as in [B, H, S, D]
    heads_in_row = h < s
    columns = (x.shape[2] - 1) * h + x.shape[3] if heads_in_row else x.shape[3]
    if columns > s:
        return None
    rows = (
        (x.shape[0] - 1) * (b // s)
        + x.shape[1]
        + (0 if heads_in_row else (x.shape[2] - 1) * (h // s))
    )
    return _Rows(rows, columns, s, b // s, 0 if heads_in_row else h // s, h if heads_in_row else 0)


def forward_tma(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Fills and returns out [B, Q, H, D_v] and the log-sum-exp lse [B, H, Q]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    chosen = get_config("attention_forward_tma", q, v, spec)
    m, n, (first, second) = chosen["block_m"], chosen["block_n"], split_head_dim(q.shape[-1])
    positions: list[int] = []
    descriptors = []
    for x, block, widths in (
        (q, m, (first, second or first)),
        (k, n, (first, second or first)),
        (v, n, (v.shape[-1],)),
    ):
        view = _rows(x)
        assert view is not None  # checked by tma_why_not
        positions += [view.batch_rows, view.head_rows, view.head_columns]
        descriptors += [
            TensorDescriptor(x, [view.rows, view.columns], [view.stride, 1], [block, w])
            for w in widths
        ]
    batch, queries, heads, _ = q.shape
    tiles, lanes = cdiv(queries, m), batch * heads
    with runtime.device_guard(q):
        attention_forward_tma_kernel[(tiles * lanes,)](
            *descriptors,
            out,
            lse,
            *positions,
            *get_strides(out),
            *lse.stride()[:2],
            queries,
            k.shape[1],
            heads,
            heads // k.shape[2],
            tiles,
            lanes,
            choose_section(k, v, lanes, heads, None),
            spec.scale * LOG2_E,
            CAUSAL=spec.causal,
            DA=first,
            DB=second,
            DV=v.shape[-1],
            BM=m,
            BN=n,
            WARP_SPECIALIZE=chosen["warp_specialize"],
            UPCAST=UPCAST,
            num_warps=chosen["num_warps"],
            num_stages=chosen["num_stages"],
        )
    return out, lse
