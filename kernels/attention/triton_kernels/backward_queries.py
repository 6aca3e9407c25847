"""Backward kernel of queries: one program computes one tile's gradient (FlashAttention-2, alg. 2,
line 15).
"""

from __future__ import annotations

from kernels.attention.triton_kernels.tiles import (
    load_tile,
    schedule,
    sequence_span,
    store_tile,
    tanh_from_exponent,
    visible,
    visible_key_range,
)
from kernels.jit import dot, jit, ragged_tile, tl


@jit
def _backward_over_keys(
    dq_a,
    dq_b,
    q_a,
    q_b,
    do_a,
    do_b,
    lse,
    delta,
    K,
    V,
    k_s,
    v_s,
    low,
    high,
    positions,
    len_k,
    window,
    scale_log2,
    cap_in,
    cap_out,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    VA: tl.constexpr,
    VB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    for start in tl.range(low, high, BN):
        start = tl.multiple_of(start, BN)
        k_a = load_tile(K, start, k_s, len_k, BN, 0, DA, D, MASKED)
        raw = dot(q_a, tl.trans(k_a), tl.zeros([BM, BN], tl.float32), UPCAST)
        if DB > 0:
            k_b = load_tile(K, start, k_s, len_k, BN, DA, DB, D, MASKED)
            raw = dot(q_b, tl.trans(k_b), raw, UPCAST)
        if SOFTCAP:
            capped = tanh_from_exponent(raw * cap_in)
            p = tl.exp2(capped * cap_out - lse[:, None])
        else:
            p = tl.exp2(raw * scale_log2 - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, BN)
            p = tl.where(
                visible(positions[:, None], keys[None, :], len_k, window, CAUSAL, WINDOWED), p, 0.0
            )
        v_a = load_tile(V, start, v_s, len_k, BN, 0, VA, DV, MASKED)
        dp = dot(do_a, tl.trans(v_a), tl.zeros([BM, BN], tl.float32), UPCAST)
        if VB > 0:
            v_b = load_tile(V, start, v_s, len_k, BN, VA, VB, DV, MASKED)
            dp = dot(do_b, tl.trans(v_b), dp, UPCAST)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - capped * capped)
        if not UPCAST:
            ds = ds.to(k_a.dtype)
        dq_a = dot(ds, k_a, dq_a, UPCAST)
        if DB > 0:
            dq_b = dot(ds, k_b, dq_b, UPCAST)
    return dq_a, dq_b


