"""Paged attention over equal shares of work: a program computes the items of a `WorkTable` in its
range, of which the first and the last may be parts.

Rows are the query heads that share a kv head times the sequence's query tokens, so keys are read
once for all of them (Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html;
PagedAttention, arXiv 2309.06180). `paged_attention_merge_kernel` merges items in parts.
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
    PARTS,
    PART_LSES,
    SEQUENCES,
    TILES,
    ENDS,
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
    items,
    min_blocks,
    capacity,
    last_block,
    q_t,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    o_t,
    o_h,
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
    RETURN_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Writes OUT [T, H, Dv] and LSE [T, H] (natural; -inf for a query without keys) of complete
    items, and PARTS [2 programs, BLOCK_M, BLOCK_V] and PART_LSES [2 programs, BLOCK_M] of parts:
    part 0 of a program continues an item of its predecessor, part 1 begins one. scale includes
    log2(e); if CAPPED, softcap does instead: score = softcap · tanh(scale · q·k), with scale
    already divided by the cap. Lengths above `capacity` and blocks above `last_block` are reduced
    to them.
    """
    pid = tl.program_id(0)
    per_head = tl.load(ENDS + items - 1)
    total = per_head * kv_heads
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), min_blocks)
    at = pid * share
    end = tl.minimum(at + share, total)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    while at < end:
        head = at // per_head
        local = at - head * per_head
        item = 0
        last = items - 1
        while item < last:  # the first item that ends above `local`
            middle = (item + last) // 2
            if tl.load(ENDS + middle) > local:
                last = middle
            else:
                item = middle + 1
        item_end = tl.load(ENDS + item)
        item_start = tl.load(ENDS + item - 1, mask=item > 0, other=0)
        first_block = local - item_start
        blocks = tl.minimum(item_end - local, end - at)
        sequence = tl.load(SEQUENCES + item)
        tile = tl.load(TILES + item)
        length = tl.minimum(tl.load(LENS + sequence).to(tl.int32), capacity)
        if RAGGED:
            first = tl.load(CU + sequence).to(tl.int32)
            count = tl.load(CU + sequence + 1).to(tl.int32) - first
        else:
            first = sequence * queries
            count = queries

        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        query = row // GROUP
        valid = query < count
        token = (first + query).to(tl.int64)
        q_head = head * GROUP + row % GROUP
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
        start = low + first_block * BLOCK_N
        stop = tl.minimum(start + blocks * BLOCK_N, high)

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for begin in range(start, stop, BLOCK_N):
            key = begin + n
            inside = key < stop
            block = tl.load(TABLE + sequence * table_b + key // PAGE, mask=inside, other=0)
            block = tl.minimum(tl.maximum(block, 0), last_block).to(tl.int64)
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
                at_scale = block * s_b + slot * s_s + head
                s = s * tl.load(K_SCALES + at_scale, mask=inside, other=0.0)[None, :]
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
                p = p * tl.load(V_SCALES + at_scale, mask=inside, other=0.0)[None, :]
            acc = dot(p.to(q.dtype), cast_to_queries(v, q, UPCAST), acc * alpha[:, None], UPCAST)

        non_empty = l > 0.0
        acc = acc * (1.0 / tl.where(non_empty, l, 1.0))[:, None]
        lse = tl.where(
            non_empty,
            (m + tl.log2(tl.where(non_empty, l, 1.0))) * 0.6931471805599453,
            float("-inf"),
        )
        if blocks == item_end - item_start:
            tl.store(
                OUT + token[:, None] * o_t + q_head[:, None] * o_h + e[None, :],
                acc.to(OUT.dtype.element_ty),
                mask=valid[:, None] & (e < DV)[None, :],
            )
            if RETURN_LSE:
                tl.store(LSE + token * l_t + q_head, lse, mask=valid)
        else:
            part = (2 * pid + (first_block == 0).to(tl.int32)).to(tl.int64)
            r = part * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(PARTS + r[:, None] * BLOCK_V + e[None, :], acc)
            tl.store(PART_LSES + r, lse)
        at += blocks


@jit
def paged_attention_merge_kernel(
    PARTS,
    PART_LSES,
    OUT,
    LSE,
    SEQUENCES,
    TILES,
    ENDS,
    CU,
    queries,
    kv_heads,
    items,
    min_blocks,
    programs,
    o_t,
    o_h,
    l_t,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RAGGED: tl.constexpr,
    RETURN_LSE: tl.constexpr,
):
    """One item of one kv head that several of `programs` computed: its parts weighted by their
    sums. Items that one program computed are complete already.
    """
    pid = tl.program_id(0)
    item = pid % items
    head = pid // items
    per_head = tl.load(ENDS + items - 1)
    share = tl.maximum(tl.cdiv(per_head * kv_heads, programs), min_blocks)
    start = head * per_head + tl.load(ENDS + item - 1, mask=item > 0, other=0)
    end = head * per_head + tl.load(ENDS + item)
    begin = start // share
    last = (end - 1) // share
    if (end == start) | (begin >= last):
        return
    sequence = tl.load(SEQUENCES + item)
    if RAGGED:
        first = tl.load(CU + sequence).to(tl.int32)
        count = tl.load(CU + sequence + 1).to(tl.int32) - first
    else:
        first = sequence * queries
        count = queries
    i = tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for program in range(begin, last + 1):
        part = (2 * program + (program == begin)).to(tl.int64)
        lse = tl.load(PART_LSES + part * BLOCK_M + i)
        o = tl.load(PARTS + (part * BLOCK_M + i)[:, None] * BLOCK_V + e[None, :])
        m_new = tl.maximum(m, lse)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m - base) * 1.4426950408889634)
        weight = tl.exp2((lse - base) * 1.4426950408889634)
        acc = acc * alpha[:, None] + o * weight[:, None]
        l = l * alpha + weight
        m = m_new
    non_empty = l > 0.0
    acc = acc / tl.where(non_empty, l, 1.0)[:, None]
    row = tl.load(TILES + item) * BLOCK_M + i
    query = row // GROUP
    valid = query < count
    token = (first + query).to(tl.int64)
    q_head = head * GROUP + row % GROUP
    tl.store(
        OUT + token[:, None] * o_t + q_head[:, None] * o_h + e[None, :],
        acc.to(OUT.dtype.element_ty),
        mask=valid[:, None] & (e < DV)[None, :],
    )
    if RETURN_LSE:
        lse = tl.where(
            non_empty,
            m + tl.log2(tl.where(non_empty, l, 1.0)) * 0.6931471805599453,
            float("-inf"),
        )
        tl.store(LSE + token * l_t + q_head, lse, mask=valid)
