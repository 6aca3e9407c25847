"""Triton's names, importable without triton, and device functions that kernels share.

Does not depend on any operation or launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernels.runtime import HAS_TRITON, INTERPRET

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

else:

    class _Absent:
        """Placeholder for triton's modules: each attribute and call returns itself, so that kernel
        files import.
        """

        def __getattr__(self, name: str) -> _Absent:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: object, **options: object) -> _Absent:
            return self

    triton = tl = _Absent()

__all__ = [
    "UPCAST",
    "cdiv",
    "dot",
    "fp8_scale",
    "grouped_order",
    "jit",
    "next_power_of_2",
    "ragged_tile",
    "softmax_step",
    "tl",
    "to_fp8",
    "triton",
]

UPCAST = INTERPRET
"""Value that launchers pass for a kernel's UPCAST. Bf16 products are silently wrong in the
interpreter, so operands are cast to fp32 there.
"""


_INTERPRETED = tl.constexpr(INTERPRET)


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, used bare or with its options; without triton, returns the function
    unchanged.
    """
    if not HAS_TRITON:
        return fn if fn is not None else (lambda f: f)
    return triton.jit(fn, **options) if fn is not None else triton.jit(**options)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a·b in fp32; fp32 operands are multiplied exactly, not as TF32, as torch does by
    default.
    """
    if UPCAST:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        out = tl.dot(a, b, acc, input_precision="ieee")
    return out


@jit
def fp8_scale(amax):
    """The fp32 scale of a group with largest magnitude amax: x ~ q · scale; a normal number even if
    amax is 0.
    """
    # 448 times the smallest normal number
    return tl.div_rn(tl.maximum(amax, 5.266214691683848e-36), 448.0)


@jit
def to_fp8(x, scale):
    """x / scale as e4m3, clamped to +-448 first (a plain cast wraps in the interpreter); NaN stays
    NaN.
    """
    q = tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    # The interpreter's cast loses the carry out of the mantissa (127.6 becomes 64): round first.
    if _INTERPRETED:
        bits = q.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        q = tl.where(q == q, bits.to(tl.float32, bitcast=True), q)
    return q.to(tl.float8e4nv)


@jit
def grouped_order(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """(block row, block column) of a program; GROUP_M rows share their columns while those are in
    L2.
    """
    per_group = GROUP_M * num_n
    first = (pid // per_group) * GROUP_M
    rows = tl.minimum(num_m - first, GROUP_M)
    return first + (pid % per_group) % rows, (pid % per_group) // rows


@jit
def softmax_step(m, l, s, scale):
    """One block of online softmax in base 2 (Milakov & Gimelshein 2018, alg. 3).

    m, l [M]: running maximum and sum; s · scale [M, N]: scores times log2(e), scale above 0 (the
    product and the subtraction of the maximum become one multiply-add). Returns the new m and l,
    the factor alpha [M] for the accumulated sums, and p [M, N]. Fully masked rows (all -inf)
    contain no NaN.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - base)
    p = tl.exp2(s * scale - base[:, None])
    return m_new, l * alpha + tl.sum(p, 1), alpha, p


@jit
def ragged_tile(CU, slot, sequences, BLOCK: tl.constexpr):
    """(sequence, tile within it) of a slot, when sequence s starts at slot cu[s] // BLOCK + s.

    These starts leave each sequence at least its own number of tiles, so total // BLOCK +
    sequences slots hold a ragged batch without a list of tiles. At most one slot per sequence is
    empty.
    """
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(CU + middle) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle - 1
    return low, tl.maximum(slot - (tl.load(CU + low) // BLOCK + low), 0)
