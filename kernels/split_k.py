"""Matrix products whose K dimension is split over programs: how many splits, and their sum."""

from __future__ import annotations

from torch import Tensor

from kernels.jit import cdiv, jit, tl

BLOCK = 1024


def choose_splits(programs: int, steps: int, sm_count: int, programs_per_sm: int = 3) -> int:
    """Splits of K: `programs_per_sm` programs per multiprocessor, each with at least four steps."""
    return max(1, min(programs_per_sm * sm_count // max(1, programs), steps // 4))


def sum_splits(parts: Tensor, out: Tensor) -> None:
    """Writes the sum of the partial results parts [splits, M, N] (fp32) to out [M, N]."""
    count = out.numel()
    split_k_sum_kernel[(cdiv(count, BLOCK),)](
        parts, out, count, parts.shape[0], parts.stride(0), BLOCK=BLOCK
    )


@jit
def split_k_sum_kernel(PARTS, OUT, count, splits, p_p, BLOCK: tl.constexpr):
    """The sum of the partial results in a fixed order, whichever program finished first."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for part in range(splits):
        acc += tl.load(PARTS + part * p_p + at, mask=at < count, other=0.0)
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=at < count)
