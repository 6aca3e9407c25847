"""Device functions that the attention kernels share: tile order, visible ranges, masks, loads and
stores.

Head dims that are not powers of two are held in two parts (192 as 128 + 64).
"""

from __future__ import annotations

from kernels.jit import jit, tl


@jit
def schedule(pid, tiles, lanes, section):
    """(tile, lane) of a program; within a section the lanes' last tiles come first.

    A lane is one head of one sequence (ragged batches: one head). A section is as many lanes as
    have keys and values that together fit the L2 cache. Within it the last tiles, which see the
    most keys under a causal mask, start first.
    """
    which = pid // (tiles * section)
    rest = pid - which * tiles * section
    size = tl.minimum(section, lanes - which * section)
    tile = tiles - 1 - rest // size
    return tile, which * section + rest % size


@jit
def sequence_span(CU, sequence, total):
    """(start, length) of a sequence, clamped to the tensor whatever `cu` holds, so that no read is
    out of bounds.
    """
    start = tl.minimum(tl.maximum(tl.load(CU + sequence), 0), total)
    end = tl.minimum(tl.maximum(tl.load(CU + sequence + 1), start), total)
    return start, end - start


@jit
def visible_key_range(
    first, last, len_k, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr
):
    """Keys that queries at positions first..last see: partly [low, full_low), fully [full_low,
    full_high), partly [full_high, high). All but `high` are multiples of BLOCK.
    """
    high = len_k
    full_high = len_k // BLOCK * BLOCK
    if CAUSAL:
        high = tl.minimum(high, tl.maximum(last + 1, 0))
        full_high = tl.minimum(full_high, tl.maximum(first + 1, 0) // BLOCK * BLOCK)
    low = 0
    full_low = 0
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // BLOCK * BLOCK
        full_low = (tl.maximum(last - window + 1, 0) + BLOCK - 1) // BLOCK * BLOCK
        full_low = tl.minimum(full_low, (high + BLOCK - 1) // BLOCK * BLOCK)
        full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high


@jit
def visible_query_range(
    first,
    last,
    len_q,
    shift,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same ranges of queries that see keys first..last: query i has position i + shift among
    the keys.
    """
    low = 0
    full_low = 0
    if CAUSAL:
        low = tl.maximum(first - shift, 0) // BLOCK * BLOCK
        full_low = (tl.maximum(last - shift, 0) + BLOCK - 1) // BLOCK * BLOCK
    high = len_q
    # queries past the end have probability zero: no mask needed
    full_high = (len_q + BLOCK - 1) // BLOCK * BLOCK
    if WINDOWED:
        high = tl.minimum(high, tl.maximum(last + window - shift, 0))
        full_high = tl.minimum(full_high, tl.maximum(first + window - shift, 0) // BLOCK * BLOCK)
    full_low = tl.minimum(full_low, (high + BLOCK - 1) // BLOCK * BLOCK)
    full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high


@jit
def visible(positions, keys, len_k, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Mask of keys below len_k that queries at `positions` see; the arguments broadcast."""
    mask = keys < len_k
    if CAUSAL:
        mask = mask & (keys <= positions)
    if WINDOWED:
        mask = mask & (keys > positions - window)
    return mask


@jit
def load_tile(
    X,
    row,
    stride,
    rows,
    ROWS: tl.constexpr,
    FROM: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECK: tl.constexpr,
):
    """[ROWS, COLS] from row `row` and column FROM; zeros past column WIDTH and, if CHECK, past
    `rows` rows.
    """
    r = tl.arange(0, ROWS)
    c = FROM + tl.arange(0, COLS)
    at = X + tl.cast(row, tl.int64) * stride + r[:, None] * stride + c[None, :]
    if CHECK:
        if FROM + COLS > WIDTH:
            return tl.load(at, mask=(row + r < rows)[:, None] & (c < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at, mask=(row + r < rows)[:, None], other=0.0)
    else:
        if FROM + COLS > WIDTH:
            return tl.load(at, mask=(c < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at)


@jit
def store_tile(
    X,
    x,
    row,
    stride,
    rows,
    ROWS: tl.constexpr,
    FROM: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes [ROWS, COLS], cast to X's dtype, within rows and columns."""
    r = tl.arange(0, ROWS)
    c = FROM + tl.arange(0, COLS)
    at = X + tl.cast(row, tl.int64) * stride + r[:, None] * stride + c[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=(row + r < rows)[:, None] & (c < WIDTH)[None, :])


@jit
def tanh_from_exponent(x):
    """tanh(y) for x = 2 · log2(e) · y by the hardware's exp2, without libdevice; saturates, never
    overflows.
    """
    return 1.0 - 2.0 / (1.0 + tl.exp2(x))
