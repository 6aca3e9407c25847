"""Peak memory of each pipeline rank, the worst of them, and whether the plan fits its device.

Adds up what states, activations and buffers say; knows none of their formulas.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term


@term("B", "params + grads + optimizer + activations + logits + buffers")
def explained_bytes(
    params_bytes: Column,
    grads_bytes: Column,
    optimizer_bytes: Column,
    activations_bytes: Column,
    logits_bytes: Column,
    buffers_bytes: Column,
) -> Column:
    """(S, n)."""
    states = params_bytes + grads_bytes + optimizer_bytes
    return np.asarray(states + (activations_bytes + logits_bytes) + buffers_bytes)


@term(
    "B",
    "unattributed_fraction x explained",
    "what measured runs hold beyond every line that is understood",
)
def unattributed_bytes(
    explained_bytes: Column, unattributed_fraction: Column, is_cpu: Column
) -> Column:
    """(S, n)."""
    return np.asarray(explained_bytes * np.where(is_cpu == 1, 0.0, unattributed_fraction))


@term("B", "explained + unattributed")
def stage_total_bytes(explained_bytes: Column, unattributed_bytes: Column) -> Column:
    """(S, n). Peak bytes allocated."""
    return explained_bytes + unattributed_bytes


@term("B", "most over pipeline ranks of stage_total_bytes")
def total_bytes(stage_total_bytes: Column) -> Column:
    """(n,)."""
    return np.asarray(stage_total_bytes.max(axis=0))


@term("", "pipeline rank that holds the most")
def worst_stage(stage_total_bytes: Column, stage: Column) -> Column:
    """(n,). The first of equal ones."""
    row = stage_total_bytes.argmax(axis=0)
    return np.asarray(
        np.take_along_axis(np.broadcast_to(stage, stage_total_bytes.shape), row[None], axis=0)[0]
    )


@term("B", "capacity x (1 - fragmentation) - context, on a GPU")
def usable_bytes(
    capacity_bytes: Column, fragmentation: Column, context_bytes: Column, is_cpu: Column
) -> Column:
    return np.where(
        is_cpu == 1, capacity_bytes, capacity_bytes * (1 - fragmentation) - context_bytes
    )


@term("B", "usable - total")
def headroom_bytes(usable_bytes: Column, total_bytes: Column) -> Column:
    """(n,). Negative where the plan does not fit."""
    return usable_bytes - total_bytes


@term("", "1 where neither the device's headroom nor what its host is to hold says no")
def fits(headroom_bytes: Column, host_bytes: Column, host_room_bytes: Column) -> Column:
    """(n,). A host whose memory nobody told holds everything."""
    return np.asarray((headroom_bytes >= 0) & (host_bytes <= host_room_bytes))
