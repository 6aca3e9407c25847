"""Products with packed four-bit weights: a shift, a mask, and a bit pattern that is already the
number.

A code or'd into the mantissa of 128 (bf16) or 1024 (fp16) is exactly that number plus the code, so
no integer is converted. The added number and the zero are subtracted from a group's sum through the
sum of its inputs.
"""

from __future__ import annotations

from kernels.jit import dot, jit, tl


@jit
def unpack_codes(q, shift, KIND: tl.constexpr):
    """Nibble `shift` / 4 of each int32 plus an offset given by KIND: 128 (bf16), 1024 (fp16), 0
    (fp32).
    """
    v = (q >> shift) & 15
    if KIND == tl.bfloat16:  # noqa: SIM300
        return (v | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif KIND == tl.float16:  # noqa: SIM300
        return (v | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return v.to(tl.float32)


@jit
def int4_matmul_kernel(
    X,
    Q,
    SCALES,
    ZEROS,
    OUT,
    m,
    n,
    k,
    splits,
    x_m,
    q_k,
    s_g,
    z_g,
    o_p,
    o_m,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """OUT [parts, M, N]: 128 numbers along K per step, 16 per product. OFFSET: the offset of KIND's
    numbers.
    """
    num_n = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    c = (pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = (pid // num_n) % tl.cdiv(m, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = pid // (num_n * tl.cdiv(m, BLOCK_M))
    j = tl.arange(0, 16)
    steps = tl.cdiv(k, 128)
    # splits start at group boundaries
    steps_per_group: tl.constexpr = GROUP // 128 if GROUP > 128 else 1
    steps_per_part = tl.cdiv(tl.cdiv(steps, splits), steps_per_group) * steps_per_group
    x_at = X + r.to(tl.int64)[:, None] * x_m + j[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(
        part * steps_per_part, tl.minimum(part * steps_per_part + steps_per_part, steps)
    ):
        at = Q + (step * 16 + j).to(tl.int64)[:, None] * q_k + c[None, :]
        q = tl.load(at, mask=(c < n)[None, :], other=0)
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        sums = tl.zeros([BLOCK_M], tl.float32)
        for i in tl.static_range(8):
            first = step * 128 + i * 16
            x = tl.load(x_at + first, mask=(r < m)[:, None] & (first + j < k)[None, :], other=0.0)
            product = dot(x, unpack_codes(q, 4 * i, KIND), product, UPCAST)
            sums += tl.sum(x.to(tl.float32), 1)
            if (i * 16 + 16) % (GROUP if GROUP < 128 else 128) == 0:
                inside = c < n
                if GROUP < 128:  # the chunk's last groups may be beyond K
                    inside = inside & (first // GROUP * GROUP < k)
                scale = tl.load(SCALES + (first // GROUP) * s_g + c, mask=inside, other=0.0).to(
                    tl.float32
                )
                zero = tl.load(ZEROS + (first // GROUP) * z_g + c, mask=inside, other=0).to(
                    tl.float32
                )
                acc += (product - sums[:, None] * (zero + OFFSET)[None, :]) * scale[None, :]
                product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                sums = tl.zeros([BLOCK_M], tl.float32)
    at = OUT + part.to(tl.int64) * o_p + r.to(tl.int64)[:, None] * o_m + c[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=(r < m)[:, None] & (c < n)[None, :])


@jit
def int4_dequantize_kernel(
    Q, SCALES, ZEROS, OUT, n, k, q_k, s_g, z_g, o_k, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A chunk of 128 rows and BLOCK_N columns of the weight [K, N], for a product of many rows by
    cuBLAS.
    """
    num_n = tl.cdiv(n, BLOCK_N)
    chunk = tl.program_id(0) // num_n
    c = (tl.program_id(0) % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, 16)
    q = tl.load(
        Q + (chunk * 16 + j).to(tl.int64)[:, None] * q_k + c[None, :],
        mask=(c < n)[None, :],
        other=0,
    )
    for i in tl.static_range(8):
        first = chunk * 128 + i * 16
        inside = (c < n) & (first < k)
        scale = tl.load(SCALES + (first // GROUP) * s_g + c, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(ZEROS + (first // GROUP) * z_g + c, mask=inside, other=0).to(tl.float32)
        w = (((q >> (4 * i)) & 15).to(tl.float32) - zero[None, :]) * scale[None, :]
        row = first + j
        at = OUT + row.to(tl.int64)[:, None] * o_k + c[None, :]
        tl.store(at, w.to(OUT.dtype.element_ty), mask=(row < k)[:, None] & (c < n)[None, :])
