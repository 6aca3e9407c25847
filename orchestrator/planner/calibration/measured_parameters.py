"""Parameters that a benchmark run measures directly: links and matrix products.

A measurement line may have `measured.link {where: intra|inter, bytes_per_s, latency_s}` and
`measured.gemm_tflops`. The fit starts at these values and barely changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.parameters import PARAMETERS

SPREAD = 0.05  # of a measured parameter, in log space: the spread of repeated link measurements


def measured_parameters(pairs: Sequence[tuple[Request, Mapping[str, Any]]]) -> dict[str, float]:
    """Medians over lines, clipped to the parameter's bounds; empty without such measurements.

    The efficiency of a link is the measured ring bandwidth over the cluster's or device's one.
    """
    samples: dict[str, list[float]] = {}
    for request, measured in pairs:
        entry, cluster = request.entry, request.cluster
        link = measured.get("link")
        where = link.get("where") if isinstance(link, Mapping) else None
        if isinstance(link, Mapping) and where in ("intra", "inter"):
            bandwidth = getattr(cluster, f"{where}_node_gb_per_s") or getattr(
                entry, f"{where}_node_gb_per_s"
            )
            _add_sample(samples, f"{where}_efficiency", link.get("bytes_per_s"), bandwidth * 1e9)
            _add_sample(samples, f"{where}_latency_s", link.get("latency_s"), 1.0)
        if entry.kind == "gpu":  # the peak of a CPU is itself a measured matrix product
            peak = entry.peak_tflops.get("bf16") or max(entry.peak_tflops.values())
            _add_sample(samples, "gemm_efficiency", measured.get("gemm_tflops"), peak)
    return {
        name: float(np.clip(np.median(values), PARAMETERS[name].low, PARAMETERS[name].high))
        for name, values in samples.items()
    }


def _add_sample(samples: dict[str, list[float]], name: str, value: Any, unit: float) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        samples.setdefault(name, []).append(value / unit)
