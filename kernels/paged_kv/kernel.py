"""Split-K paged attention: a program takes query rows of one kv head over one part of a sequence's
keys.

Rows are the query heads that share a kv head times the sequence's query tokens, so keys are read
once for all of them (Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html;
PagedAttention, arXiv 2309.06180). `paged_attention_combine_kernel` merges the partial results.
"""

from __future__ import annotations

from kernels.jit import dot, jit, softmax_step, tl


@jit
def cast_to_queries(x, q, UPCAST: tl.constexpr):
    """Cache values in the queries' type; in fp32 in the interpreter, which cannot convert integers
    to bf16.
    """
    if UPCAST:
        out = x.to(tl.float32)
    else:
        out = x.to(q.dtype)
    return out


@jit
def paged_attention_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    TABLE,
    LENS,
    CU,
    K_SCALES,
    V_SCALES,
    scale,
    softcap,
    window,
    queries,
    kv_heads,
    splits,
    q_t,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    o_p,
    o_t,
    o_h,
    l_p,
    l_t,
    table_b,
    s_b,
    s_s,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """OUT [parts, T, H, Dv] and LSE [parts, T, H] (natural; -inf for a part without keys). scale
    includes log2(e); if CAPPED, softcap does instead: score = softcap · tanh(scale · q·k), with
    scale already divided by the cap.
    """
    tiles = tl.cdiv(queries * GROUP, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % tiles
    head = pid // tiles % kv_heads
    part = pid // (tiles * kv_heads) % splits
    sequence = pid // (tiles * kv_heads * splits)
    length = tl.load(LENS + sequence).to(tl.int32)
    if RAGGED:
        first = tl.load(CU + sequence).to(tl.int32)
        count = tl.load(CU + sequence + 1).to(tl.int32) - first
    else:
        first = sequence * queries
        count = queries
    if tile * BLOCK_M >= count * GROUP:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    valid = query < count
    token = (first + query).to(tl.int64)
    q_head = head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q = tl.load(
        Q + token[:, None] * q_t + q_head[:, None] * q_h + d[None, :],
        mask=valid[:, None] & (d < D)[None, :],
        other=0.0,
    )
    position = length - count + query  # of the query among the keys
    newest = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    high = tl.maximum(length - count + newest + 1, 0)
    low = 0
    if WINDOWED:
        oldest = tile * BLOCK_M // GROUP
        low = tl.maximum(length - count + oldest - window + 1, 0) // BLOCK_N * BLOCK_N
    keys_per_part = tl.cdiv(tl.cdiv(high - low, BLOCK_N), splits) * BLOCK_N
    start = low + part * keys_per_part
    stop = tl.minimum(start + keys_per_part, high)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(start, stop, BLOCK_N):
        key = at + n
        inside = key < stop
        block = tl.load(TABLE + sequence * table_b + key // PAGE, mask=inside, other=0).to(tl.int64)
        slot = key % PAGE
        k = tl.load(
            K + (block * k_b + slot * k_s)[:, None] + (head * k_h + d)[None, :],
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        )
        s = dot(
            q,
            tl.trans(cast_to_queries(k, q, UPCAST)),
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
            UPCAST,
        )
        if QUANTIZED:
            s = (
                s
                * tl.load(K_SCALES + block * s_b + slot * s_s + head, mask=inside, other=0.0)[
                    None, :
                ]
            )
        s = s * scale
        if CAPPED:
            s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s)))
        mask = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            mask = mask & (key[None, :] > position[:, None] - window)
        m, l, alpha, p = softmax_step(m, l, tl.where(mask, s, float("-inf")), 1.0)
        v = tl.load(
            V + (block * v_b + slot * v_s)[:, None] + (head * v_h + e)[None, :],
            mask=inside[:, None] & (e < DV)[None, :],
            other=0.0,
        )
        if QUANTIZED:
            p = (
                p
                * tl.load(V_SCALES + block * s_b + slot * s_s + head, mask=inside, other=0.0)[
                    None, :
                ]
            )
        acc = dot(p.to(q.dtype), cast_to_queries(v, q, UPCAST), acc * alpha[:, None], UPCAST)

    non_empty = l > 0.0
    acc = acc * (1.0 / tl.where(non_empty, l, 1.0))[:, None]
    lse = tl.where(
        non_empty, (m + tl.log2(tl.where(non_empty, l, 1.0))) * 0.6931471805599453, float("-inf")
    )
    tl.store(
        OUT + part.to(tl.int64) * o_p + token[:, None] * o_t + q_head[:, None] * o_h + e[None, :],
        acc.to(OUT.dtype.element_ty),
        mask=valid[:, None] & (e < DV)[None, :],
    )
    tl.store(LSE + part.to(tl.int64) * l_p + token * l_t + q_head, lse, mask=valid)


@jit
def paged_attention_combine_kernel(
    PARTS,
    LSES,
    OUT,
    LSE,
    heads,
    splits,
    p_p,
    p_t,
    p_h,
    l_p,
    l_t,
    o_t,
    o_h,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One query head of one token: its parts weighted by their sums, OUT [T, H, Dv] and LSE
    [T, H].
    """
    pid = tl.program_id(0).to(tl.int64)
    token = pid // heads
    head = pid % heads
    part = tl.arange(0, BLOCK_P).to(tl.int64)  # parts · tokens · heads · columns may exceed 2^31
    e = tl.arange(0, BLOCK_V)
    lse = tl.load(LSES + part * l_p + token * l_t + head, mask=part < splits, other=float("-inf"))
    most = tl.max(lse, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp2((lse - base) * 1.4426950408889634)
    total = tl.sum(weight, 0)
    non_empty = total > 0.0
    o = tl.load(
        PARTS + part[:, None] * p_p + token * p_t + head * p_h + e[None, :],
        mask=(lse > float("-inf"))[:, None] & (e < DV)[None, :],
        other=0.0,
    )
    o = tl.sum(o * weight[:, None], 0) / tl.where(non_empty, total, 1.0)
    tl.store(OUT + token * o_t + head * o_h + e, o.to(OUT.dtype.element_ty), mask=e < DV)
    tl.store(
        LSE + token * l_t + head,
        tl.where(
            non_empty, base + tl.log2(tl.where(non_empty, total, 1.0)) * 0.6931471805599453, most
        ),
    )
