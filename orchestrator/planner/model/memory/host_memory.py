"""Host memory that offloading needs, per device.

Does not depend on transfers, nor on other memory use of the host.
"""

from __future__ import annotations

import numpy as np

import orchestrator.planner.model.memory.model_states  # noqa: F401  registers its terms
from orchestrator.planner.model.columns.codes import OFFLOAD
from orchestrator.planner.model.terms import Column, term


@term(
    "B",
    "all states - those on the device; 0 if they are on disk (nvme), staging buffers excluded",
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
    """Offloaded states of each rank, (S, n)."""
    if not np.any((offload > OFFLOAD["none"]) & (offload < OFFLOAD["nvme"])):
        return np.zeros((1, 1))
    states = all_params_bytes + all_grads_bytes + all_optimizer_bytes
    away = states - (params_bytes + grads_bytes + optimizer_bytes)
    return np.where(offload == OFFLOAD["nvme"], 0.0, away)


@term("B", "largest of stage_host_bytes: host memory per device")
def host_bytes(stage_host_bytes: Column) -> Column:
    """Host memory per device, (n,)."""
    return np.asarray(stage_host_bytes.max(axis=0))


@term(
    "B",
    "host memory per device from the cluster; on a CPU the free memory of the device itself",
)
def host_room_bytes(host_capacity_bytes: Column, headroom_bytes: Column, is_cpu: Column) -> Column:
    """Available host memory per device, (n,); infinite if the cluster does not state it."""
    return np.where(is_cpu == 1, headroom_bytes, host_capacity_bytes)
