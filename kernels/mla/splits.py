"""A sequence's keys split over programs: number of splits, and the merge of their results."""

from __future__ import annotations

from torch import Tensor

from kernels.jit import cdiv, jit, next_power_of_2, tl

MAX_SPLITS = 64
KEYS_PER_SPLIT = 256
"""A split with fewer keys costs more to combine than it saves."""


def choose_splits(programs: int, longest: int, sm_count: int) -> int:
    """Splits of each sequence: two programs per multiprocessor, at least KEYS_PER_SPLIT keys
    each.
    """
    target = cdiv(2 * sm_count, max(1, programs))
    return max(1, min(target, cdiv(longest, KEYS_PER_SPLIT), MAX_SPLITS))


def combine_parts(
    parts: Tensor, part_lses: Tensor, out: Tensor, lse: Tensor, *, num_warps: int
) -> None:
    """Merges attention of parts [splits, tokens, heads, D_v] and their log-sum-exp into `out` and
    `lse`.
    """
    splits, tokens, heads, values = parts.shape
    mla_decode_combine_kernel[(tokens * heads,)](
        parts,
        part_lses,
        out,
        lse,
        heads,
        splits,
        *parts.stride()[:3],
        *part_lses.stride()[:2],
        *out.stride()[:2],
        DV=values,
        BLOCK_V=max(16, next_power_of_2(values)),
        BLOCK_P=next_power_of_2(splits),
        num_warps=num_warps,
    )


@jit
def mla_decode_combine_kernel(
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
