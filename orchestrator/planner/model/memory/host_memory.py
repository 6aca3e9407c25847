"""What offloading asks of the host's memory, counted for each of its devices.

Knows which states are away from the device; nothing of how they come and go, nor of a host's other
work.
"""

from __future__ import annotations

import numpy as np

import orchestrator.planner.model.memory.model_states  # noqa: F401  its terms are used by name
from orchestrator.planner.model.inputs import OFFLOAD
from orchestrator.planner.model.terms import Column, term


@term(
    "B",
    "all states - those on the device; none where they lie on disk (nvme), staging buffers aside",
    "ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857",
)
def stage_host_bytes(
    all_params_bytes: Column,
    all_grads_bytes: Column,
    all_optimizer_bytes: Column,
    params_bytes: Column,
    grads_bytes: Column,
    optimizer_bytes: Column,
    offload: Column,
) -> Column:
    """(S, n)."""
    if not np.any((offload > OFFLOAD["none"]) & (offload < OFFLOAD["nvme"])):
        return np.zeros((1, 1))
    states = all_params_bytes + all_grads_bytes + all_optimizer_bytes
    away = states - (params_bytes + grads_bytes + optimizer_bytes)
    return np.where(offload == OFFLOAD["nvme"], 0.0, away)


@term("B", "largest of stage_host_bytes: host memory for one device")
def host_bytes(stage_host_bytes: Column) -> Column:
    """(n,)."""
    return np.asarray(stage_host_bytes.max(axis=0))


@term(
    "B",
    "host memory as the cluster tells it, for one device; on a CPU what the device itself has left",
)
def host_room_bytes(host_capacity_bytes: Column, headroom_bytes: Column, is_cpu: Column) -> Column:
    """(n,). Infinite where nobody told it."""
    return np.where(is_cpu == 1, headroom_bytes, host_capacity_bytes)
