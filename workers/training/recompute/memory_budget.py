"""How many bytes of activations fit on a device: the plan's budget, or what the rest leaves free.

Does not depend on what is saved.
"""

from __future__ import annotations

from typing import Literal

import torch

from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.train import OptimizerSpec
from workers.metrics.memory import capacity_bytes, held_bytes
from workers.training.parallel.parallelize import Parallel

# a second trained module: none, with allocated weights, or allocated later
OtherModule = Literal["present", "later"] | None

# optimizer state in bytes per parameter
_STATE_BYTES = {
    "adamw": 8,
    "adam": 8,
    "adamw8bit": 2,
    "adam8bit": 2,
    "lion": 4,
    "muon": 8,
    "sgd": 4,
    "adafactor": 1,
}
# the rest covers fragmentation and library workspaces
_USABLE = 0.9


def in_flight(plan: ParallelPlan, rank: int) -> float:
    """Micro-batches whose activations pipeline rank `rank` holds at most, in full ranks.

    A chunk of several virtual stages counts as its share. Peaks of torch's schedules (arXiv
    2205.05198, section 5; 2401.10241).
    """
    pp, v, m = plan.pp, plan.virtual_stages, plan.accumulation
    if pp == 1:
        return 1.0
    each_round = m // max(1, m // pp)
    return {
        "naive": 1.0,
        "gpipe": float(m),
        "1f1b": float(min(m, pp - rank)),
        "pipedream": float(pp - rank),
        "interleaved_1f1b": min(v * m, (v - 1) * each_round + 2 * (pp - 1 - rank) + 1) / v,
        "zb1p": min(v * m, (v - 1) * each_round + pp) / v,
        "zbv": min(m, pp, (m + 1 + rank) / 2),
        "dualpipev": pp + 0.5,
    }[plan.schedule]


def activation_room_bytes(
    parallel: Parallel,
    optimizer: OptimizerSpec,
    *,
    local_world_size: int,
    outside_bytes: int,
    working_bytes: int,
    other: OtherModule = None,
) -> int:
    """Device memory left for activations; may be negative.

    Subtracts weights, gradients, optimizer state, `outside_bytes` saved outside of blocks, and
    `working_bytes` of a block's backward pass. `other`: a second trained module of the same size,
    whose weights are allocated already or later; its activations are never held at the same time.
    """
    plan, device = parallel.plan, parallel.world.device
    parameters = list(parallel.parameters().values())
    trained, weights = held_bytes(parameters), held_bytes(parallel.stored_weights())
    state = sum(each.numel() for each in parameters) * _STATE_BYTES[optimizer.name]
    state = (
        state * trained // max(1, sum(each.numel() * each.element_size() for each in parameters))
    )
    if plan.zero == 1:
        state //= plan.dp
    if plan.offload != "none":
        state = 0
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        usable = int(
            _USABLE * (free + torch.cuda.memory_reserved(device))
        ) - torch.cuda.memory_allocated(device)
    else:
        usable = int(_USABLE * capacity_bytes(device, local_world_size=local_world_size)) - weights
    if other is not None:
        usable -= trained + state
        if other == "later" or device.type == "cpu":
            usable -= weights
    # gradients are as large as trained weights
    return usable - trained - state - outside_bytes - working_bytes