@jit
def attention_queries_backward_kernel(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    DQ,
    CU_Q,
    CU_K,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    do_b,
    do_s,
    do_h,
    dq_b,
    dq_s,
    dq_h,
    lse_b,
    lse_h,
    len_q,
    len_k,
    heads,
    group,
    sequences,
    tiles,
    lanes,
    section,
    window,
    scale,
    scale_log2,
    cap_in,
    cap_out,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    VA: tl.constexpr,
    VB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Gradient of one tile of BM queries of one head; arguments as in the forward kernel."""
    tile, lane = schedule(tl.program_id(0), tiles, lanes, section)
    batch = lane // heads
    head = lane % heads
    q_start = 0
    k_start = 0
    if RAGGED:
        which, tile = ragged_tile(CU_Q, tile, sequences, BM)
        k_start, len_k = sequence_span(CU_K, which, len_k)
        q_start, len_q = sequence_span(CU_Q, which, len_q)
    row = tile * BM
    if row >= len_q:
        return
    at_q = batch.to(tl.int64) * q_b + tl.cast(q_start, tl.int64) * q_s + head.to(tl.int64) * q_h
    at_do = batch.to(tl.int64) * do_b + tl.cast(q_start, tl.int64) * do_s + head.to(tl.int64) * do_h
    at_dq = batch.to(tl.int64) * dq_b + tl.cast(q_start, tl.int64) * dq_s + head.to(tl.int64) * dq_h
    at_k = (
        batch.to(tl.int64) * k_b
        + tl.cast(k_start, tl.int64) * k_s
        + (head // group).to(tl.int64) * k_h
    )
    at_v = (
        batch.to(tl.int64) * v_b
        + tl.cast(k_start, tl.int64) * v_s
        + (head // group).to(tl.int64) * v_h
    )
    at_lse = batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h + q_start

    q_a = load_tile(Q + at_q, row, q_s, len_q, BM, 0, DA, D, True)
    do_a = load_tile(DO + at_do, row, do_s, len_q, BM, 0, VA, DV, True)
    q_b_ = q_a
    do_b_ = do_a
    if DB > 0:
        q_b_ = load_tile(Q + at_q, row, q_s, len_q, BM, DA, DB, D, True)
    if VB > 0:
        do_b_ = load_tile(DO + at_do, row, do_s, len_q, BM, VA, VB, DV, True)
    rows = row + tl.arange(0, BM)
    lse = tl.load(LSE + at_lse + rows, mask=rows < len_q, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * 1.4426950408889634
    delta = tl.load(DELTA + at_lse + rows, mask=rows < len_q, other=0.0)
    dq_a = tl.zeros([BM, DA], tl.float32)
    dq_b_ = tl.zeros([BM, DB if DB > 0 else 16], tl.float32)
    first = row + len_k - len_q
    positions = first + tl.arange(0, BM)
    low, full_low, full_high, high = visible_key_range(
        first, first + BM - 1, len_k, window, CAUSAL, WINDOWED, BN
    )
    if ONE_LOOP:  # as in `attention_keys_values_backward_kernel`
        dq_a, dq_b_ = _backward_over_keys(
            dq_a,
            dq_b_,
            q_a,
            q_b_,
            do_a,
            do_b_,
            lse,
            delta,
            K + at_k,
            V + at_v,
            k_s,
            v_s,
            low,
            high,
            positions,
            len_k,
            window,
            scale_log2,
            cap_in,
            cap_out,
            True,
            CAUSAL,
            WINDOWED,
            SOFTCAP,
            D,
            DV,
            DA,
            DB,
            VA,
            VB,
            BM,
            BN,
            UPCAST,
        )
    else:
        if WINDOWED:
            dq_a, dq_b_ = _backward_over_keys(
                dq_a,
                dq_b_,
                q_a,
                q_b_,
                do_a,
                do_b_,
                lse,
                delta,
                K + at_k,
                V + at_v,
                k_s,
                v_s,
                low,
                tl.minimum(full_low, high),
                positions,
                len_k,
                window,
                scale_log2,
                cap_in,
                cap_out,
                True,
                CAUSAL,
                WINDOWED,
                SOFTCAP,
                D,
                DV,
                DA,
                DB,
                VA,
                VB,
                BM,
                BN,
                UPCAST,
            )
        dq_a, dq_b_ = _backward_over_keys(
            dq_a,
            dq_b_,
            q_a,
            q_b_,
            do_a,
            do_b_,
            lse,
            delta,
            K + at_k,
            V + at_v,
            k_s,
            v_s,
            full_low,
            full_high,
            positions,
            len_k,
            window,
            scale_log2,
            cap_in,
            cap_out,
            False,
            CAUSAL,
            WINDOWED,
            SOFTCAP,
            D,
            DV,
            DA,
            DB,
            VA,
            VB,
            BM,
            BN,
            UPCAST,
        )
        dq_a, dq_b_ = _backward_over_keys(
            dq_a,
            dq_b_,
            q_a,
            q_b_,
            do_a,
            do_b_,
            lse,
            delta,
            K + at_k,
            V + at_v,
            k_s,
            v_s,
            full_high,
            high,
            positions,
            len_k,
            window,
            scale_log2,
            cap_in,
            cap_out,
            True,
            CAUSAL,
            WINDOWED,
            SOFTCAP,
            D,
            DV,
            DA,
            DB,
            VA,
            VB,
            BM,
            BN,
            UPCAST,
        )
    store_tile(DQ + at_dq, dq_a * scale, row, dq_s, len_q, BM, 0, DA, D)
    if DB > 0:
        store_tile(DQ + at_dq, dq_b_ * scale, row, dq_s, len_q, BM, DA, DB, D)
