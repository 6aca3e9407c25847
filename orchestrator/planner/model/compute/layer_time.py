"""How long a layer takes for one micro-batch, passes, recomputation and launches counted, and what
it waits for.

Knows the parts' times from `compute` and `exposed`; nothing of stages.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.inputs import RECOMPUTE, SCHEDULE
from orchestrator.planner.model.terms import Column, term


def held(host: Column, device: Column, stays: Column) -> Column:
    """Time when a host launches what a device runs: the longer, and the share of the shorter that
    is not hidden.
    """
    return np.asarray(np.maximum(host, device) + stays * np.minimum(host, device))


@term(
    "s",
    "forward work run again inside the backward: the attention core, or all but products; 0 "
    "unless selective",
    "arXiv 2205.05198; selective checkpointing of torch keeps products and runs the rest again",
)
def again_s(
    recompute: Column, selective_products: Column, attention_core_s: Column, elementwise_s: Column
) -> Column:
    again = np.where(selective_products > 0, elementwise_s, attention_core_s)
    return np.asarray(again * (recompute == RECOMPUTE["selective"]))


@term(
    "s",
    "held(launch, forward) x passes + held(launch, backward), a dense layer and micro-batch, no "
    "communication",
    "full recomputation runs the forward twice, auto a share of it",
)
def dense_layer_s(
    launch_layer_s: Column,
    dense_forward_s: Column,
    dense_backward_s: Column,
    again_s: Column,
    recomputed_share: Column,
    launch_overlap: Column,
) -> Column:
    forward = held(launch_layer_s, dense_forward_s, launch_overlap) * (1 + recomputed_share)
    return np.asarray(forward + held(launch_layer_s, dense_backward_s + again_s, launch_overlap))


@term(
    "s",
    "the same with tensor and context communication, less dense_layer_s",
    "a backward's all-reduce may run beside the weight gradient: tp_exposed of it stays",
)
def dense_layer_exposed_s(
    dense_layer_s: Column,
    launch_layer_s: Column,
    dense_forward_s: Column,
    dense_backward_s: Column,
    again_s: Column,
    recomputed_share: Column,
    launch_overlap: Column,
    tp_reduce_s: Column,
    cp_forward_s: Column,
    cp_backward_s: Column,
    sequence_parallel: Column,
    tp_exposed: Column,
) -> Column:
    ahead = 2 * tp_reduce_s + cp_forward_s
    back = (2 + sequence_parallel) * tp_reduce_s * tp_exposed + cp_backward_s
    forward = held(launch_layer_s, dense_forward_s + ahead, launch_overlap) * (1 + recomputed_share)
    return np.asarray(
        forward
        + held(launch_layer_s, dense_backward_s + again_s + back, launch_overlap)
        - dense_layer_s
    )


@term(
    "s",
    "what a routing layer takes more than a dense one",
    "experts for the dense MLP, more launches",
)
def moe_extra_s(
    moe_mlp_s: Column,
    dense_products_s: Column,
    recomputed_share: Column,
    launch_layer_s: Column,
    moe_launches: Column,
    moe_layers: Column,
) -> Column:
    passes = 3 + recomputed_share
    launches = (2 + recomputed_share) * launch_layer_s * (moe_launches - 1)
    more = np.maximum(passes * (moe_mlp_s - dense_products_s), launches)
    return np.asarray((moe_layers > 0) * more)


@term(
    "s",
    "ep_exposed x ep_forward_s x (1 forward + 1 backward + 1 where experts are recomputed), a "
    "fifth in dualpipev",
    "all-to-alls wait for the router; DualPipe runs them beside the other direction's work (arXiv "
    "2412.19437, 3.2.1)",
)
def moe_exposed_s(
    ep_forward_s: Column,
    recomputed_share: Column,
    ep: Column,
    ep_exposed: Column,
    schedule: Column,
    recompute: Column,
    selective_products: Column,
) -> Column:
    beside = np.where(schedule == SCHEDULE["dualpipev"], 0.2, 1.0)
    again = np.maximum(recomputed_share, (recompute == RECOMPUTE["selective"]) * selective_products)
    return np.asarray((ep > 1) * ep_exposed * beside * ep_forward_s * (2 + again))
