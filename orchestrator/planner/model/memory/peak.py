"""Peak memory of each pipeline rank, the largest of them, and whether the plan fits its device.

Sums states, activations and buffers. Does not depend on their formulas.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, declare_inputs, term

declare_inputs("", "measured run: 1 if its peak is of reserved bytes", "reports_reserved")


@term("B", "params + reference + grads + optimizer + activations + logits + buffers + rollouts")
def explained_bytes(
    params_bytes: Column,
    reference_bytes: Column,
    grads_bytes: Column,
    optimizer_bytes: Column,
    activations_bytes: Column,
    logits_bytes: Column,
    buffers_bytes: Column,
    rollout_bytes: Column,
) -> Column:
    """Bytes that the terms explain, (S, n)."""
    states = params_bytes + grads_bytes + optimizer_bytes + reference_bytes
    return np.asarray(states + (activations_bytes + logits_bytes) + buffers_bytes + rollout_bytes)


@term(
    "B",
    "unattributed_fraction x explained; on a CPU process_bytes",
    "what measured runs hold beyond all terms; on a CPU the process is in the device's memory too",
)
def unattributed_bytes(
    explained_bytes: Column, unattributed_fraction: Column, process_bytes: Column, is_cpu: Column
) -> Column:
    """Bytes that no term explains, (S, n); on a CPU the process itself."""
    on_cpu = is_cpu == 1
    beyond = explained_bytes * np.where(on_cpu, 0.0, unattributed_fraction)
    return np.asarray(beyond + np.where(on_cpu, process_bytes, 0.0))


@term("B", "explained + unattributed")
def stage_total_bytes(explained_bytes: Column, unattributed_bytes: Column) -> Column:
    """Peak allocated bytes, (S, n)."""
    return explained_bytes + unattributed_bytes


@term(
    "B",
    "stage_total_bytes x (1 + allocator_overhead), at most the usable bytes if total is; on a CPU "
    "stage_total_bytes",
    "torch's caching allocator reserves whole segments: memory_stats reserved_bytes.all.peak, "
    "which nvidia-smi shows besides the context",
)
def stage_reserved_bytes(
    stage_total_bytes: Column, allocator_overhead: Column, usable_bytes: Column, is_cpu: Column
) -> Column:
    """Peak reserved bytes, (S, n): allocated ones and the fragments between them."""
    reserved = stage_total_bytes * (1 + np.where(is_cpu == 1, 0.0, allocator_overhead))
    # when memory runs out, the allocator frees unused segments and retries
    limit = np.maximum(usable_bytes, stage_total_bytes)
    return np.asarray(np.where(is_cpu == 1, reserved, np.minimum(reserved, limit)))


@term("B", "largest of stage_reserved_bytes")
def reserved_bytes(stage_reserved_bytes: Column) -> Column:
    """Peak reserved bytes of the worst rank, (n,)."""
    return np.asarray(stage_reserved_bytes.max(axis=0))


@term("B", "reserved_bytes for runs that report it, else total_bytes", "measured.peak_kind")
def reported_peak_bytes(
    reserved_bytes: Column, total_bytes: Column, reports_reserved: Column
) -> Column:
    """The peak that a measured run reports, (n,)."""
    return np.where(reports_reserved > 0, reserved_bytes, total_bytes)


@term("B", "largest of stage_total_bytes")
def total_bytes(stage_total_bytes: Column) -> Column:
    """Peak of the worst rank, (n,)."""
    return np.asarray(stage_total_bytes.max(axis=0))


@term("", "pipeline rank with the largest stage_total_bytes")
def worst_stage(stage_total_bytes: Column, stage: Column) -> Column:
    """The rank with the largest peak, (n,); the first of equal ones."""
    row = stage_total_bytes.argmax(axis=0)
    return np.asarray(
        np.take_along_axis(np.broadcast_to(stage, stage_total_bytes.shape), row[None], axis=0)[0]
    )


@term("B", "capacity x (1 - fragmentation) - context, on a GPU")
def usable_bytes(
    capacity_bytes: Column, fragmentation: Column, context_bytes: Column, is_cpu: Column
) -> Column:
    """Bytes that the allocator can use, (n,)."""
    return np.where(
        is_cpu == 1, capacity_bytes, capacity_bytes * (1 - fragmentation) - context_bytes
    )


@term("B", "usable - total")
def headroom_bytes(usable_bytes: Column, total_bytes: Column) -> Column:
    """Free bytes, (n,); negative if the plan does not fit."""
    return usable_bytes - total_bytes


@term("", "1 if headroom is not negative and host_bytes fit in host_room_bytes")
def fits(headroom_bytes: Column, host_bytes: Column, host_room_bytes: Column) -> Column:
    """Whether the plan fits, (n,); host memory counts only if the cluster states it."""
    return np.asarray((headroom_bytes >= 0) & (host_bytes <= host_room_bytes))
