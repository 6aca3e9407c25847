"""Parameters that were measured by themselves, beside step times: links and matrix products of a
benchmark run.

A measurement line may carry `measured.link {where: intra|inter, bytes_per_s, latency_s}` and `measured.gemm_tflops`.
Fits nothing; `calibrate` begins at these values and hardly moves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.parameters import PARAMETERS

SPREAD = 0.05  # of a told parameter, in log space: what repeated measurements of a link differ by


def told_values(pairs: Sequence[tuple[Request, Mapping[str, Any]]]) -> dict[str, float]:
    """Medians over lines, each within the parameter's bounds; empty where no line carries such
    numbers.

    `efficiency` is what rings reached of the bandwidth that the line's cluster or device names.
    """
    found: dict[str, list[float]] = {}
    for request, measured in pairs:
        entry, cluster = request.entry, request.cluster
        link = measured.get("link")
        where = link.get("where") if isinstance(link, Mapping) else None
        if isinstance(link, Mapping) and where in ("intra", "inter"):
            own = getattr(cluster, f"{where}_node_gb_per_s") or getattr(
                entry, f"{where}_node_gb_per_s"
            )
            _put(found, f"{where}_efficiency", link.get("bytes_per_s"), own * 1e9)
            _put(found, f"{where}_latency_s", link.get("latency_s"), 1.0)
        if entry.kind == "gpu":  # a CPU's peak is itself a product that was measured
            peak = entry.peak_tflops.get("bf16") or max(entry.peak_tflops.values())
            _put(found, "gemm_efficiency", measured.get("gemm_tflops"), peak)
    return {
        name: float(np.clip(np.median(values), PARAMETERS[name].low, PARAMETERS[name].high))
        for name, values in found.items()
    }


def _put(found: dict[str, list[float]], name: str, value: Any, of: float) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        found.setdefault(name, []).append(value / of)
