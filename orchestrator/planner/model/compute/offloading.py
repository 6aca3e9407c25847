"""Seconds to stream offloaded weights and gradients per micro-batch, and the exposed part.

Does not include the update on the host, which belongs to the optimizer step.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import OFFLOAD
from orchestrator.planner.model.terms import Column, term


@term(
    "B",
    "2 x weights (forward, backward) + gradients per stage and micro-batch, sharded as they "
    "are stored",
    "ZeRO-Infinity, arXiv 2104.07857, 4: parameters twice in, gradients once out; each rank its "
    "shard",
)
def stage_streamed_bytes(
    stage_params: Column,
    sharded_params: Column,
    params_sharded: Column,
    zero: Column,
    param_bytes: Column,
    grad_bytes: Column,
) -> Column:
    """Bytes streamed per stage and micro-batch, (S, n)."""
    weights = np.where(params_sharded == 1, sharded_params, stage_params) * param_bytes
    return np.asarray(2 * weights + np.where(zero >= 2, sharded_params, stage_params) * grad_bytes)


@term(
    "s",
    "micro-batches x largest of stage_streamed_bytes / host link (nvme: the slower of link and "
    "storage)",
)
def streaming_s(
    stage_streamed_bytes: Column,
    accumulation: Column,
    offload: Column,
    host_link_bytes_per_s: Column,
    nvme_bytes_per_s: Column,
) -> Column:
    """Seconds of streaming per step, (n,); 0 if weights stay on the device."""
    slowest = np.minimum(host_link_bytes_per_s, nvme_bytes_per_s)
    rate = np.where(offload == OFFLOAD["nvme"], slowest, host_link_bytes_per_s)
    step_bytes = accumulation * stage_streamed_bytes.max(axis=0)
    return np.asarray(np.where(offload >= OFFLOAD["all"], step_bytes / rate, 0.0))


@term(
    "s",
    "streaming_s - dp_overlap x compute_s; at least the share of one layer stays exposed",
    "layers are fetched during the previous layer (arXiv 2104.07857, section 6.2)",
)
def streaming_exposed_s(
    streaming_s: Column, compute_s: Column, dp_overlap: Column, layers: Column, pp: Column
) -> Column:
    """Exposed seconds of streaming per step, (n,)."""
    return np.asarray(np.maximum(streaming_s - dp_overlap * compute_s, streaming_s * pp / layers))
