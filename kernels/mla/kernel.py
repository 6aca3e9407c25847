"""Split-K attention on latents: a tile of latents is loaded once and used as keys and values of all
heads.

Rows are the heads times a sequence's query tokens. `mla_decode_combine_kernel` merges the
partial results.
"""

from __future__ import annotations

from kernels.jit import dot, jit, softmax_step, tl


@jit
def mla_decode_kernel(
    Q,
    QR,
    C,
    OUT,
    LSE,
    TABLE,
    LENS,
    scale,
    queries,
    heads,
    splits,
    q_t,
    q_h,
    r_t,
    r_h,
    c_b,
    c_s,
    o_p,
    o_t,
    o_h,
    l_p,
    l_t,
    table_b,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """OUT [parts, T, H, R] and LSE [parts, T, H]. C's rows hold R columns of latent, then P of
    rotary key. scale includes log2(e).
    """
    rows = queries * heads
    tiles = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % tiles
    part = pid // tiles % splits
    sequence = pid // (tiles * splits)
    length = tl.load(LENS + sequence).to(tl.int32)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < rows
    query = row // heads
    head = row % heads
    token = (sequence * queries + query).to(tl.int64)
    c = tl.arange(0, BLOCK_R)
    r = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    q = tl.load(
        Q + token[:, None] * q_t + head[:, None] * q_h + c[None, :],
        mask=valid[:, None] & (c < R)[None, :],
        other=0.0,
    )
    qr = tl.load(
        QR + token[:, None] * r_t + head[:, None] * r_h + r[None, :],
        mask=valid[:, None] & (r < P)[None, :],
        other=0.0,
    )
    position = length - queries + query
    newest = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // heads, queries - 1)
    high = tl.maximum(length - queries + newest + 1, 0)
    keys_per_part = tl.cdiv(tl.cdiv(high, BLOCK_N), splits) * BLOCK_N
    start = part * keys_per_part
    stop = tl.minimum(start + keys_per_part, high)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for at in range(start, stop, BLOCK_N):
        key = at + n
        inside = key < stop
        # a tile is in one block: one address and offsets, instead of one address per row
        if PAGE % BLOCK_N == 0:
            block = tl.load(TABLE + sequence * table_b + at // PAGE).to(tl.int64)
            rows_at = C + block * c_b + (at % PAGE + n) * c_s
        else:
            blocks = tl.load(TABLE + sequence * table_b + key // PAGE, mask=inside, other=0).to(
                tl.int64
            )
            rows_at = C + blocks * c_b + (key % PAGE) * c_s
        x = tl.load(
            rows_at[:, None] + c[None, :], mask=inside[:, None] & (c < R)[None, :], other=0.0
        )
        k = tl.load(
            rows_at[:, None] + (R + r)[None, :], mask=inside[:, None] & (r < P)[None, :], other=0.0
        )
        s = dot(qr, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
        s = dot(q, tl.trans(x), s, UPCAST) * scale
        mask = inside[None, :] & (key[None, :] <= position[:, None])
        m, l, alpha, p = softmax_step(m, l, tl.where(mask, s, float("-inf")), 1.0)
        acc = dot(p.to(x.dtype), x, acc * alpha[:, None], UPCAST)

    non_empty = l > 0.0
    acc = acc * (1.0 / tl.where(non_empty, l, 1.0))[:, None]
    lse = tl.where(
        non_empty, (m + tl.log2(tl.where(non_empty, l, 1.0))) * 0.6931471805599453, float("-inf")
    )
    tl.store(
        OUT + part.to(tl.int64) * o_p + token[:, None] * o_t + head[:, None] * o_h + c[None, :],
        acc.to(OUT.dtype.element_ty),
        mask=valid[:, None] & (c < R)[None, :],
    )
    tl.store(LSE + part.to(tl.int64) * l_p + token * l_t + head, lse, mask=valid)
