"""Seconds of a layer per micro-batch: passes, recomputation, launches and exposed communication.

Does not depend on pipeline stages.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import RECOMPUTE, SCHEDULE
from orchestrator.planner.model.terms import Column, term


def host_device_time(host: Column, device: Column, stays: Column) -> Column:
    """Seconds if a host launches what a device runs.

    The longer of the two, plus the exposed share of the shorter.
    """
    return np.asarray(np.maximum(host, device) + stays * np.minimum(host, device))


@term(
    "s",
    "forward work recomputed in the backward: the attention core; all but products; that and "
    "every second product; or every second layer; 0 unless selective",
    "arXiv 2205.05198; selective checkpointing of torch saves products and recomputes the rest; "
    "torchtitan also recomputes wk, wo and w3",
)
def selective_recompute_s(
    recompute: Column,
    selective_products: Column,
    alternate_products: Column,
    alternate_layers: Column,
    attention_core_s: Column,
    attention_products_s: Column,
    dense_products_s: Column,
    elementwise_s: Column,
    dense_forward_s: Column,
    gated: Column,
) -> Column:
    """Seconds of selective recomputation per layer."""
    half = attention_products_s / 2 + dense_products_s / (2 + gated)
    again = np.where(
        selective_products > 0, elementwise_s + alternate_products * half, attention_core_s
    )
    again = np.where(alternate_layers > 0, dense_forward_s / 2, again)
    return np.asarray(again * (recompute == RECOMPUTE["selective"]))


@term(
    "s",
    "host_device_time of launch and forward x passes, plus that of launch and backward; per "
    "micro-batch, without communication",
    "full recomputation runs the forward twice, auto a share of it",
)
def dense_layer_s(
    launch_layer_s: Column,
    dense_forward_s: Column,
    dense_backward_s: Column,
    selective_recompute_s: Column,
    recomputed_share: Column,
    launch_overlap: Column,
) -> Column:
    """Seconds of a dense layer, both passes, without communication."""
    forward = host_device_time(launch_layer_s, dense_forward_s, launch_overlap) * (
        1 + recomputed_share
    )
    return np.asarray(
        forward
        + host_device_time(launch_layer_s, dense_backward_s + selective_recompute_s, launch_overlap)
    )


@term(
    "s",
    "dense_layer_s with tensor and context communication, minus dense_layer_s",
    "a backward's all-reduce may overlap with the weight gradient: the share tp_exposed does not; "
    "asynchronous tp overlaps each product with its traffic but for async_tp_exposed",
)
def dense_layer_exposed_s(
    dense_layer_s: Column,
    launch_layer_s: Column,
    dense_forward_s: Column,
    dense_backward_s: Column,
    selective_recompute_s: Column,
    recomputed_share: Column,
    launch_overlap: Column,
    tp_reduce_s: Column,
    cp_forward_s: Column,
    cp_backward_s: Column,
    sequence_parallel: Column,
    tp_exposed: Column,
    async_tp: Column,
    async_tp_exposed: Column,
) -> Column:
    """Exposed communication of a dense layer, both passes."""
    share = np.where(async_tp > 0, async_tp_exposed, 1.0)
    ahead = 2 * tp_reduce_s * share + cp_forward_s
    back = (2 + sequence_parallel) * tp_reduce_s * tp_exposed * share + cp_backward_s
    forward = host_device_time(launch_layer_s, dense_forward_s + ahead, launch_overlap) * (
        1 + recomputed_share
    )
    return np.asarray(
        forward
        + host_device_time(
            launch_layer_s, dense_backward_s + selective_recompute_s + back, launch_overlap
        )
        - dense_layer_s
    )


@term(
    "s",
    "seconds of an MoE layer beyond a dense one",
    "experts instead of the dense MLP, more launches",
)
def moe_extra_s(
    moe_mlp_s: Column,
    dense_products_s: Column,
    recomputed_share: Column,
    launch_layer_s: Column,
    moe_launches: Column,
    moe_layers: Column,
    block_backward: Column,
) -> Column:
    """Seconds of an MoE layer beyond a dense one."""
    passes = 1 + block_backward + recomputed_share
    launches = (2 + recomputed_share) * launch_layer_s * (moe_launches - 1)
    more = np.maximum(passes * (moe_mlp_s - dense_products_s), launches)
    return np.asarray((moe_layers > 0) * more)


@term(
    "s",
    "ep_exposed x ep_forward_s x (1 forward + 1 backward + 1 if experts are recomputed), a "
    "fifth of it in dualpipev",
    "all-to-alls wait for the router; DualPipe overlaps them with the other direction (arXiv "
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
    """Exposed all-to-alls of an MoE layer, both passes."""
    exposed = np.where(schedule == SCHEDULE["dualpipev"], 0.2, 1.0)
    again = np.maximum(recomputed_share, (recompute == RECOMPUTE["selective"]) * selective_products)
    return np.asarray((ep > 1) * ep_exposed * exposed * ep_forward_s * (2 + again))
