"""Latency percentiles, throughput and use of a simulated fleet."""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.planner.serving.simulation.fleet import FleetRun

PERCENTILES = (50, 90, 99)
_CURVE = 41


def outcome(run: FleetRun) -> dict[str, Any]:
    """Numbers of one simulation.

    `ttft_s` (arrival to first token), `tpot_s` (each further token of a request), `latency_s`
    (arrival to last token) and `queue_s` (arrival to admission) are `{mean, p50, p90, p99}` over
    requests. `tokens_per_s` counts output tokens between the first arrival and the last token.
    `time` are shares of the replicas' time: steps with prompt tokens, decode steps, idle.
    """
    requests, replicas = run.requests, run.replicas
    first = np.array([one.first_token_s - one.arrival for one in requests])
    last = np.array([one.end_s - one.arrival for one in requests])
    queue = np.array([one.admitted_s - one.arrival for one in requests])
    each = np.array(
        [
            (one.end_s - one.first_token_s) / (one.produced - 1)
            for one in requests
            if one.produced > 1
        ]
    )
    span = max(one.end_s for one in requests) - requests[0].arrival
    span = max(span, 1e-9)
    outputs = sum(one.produced for one in requests)
    prompts = sum(one.prompt for one in requests)
    busy = sum(one.totals.busy_s for one in replicas)
    steps = sum(one.totals.steps for one in replicas)
    prefill = sum(one.totals.prefill_s for one in replicas)
    blocks = sum(one.totals.blocks_s / one.limits.blocks for one in replicas)
    whole = span * len(replicas)
    return {
        "requests": len(requests),
        "seconds": span,
        "requests_per_s": len(requests) / span,
        "tokens_per_s": outputs / span,
        "prompt_tokens_per_s": prompts / span,
        "ttft_s": spread(first),
        "tpot_s": spread(each),
        "latency_s": spread(last),
        "queue_s": spread(queue),
        "step_s": busy / max(1, steps),
        "running": {
            "mean": sum(one.totals.running_s for one in replicas) / max(busy, 1e-12),
            "max": max(one.totals.max_running for one in replicas),
        },
        "waiting": {
            "mean": sum(one.totals.waiting_s for one in replicas) / max(busy, 1e-12),
            "max": max(one.totals.max_waiting for one in replicas),
        },
        "cache_use": {
            "mean": blocks / max(busy, 1e-12),
            "max": max(one.totals.max_blocks / one.limits.blocks for one in replicas),
        },
        "preemptions": sum(one.totals.preemptions for one in replicas),
        "recomputed_tokens": sum(one.totals.recomputed_tokens for one in replicas),
        "time": {
            "prefill": prefill / whole,
            "decode": (busy - prefill) / whole,
            "idle": max(0.0, 1 - busy / whole),
        },
        "curve": {
            "percent": np.linspace(0, 100, _CURVE).tolist(),
            "ttft_s": _quantiles(first),
            "tpot_s": _quantiles(each),
        },
    }


def spread(values: np.ndarray[Any, Any]) -> dict[str, float] | None:
    """`{mean, p50, p90, p99}`; None without values."""
    if not len(values):
        return None
    points = np.percentile(values, PERCENTILES)
    named = {f"p{level}": float(value) for level, value in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(values.mean()), **named}


def _quantiles(values: np.ndarray[Any, Any]) -> list[float]:
    return np.percentile(values, np.linspace(0, 100, _CURVE)).tolist() if len(values) else []
