"""Forward kernel: one program computes one tile of queries of one head (FlashAttention-2, arXiv
2307.08691, alg. 1).

Sizes, strides and block shapes come from the launcher. Scores are in base 2 throughout.
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
from kernels.jit import dot, jit, ragged_tile, softmax_step, tl


@jit
def _forward_over_keys(
    acc_a,
    acc_b,
    m,
    l,
    q_a,
    q_b,
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
    BN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BM: tl.constexpr = acc_a.shape[0]
    for start in tl.range(low, high, BN):
        start = tl.multiple_of(start, BN)
        k_a = load_tile(K, start, k_s, len_k, BN, 0, DA, D, MASKED)
        raw = dot(q_a, tl.trans(k_a), tl.zeros([BM, BN], tl.float32), UPCAST)
        if DB > 0:
            k_b = load_tile(K, start, k_s, len_k, BN, DA, DB, D, MASKED)
            raw = dot(q_b, tl.trans(k_b), raw, UPCAST)
        if SOFTCAP:
            raw = cap_out * tanh_from_exponent(raw * cap_in)
        if MASKED:
            keys = start + tl.arange(0, BN)
            raw = tl.where(
                visible(positions[:, None], keys[None, :], len_k, window, CAUSAL, WINDOWED),
                raw,
                float("-inf"),
            )
        m, l, alpha, p = softmax_step(m, l, raw, scale_log2)
        v_a = load_tile(V, start, v_s, len_k, BN, 0, VA, DV, MASKED)
        if not UPCAST:
            p = p.to(v_a.dtype)
        acc_a = dot(p, v_a, acc_a * alpha[:, None], UPCAST)
        if VB > 0:
            v_b = load_tile(V, start, v_s, len_k, BN, VA, VB, DV, MASKED)
            acc_b = dot(p, v_b, acc_b * alpha[:, None], UPCAST)
    return acc_a, acc_b, m, l


@jit
def attention_forward_kernel(
    Q,
    K,
    V,
    O,
    LSE,
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
    o_b,
    o_s,
    o_h,
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
    UPCAST: tl.constexpr,
):
    """Q [B, S, H, D], K [B, S, H / group, D], V [.., DV] by strides of batch, sequence and head; O
    like Q with DV; LSE fp32, natural. RAGGED: B = 1, S = all sequences, bounds in CU_Q and CU_K,
    len_q and len_k their totals. Queries that see no key get zeros and -inf.
    """
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
    at_o = batch.to(tl.int64) * o_b + tl.cast(q_start, tl.int64) * o_s + head.to(tl.int64) * o_h
    at_lse = batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h + q_start

    q_a = load_tile(Q + at_q, row, q_s, len_q, BM, 0, DA, D, True)
    if DB > 0:
        q_b_ = load_tile(Q + at_q, row, q_s, len_q, BM, DA, DB, D, True)
    else:
        q_b_ = q_a
    acc_a = tl.zeros([BM, VA], tl.float32)
    acc_b = tl.zeros([BM, VB if VB > 0 else 16], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    # position of the tile's first query among the keys: aligned at the end
    first = row + len_k - len_q
    positions = first + tl.arange(0, BM)
    low, full_low, full_high, high = visible_key_range(
        first, first + BM - 1, len_k, window, CAUSAL, WINDOWED, BN
    )
    if WINDOWED:
        acc_a, acc_b, m, l = _forward_over_keys(
            acc_a,
            acc_b,
            m,
            l,
            q_a,
            q_b_,
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
            BN,
            UPCAST,
        )
    acc_a, acc_b, m, l = _forward_over_keys(
        acc_a,
        acc_b,
        m,
        l,
        q_a,
        q_b_,
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
        BN,
        UPCAST,
    )
    acc_a, acc_b, m, l = _forward_over_keys(
        acc_a,
        acc_b,
        m,
        l,
        q_a,
        q_b_,
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
        BN,
        UPCAST,
    )
    inverse_sum = 1.0 / tl.where(l == 0.0, 1.0, l)
    store_tile(O + at_o, acc_a * inverse_sum[:, None], row, o_s, len_q, BM, 0, VA, DV)
    if VB > 0:
        store_tile(O + at_o, acc_b * inverse_sum[:, None], row, o_s, len_q, BM, VA, VB, DV)
    rows = row + tl.arange(0, BM)
    lse = m * 0.6931471805599453 + tl.log(tl.where(l == 0.0, 1.0, l))
    tl.store(LSE + at_lse + rows, lse, mask=rows < len_q)
