"""Forward kernel for sm_90: loads by the tensor memory accelerator in a warp group of their own.

Dense batches without window or cap only; other calls run the plain kernel. The compiler splits the
loop between loading and computing warps (tl.range(warp_specialize=True), which on Hopper requires
num_warps=4; 8 disables it).
"""

from __future__ import annotations

from kernels.attention.triton_kernels.tiles import schedule, store_tile
from kernels.jit import dot, jit, softmax_step, tl


@jit
def attention_forward_tma_kernel(
    Q_A,
    Q_B,
    K_A,
    K_B,
    V,
    O,
    LSE,
    q_batch,
    q_head,
    q_col,
    k_batch,
    k_head,
    k_col,
    v_batch,
    v_head,
    v_col,
    o_b,
    o_s,
    o_h,
    lse_b,
    lse_h,
    len_q,
    len_k,
    heads,
    group,
    tiles,
    lanes,
    section,
    scale_log2,
    CAUSAL: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Descriptors over [rows, columns]: blocks [BM, DA] and [BM, DB] of Q (the second like the
    first if DB is 0), the same with BN of K, [BN, DV] of V. A head's first row is batch · x_batch +
    head · x_head, its first column head · x_col. Rows past a sequence may belong to another
    sequence; the launcher ensures that they are finite. O by strides.
    """
    tile, lane = schedule(tl.program_id(0), tiles, lanes, section)
    batch = lane // heads
    head = lane % heads
    kv_head = head // group
    row = tile * BM
    q_row = batch * q_batch + head * q_head + row
    k_row = batch * k_batch + kv_head * k_head
    v_row = batch * v_batch + kv_head * v_head
    q_a = Q_A.load([q_row, head * q_col])
    if DB > 0:
        q_b = Q_B.load([q_row, head * q_col + DA])
    acc = tl.zeros([BM, DV], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    positions = row + len_k - len_q + tl.arange(0, BM)
    high = len_k
    if CAUSAL:
        high = tl.minimum(high, tl.maximum(row + len_k - len_q + BM, 0))
    # One loop, masked throughout: one comparison per element costs less than a second loop, which
    # the compiler would specialize again with its own barriers and registers.
    for start in tl.range(0, high, BN, warp_specialize=WARP_SPECIALIZE):
        k_a = K_A.load([k_row + start, kv_head * k_col])
        raw = dot(q_a, tl.trans(k_a), tl.zeros([BM, BN], tl.float32), UPCAST)
        if DB > 0:
            k_b = K_B.load([k_row + start, kv_head * k_col + DA])
            raw = dot(q_b, tl.trans(k_b), raw, UPCAST)
        keys = start + tl.arange(0, BN)
        mask = (keys < len_k)[None, :]
        if CAUSAL:
            mask = mask & (keys[None, :] <= positions[:, None])
        raw = tl.where(mask, raw, float("-inf"))
        m, l, alpha, p = softmax_step(m, l, raw, scale_log2)
        v = V.load([v_row + start, kv_head * v_col])
        if not UPCAST:
            p = p.to(v.dtype)
        acc = dot(p, v, acc * alpha[:, None], UPCAST)
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    at_o = batch.to(tl.int64) * o_b + head.to(tl.int64) * o_h
    store_tile(O + at_o, acc, row, o_s, len_q, BM, 0, DV, DV)
    rows = row + tl.arange(0, BM)
    at_lse = batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h
    lse = m * 0.6931471805599453 + tl.log(tl.where(l == 0.0, 1.0, l))
    tl.store(LSE + at_lse + rows, lse, mask=rows < len_q)
