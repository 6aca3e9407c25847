"""The backward kernel for the gradients of keys and values (FlashAttention-2, alg. 2).

Probabilities are recomputed from the log-sum-exp. Each gradient tile belongs to one program,
without atomics, so results are bitwise reproducible.
"""

from __future__ import annotations

from kernels.attention.triton_kernels.tiles import (
    load_tile,
    schedule,
    sequence_span,
    store_tile,
    tanh_from_exponent,
    visible,
    visible_query_range,
)
from kernels.jit import dot, jit, ragged_tile, tl


@jit
def _loop_over_queries(
    dk_a,
    dk_b,
    dv_a,
    dv_b,
    k_a,
    k_b,
    v_a,
    v_b,
    Q,
    DO,
    LSE,
    DELTA,
    q_s,
    do_s,
    low,
    high,
    keys,
    shift,
    len_q,
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
    """Scores are transposed, [BN keys, BM queries], so that both gradients are products without a
    transpose.
    """
    for start in tl.range(low, high, BM):
        start = tl.multiple_of(start, BM)
        rows = start + tl.arange(0, BM)
        q_a = load_tile(Q, start, q_s, len_q, BM, 0, DA, D, True)
        raw = dot(k_a, tl.trans(q_a), tl.zeros([BN, BM], tl.float32), UPCAST)
        if DB > 0:
            q_b = load_tile(Q, start, q_s, len_q, BM, DA, DB, D, True)
            raw = dot(k_b, tl.trans(q_b), raw, UPCAST)
        # A query past the end, or one that sees no key, gets +inf: its probabilities become zero.
        lse = tl.load(LSE + rows, mask=rows < len_q, other=float("inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse) * 1.4426950408889634
        if SOFTCAP:
            capped = tanh_from_exponent(raw * cap_in)
            p = tl.exp2(capped * cap_out - lse[None, :])
        else:
            p = tl.exp2(raw * scale_log2 - lse[None, :])
        if MASKED:
            p = tl.where(
                visible(rows[None, :] + shift, keys[:, None], len_k, window, CAUSAL, WINDOWED),
                p,
                0.0,
            )
        do_a = load_tile(DO, start, do_s, len_q, BM, 0, VA, DV, True)
        p_ = p
        if not UPCAST:
            p_ = p.to(do_a.dtype)
        dv_a = dot(p_, do_a, dv_a, UPCAST)
        dp = dot(v_a, tl.trans(do_a), tl.zeros([BN, BM], tl.float32), UPCAST)
        if VB > 0:
            do_b = load_tile(DO, start, do_s, len_q, BM, VA, VB, DV, True)
            dv_b = dot(p_, do_b, dv_b, UPCAST)
            dp = dot(v_b, tl.trans(do_b), dp, UPCAST)
        delta = tl.load(DELTA + rows, mask=rows < len_q, other=0.0)
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - capped * capped)
        if not UPCAST:
            ds = ds.to(q_a.dtype)
        dk_a = dot(ds, q_a, dk_a, UPCAST)
        if DB > 0:
            dk_b = dot(ds, q_b, dk_b, UPCAST)
    return dk_a, dk_b, dv_a, dv_b


@jit
def attention_keys_values_backward_kernel(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    DK,
    DV_,
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
    dk_b,
    dk_s,
    dk_h,
    dv_b,
    dv_s,
    dv_h,
    lse_b,
    lse_h,
    len_q,
    len_k,
    kv_sums,
    splits,
    members,
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
    """Gradients of one tile of BN keys and values of one key-value head, summed over `members` of
    the query heads that share it. The `splits` sums of a head are adjacent in DK and DV_ ([B, K,
    kv_sums, D], kv_sums = key-value heads · splits), and the launcher adds them; one split if there
    are enough programs.
    """
    tile, lane = schedule(tl.program_id(0), tiles, lanes, section)
    if not RAGGED:  # the first keys are seen by the most queries: start with them
        tile = tiles - 1 - tile
    batch = lane // kv_sums
    share = lane % kv_sums
    kv_head = share // splits
    q_start = 0
    k_start = 0
    if RAGGED:
        which, tile = ragged_tile(CU_K, tile, sequences, BN)
        k_start, len_k = sequence_span(CU_K, which, len_k)
        q_start, len_q = sequence_span(CU_Q, which, len_q)
    col = tile * BN
    if col >= len_k:
        return
    at_q = batch.to(tl.int64) * q_b + tl.cast(q_start, tl.int64) * q_s
    at_do = batch.to(tl.int64) * do_b + tl.cast(q_start, tl.int64) * do_s
    at_lse = batch.to(tl.int64) * lse_b + q_start
    at_k = batch.to(tl.int64) * k_b + tl.cast(k_start, tl.int64) * k_s + kv_head.to(tl.int64) * k_h
    at_v = batch.to(tl.int64) * v_b + tl.cast(k_start, tl.int64) * v_s + kv_head.to(tl.int64) * v_h

    k_a = load_tile(K + at_k, col, k_s, len_k, BN, 0, DA, D, True)
    v_a = load_tile(V + at_v, col, v_s, len_k, BN, 0, VA, DV, True)
    k_b_ = k_a
    v_b_ = v_a
    if DB > 0:
        k_b_ = load_tile(K + at_k, col, k_s, len_k, BN, DA, DB, D, True)
    if VB > 0:
        v_b_ = load_tile(V + at_v, col, v_s, len_k, BN, VA, VB, DV, True)
    dk_a = tl.zeros([BN, DA], tl.float32)
    dk_b_ = tl.zeros([BN, DB if DB > 0 else 16], tl.float32)
    dv_a = tl.zeros([BN, VA], tl.float32)
    dv_b_ = tl.zeros([BN, VB if VB > 0 else 16], tl.float32)
    keys = col + tl.arange(0, BN)
    shift = len_k - len_q
    low, full_low, full_high, high = visible_query_range(
        col, col + BN - 1, len_q, shift, window, CAUSAL, WINDOWED, BM
    )
    for member in range(members):
        head = share * members + member
        q = Q + at_q + tl.cast(head, tl.int64) * q_h
        do = DO + at_do + tl.cast(head, tl.int64) * do_h
        lse = LSE + at_lse + tl.cast(head, tl.int64) * lse_h
        delta = DELTA + at_lse + tl.cast(head, tl.int64) * lse_h
        # Each loop that the compiler inlines holds registers of its own. If head dims leave few
        # registers, one loop masks every block: one comparison per element instead of spills.
        if ONE_LOOP:
            dk_a, dk_b_, dv_a, dv_b_ = _loop_over_queries(
                dk_a,
                dk_b_,
                dv_a,
                dv_b_,
                k_a,
                k_b_,
                v_a,
                v_b_,
                q,
                do,
                lse,
                delta,
                q_s,
                do_s,
                low,
                high,
                keys,
                shift,
                len_q,
                len_k,
                window,
                scale_log2,
                cap_in,
                cap_out,
                CAUSAL,
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
            if CAUSAL:
                dk_a, dk_b_, dv_a, dv_b_ = _loop_over_queries(
                    dk_a,
                    dk_b_,
                    dv_a,
                    dv_b_,
                    k_a,
                    k_b_,
                    v_a,
                    v_b_,
                    q,
                    do,
                    lse,
                    delta,
                    q_s,
                    do_s,
                    low,
                    tl.minimum(full_low, high),
                    keys,
                    shift,
                    len_q,
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
            dk_a, dk_b_, dv_a, dv_b_ = _loop_over_queries(
                dk_a,
                dk_b_,
                dv_a,
                dv_b_,
                k_a,
                k_b_,
                v_a,
                v_b_,
                q,
                do,
                lse,
                delta,
                q_s,
                do_s,
                full_low,
                full_high,
                keys,
                shift,
                len_q,
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
            if WINDOWED:
                dk_a, dk_b_, dv_a, dv_b_ = _loop_over_queries(
                    dk_a,
                    dk_b_,
                    dv_a,
                    dv_b_,
                    k_a,
                    k_b_,
                    v_a,
                    v_b_,
                    q,
                    do,
                    lse,
                    delta,
                    q_s,
                    do_s,
                    full_high,
                    high,
                    keys,
                    shift,
                    len_q,
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
    at_dk = (
        batch.to(tl.int64) * dk_b + tl.cast(k_start, tl.int64) * dk_s + share.to(tl.int64) * dk_h
    )
    at_dv = (
        batch.to(tl.int64) * dv_b + tl.cast(k_start, tl.int64) * dv_s + share.to(tl.int64) * dv_h
    )
    store_tile(DK + at_dk, dk_a * scale, col, dk_s, len_k, BN, 0, DA, D)
    store_tile(DV_ + at_dv, dv_a, col, dv_s, len_k, BN, 0, VA, DV)
    if DB > 0:
        store_tile(DK + at_dk, dk_b_ * scale, col, dk_s, len_k, BN, DA, DB, D)
    if VB > 0:
        store_tile(DV_ + at_dv, dv_b_, col, dv_s, len_k, BN, VA, VB, DV)
