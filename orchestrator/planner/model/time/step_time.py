"""Step time: compute of the slowest stage, exposed communication, bubble, optimizer, overhead.

Does not depend on FLOPs or memory.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import OFFLOAD
from orchestrator.planner.model.terms import Column, term


@term("s", "correction x micro-batches x compute of the slowest stage")
def compute_s(
    stage_compute_s: Column, stage_time_s: Column, accumulation: Column, correction: Column
) -> Column:
    """Compute of the slowest stage per step, (n,)."""
    worst = stage_time_s.argmax(axis=0)[None]
    shape = np.broadcast_shapes(stage_compute_s.shape, stage_time_s.shape)
    return np.asarray(
        np.take_along_axis(np.broadcast_to(stage_compute_s, shape), worst, 0)[0]
        * accumulation
        * correction
    )


@term(
    "s",
    "jitter x compute_s x log2(nodes of the plan)",
    "all nodes wait for the slowest one when gradients are reduced",
)
def waiting_s(
    compute_s: Column, jitter: Column, devices: Column, devices_per_node: Column
) -> Column:
    """Seconds per step spent waiting for the slowest node, (n,)."""
    return np.asarray(jitter * compute_s * np.log2(np.maximum(devices / devices_per_node, 1)))


@term(
    "s",
    "correction x (micro-batches x slowest_stage_s + exposed gradient and parameter traffic) - "
    "compute_s + waiting_s + streaming_exposed_s",
)
def exposed_comm_s(
    slowest_stage_s: Column,
    accumulation: Column,
    compute_s: Column,
    stage_dp_exposed_s: Column,
    waiting_s: Column,
    streaming_exposed_s: Column,
    correction: Column,
) -> Column:
    """Exposed communication per step, (n,)."""
    stage = slowest_stage_s * accumulation + stage_dp_exposed_s.max(axis=0)
    return np.asarray(correction * stage - compute_s + waiting_s + streaming_exposed_s)


@term(
    "B",
    "bytes the optimizer moves per parameter: gradient read three times, states read and written",
    "unscaling and norm each read gradients again; Adam reads and writes master weights and "
    "moments",
)
def update_bytes(
    grad_bytes: Column, master_bytes: Column, moment_bytes: Column, param_bytes: Column
) -> Column:
    """Bytes that the optimizer moves per parameter."""
    return np.asarray(3 * grad_bytes + 2 * master_bytes + 2 * moment_bytes + 2 * param_bytes)


@term(
    "s",
    "correction x updated_params x (1 + value_parameters_share) x update_bytes / "
    "(memory_bandwidth x optimizer_efficiency); offloaded: by the host",
    "offloaded states: gradients and parameters cross the host link, Adam runs at a CPU's memory "
    "bandwidth",
)
def optimizer_s(
    updated_params: Column,
    update_bytes: Column,
    memory_bandwidth: Column,
    optimizer_efficiency: Column,
    offload: Column,
    grad_bytes: Column,
    param_bytes: Column,
    host_link_bytes_per_s: Column,
    host_update_bytes_per_s: Column,
    nvme_bytes_per_s: Column,
    correction: Column,
    value_parameters_share: Column,
) -> Column:
    """Seconds of the optimizer step, (n,); of PPO also the value model's."""
    on_device = update_bytes / (memory_bandwidth * optimizer_efficiency)
    on_host = (
        grad_bytes + param_bytes
    ) / host_link_bytes_per_s + update_bytes / host_update_bytes_per_s
    on_host = on_host + (offload == OFFLOAD["nvme"]) * update_bytes / nvme_bytes_per_s
    updated = updated_params.max(axis=0) * (1 + value_parameters_share)
    return np.asarray(correction * updated * np.where(offload > 0, on_host, on_device))


@term(
    "FLOP",
    "model_flops with attention counted in full (6N + 12Lhs), over all devices",
    "the convention of the best published MFU",
)
def peer_flops(
    model_flops: Column,
    attention_flops_per_token: Column,
    causal_flops: Column,
    step_tokens: Column,
) -> Column:
    """Model FLOPs per step by the convention of published MFU, (n,)."""
    uncounted = attention_flops_per_token * (2 / (2 - causal_flops) - 1)
    return np.asarray(model_flops + uncounted * step_tokens)


@term(
    "s",
    "0 if a calibration has runs of the framework on the device; else the norm of order peer_norm "
    "of the explained time and peer_flops / (devices x peak_flops x best_peer_mfu), minus the "
    "explained time",
    "no prediction without a calibration is faster than the best published run; a norm keeps the "
    "order of plans",
)
def peer_limit_s(
    compute_s: Column,
    exposed_comm_s: Column,
    bubble_s: Column,
    optimizer_s: Column,
    step_overhead_s: Column,
    peer_flops: Column,
    devices: Column,
    peak_flops: Column,
    best_peer_mfu: Column,
    peer_norm: Column,
) -> Column:
    """Seconds per step that no term explains but every published run took, (n,)."""
    if not np.any(peer_norm):
        return np.zeros(())
    explained = compute_s + exposed_comm_s + bubble_s + optimizer_s + step_overhead_s
    least = peer_flops / (devices * peak_flops * best_peer_mfu)
    order = np.where(peer_norm > 0, peer_norm, 1.0)
    limited = np.logaddexp(0.0, order * np.log(np.maximum(least / explained, 1e-9))) / order
    return np.asarray(np.where(peer_norm > 0, explained * np.expm1(limited), 0.0))


@term("s", "correction x step_overhead_s + peer_limit_s")
def other_s(step_overhead_s: Column, peer_limit_s: Column, correction: Column) -> Column:
    """Other seconds per step."""
    return np.asarray(correction * step_overhead_s + peer_limit_s)


@term("s", "compute_s + exposed_comm_s + bubble_s + optimizer_s + rollout_s + other_s")
def step_time_s(
    compute_s: Column,
    exposed_comm_s: Column,
    bubble_s: Column,
    optimizer_s: Column,
    rollout_s: Column,
    other_s: Column,
) -> Column:
    """Seconds per step, (n,)."""
    training = compute_s + exposed_comm_s + bubble_s + optimizer_s
    return np.asarray(training + rollout_s + other_s)


@term(
    "",
    "bubble_s / (correction x micro-batches of the slowest stage + bubble_s)",
    "of the pipeline's own time; even stages: (p - 1)/(m + p - 1) for 1F1B (arXiv 2104.04473)",
)
def bubble_fraction(
    bubble_s: Column, slowest_stage_s: Column, accumulation: Column, correction: Column
) -> Column:
    """Share of the bubble in the pipeline's time, (n,)."""
    return np.asarray(bubble_s / (correction * slowest_stage_s * accumulation + bubble_s))
