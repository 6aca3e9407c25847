"""The first backward kernel: one sum per row of scores (FlashAttention-2, alg. 2)."""

from __future__ import annotations

from kernels.attention.triton_kernels.tiles import (
    load_tile,
)
from kernels.jit import jit, tl


@jit
def attention_row_sums_kernel(
    O,
    DO,
    DLSE,
    DELTA,
    o_b,
    o_s,
    o_h,
    do_b,
    do_s,
    do_h,
    sum_b,
    sum_h,
    len_q,
    heads,
    lanes,
    DV: tl.constexpr,
    DP: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    BM: tl.constexpr,
):
    """DELTA[row] = sum(O · dO) - dLSE, subtracted from every score's gradient; DLSE has DELTA's
    layout, fp32.
    """
    row = tl.program_id(0) // lanes * BM
    lane = tl.program_id(0) % lanes
    batch = lane // heads
    head = lane % heads
    o = load_tile(
        O + batch.to(tl.int64) * o_b + head.to(tl.int64) * o_h, row, o_s, len_q, BM, 0, DP, DV, True
    )
    do = load_tile(
        DO + batch.to(tl.int64) * do_b + head.to(tl.int64) * do_h,
        row,
        do_s,
        len_q,
        BM,
        0,
        DP,
        DV,
        True,
    )
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    rows = row + tl.arange(0, BM)
    at = batch.to(tl.int64) * sum_b + head.to(tl.int64) * sum_h + rows
    if HAS_DLSE:
        delta -= tl.load(DLSE + at, mask=rows < len_q, other=0.0)
    tl.store(DELTA + at, delta, mask=rows < len_q)
