"""The levels of NF4 and of dynamic 8-bit codes, ascending.

Does not quantize.
"""

from __future__ import annotations

from statistics import NormalDist

_DECADES = 7
_OFFSET = 0.9677083  # the largest quantile that is used, (1 - 1/30 + 1 - 1/32) / 2


def nf4_levels() -> list[float]:
    """The 16 levels of NormalFloat 4 (arXiv 2305.14314, appendix E), from -1 to 1.

    Quantiles of the normal distribution: 8 positive ones, zero, and 7 negative ones.
    """
    quantile = NormalDist().inv_cdf
    positive = [quantile(_OFFSET + (0.5 - _OFFSET) * step / 8) for step in range(8)]
    negative = [-quantile(_OFFSET + (0.5 - _OFFSET) * step / 7) for step in range(7)]
    largest = max(positive)
    return sorted(level / largest for level in (*positive, 0.0, *negative))


def dynamic_levels(*, signed: bool) -> list[float]:
    """256 levels of dynamic quantization (arXiv 2110.02861, sections 1.2, 2.1).

    Decades 10⁻⁶ to 1, each with twice the levels of the decade below, linear within. Unsigned
    levels have no zero.
    """
    levels = [1.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        midpoints = (0.1 + 0.9 * (part + 0.5) / parts for part in range(parts))
        levels += [10.0 ** (decade - _DECADES + 1) * middle for middle in midpoints]
    if signed:
        levels += [-value for value in levels[1:]] + [0.0]
    return sorted(levels)
