"""The bins of the histogram of importance ratios, and the metrics that hold their shares.

Does not depend on how ratios are computed.
"""

from __future__ import annotations

from itertools import pairwise

# inner edges: the bins around 1 are those of clip ranges
RATIO_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
# names of the shares of tokens below the first edge, between edges, and above the last
RATIO_BINS = (
    f"ratio/below_{RATIO_EDGES[0]:g}",
    *(f"ratio/{low:g}_to_{high:g}" for low, high in pairwise(RATIO_EDGES)),
    f"ratio/above_{RATIO_EDGES[-1]:g}",
)
