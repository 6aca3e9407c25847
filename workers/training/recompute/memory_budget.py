"""How many bytes of activations a device has room for: the plan's budget, or what all else leaves
of its memory.

Knows what training holds beside activations; does not know what is best kept.
"""

from __future__ import annotations

import torch

from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run_bodies import OptimizerSpec
from workers.metrics.memory import capacity_bytes, held_bytes
from workers.training.parallel.parallelize import Parallel

# of an optimizer's state: bytes a parameter, both moments in fp32 unless its rule says otherwise
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
# allocators fragment, libraries take workspaces
_USABLE = 0.9


def in_flight(plan: ParallelPlan, rank: int) -> float:
    """Micro-batches whose activations pipeline rank `rank` holds at once, at most, in whole ranks:
    a chunk of several
    virtual stages counts as its share. The peaks of the orders that torch runs (arXiv 2205.05198,
    section 5;
    2401.10241)."""
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


def left_bytes(
    parallel: Parallel,
    optimizer: OptimizerSpec,
    *,
    local_world_size: int,
    outside_bytes: int,
    working_bytes: int,
) -> int:
    """Of this device's memory beside weights, gradients, optimizer state, what is kept `outside` of
    blocks, and
    what a block's backward pass works with. Negative where there is nothing left.
    """
    plan, device = parallel.plan, parallel.world.device
    parameters = list(parallel.parameters().values())
    weights = held_bytes(parameters)
    state = sum(each.numel() for each in parameters) * _STATE_BYTES[optimizer.name]
    state = (
        state * weights // max(1, sum(each.numel() * each.element_size() for each in parameters))
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
    return usable - weights - state - outside_bytes - working_bytes
