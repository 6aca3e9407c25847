"""Seconds of pipeline stages per micro-batch, the slowest stage, and idle time by schedule.

Condenses the closed forms of `schedules`: the time of the other stages times the schedule's share.
Does not depend on single kernels.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import SCHEDULE
from orchestrator.planner.model.compute.layer_time import host_device_time
from orchestrator.planner.model.terms import Column, term


@term(
    "s",
    "compute of a stage for one micro-batch: its layers, table and head, and the second module's",
)
def stage_compute_s(
    stage_layers: Column,
    stage_moe_layers: Column,
    stage_first: Column,
    stage_last: Column,
    dense_layer_s: Column,
    moe_extra_s: Column,
    embedding_s: Column,
    head_s: Column,
    microbatch_s: Column,
    second_layer_s: Column,
    second_share: Column,
) -> Column:
    """Compute of a stage per micro-batch, (S, n)."""
    head_s = head_s * (1 + second_share / 3)
    layers = stage_layers * (dense_layer_s + second_layer_s) + stage_moe_layers * moe_extra_s
    return np.asarray(layers + stage_first * embedding_s + stage_last * head_s + microbatch_s)


@term("s", "exposed communication of a stage for one micro-batch")
def stage_exposed_s(
    stage_layers: Column,
    stage_moe_layers: Column,
    stage_first: Column,
    stage_last: Column,
    dense_layer_exposed_s: Column,
    moe_exposed_s: Column,
    tp_reduce_s: Column,
    hop_s: Column,
    p2p_exposed: Column,
    virtual_stages: Column,
) -> Column:
    """Exposed communication of a stage per micro-batch, (S, n)."""
    layers = stage_layers * dense_layer_exposed_s + stage_moe_layers * moe_exposed_s
    return np.asarray(
        layers + (stage_first + stage_last) * tp_reduce_s + 2 * virtual_stages * p2p_exposed * hop_s
    )


@term("s", "stage_compute_s + stage_exposed_s, one micro-batch in all stages of the rank")
def stage_time_s(stage_compute_s: Column, stage_exposed_s: Column) -> Column:
    """Time of a stage per micro-batch, (S, n)."""
    return np.asarray(stage_compute_s + stage_exposed_s)


@term("s", "largest of stage_time_s")
def slowest_stage_s(stage_time_s: Column) -> Column:
    """Time of the slowest stage per micro-batch, (n,)."""
    return np.asarray(stage_time_s.max(axis=0))


@term("s", "one micro-batch through all stages, forward and backward")
def through_s(
    layers: Column,
    moe_layers: Column,
    dense_layer_s: Column,
    dense_layer_exposed_s: Column,
    moe_extra_s: Column,
    moe_exposed_s: Column,
    embedding_s: Column,
    head_s: Column,
    microbatch_s: Column,
    hop_s: Column,
    pp: Column,
    second_layer_s: Column,
    second_share: Column,
) -> Column:
    """Seconds of one micro-batch through all stages, forward and backward."""
    head_s = head_s * (1 + second_share / 3)
    work = layers * (dense_layer_s + second_layer_s + dense_layer_exposed_s) + moe_layers * (
        moe_extra_s + moe_exposed_s
    )
    return np.asarray(work + embedding_s + head_s + pp * microbatch_s + 2 * (pp - 1) * hop_s)


@term("", "share of the forward pass in a layer's time, without recomputation")
def forward_share(
    launch_layer_s: Column,
    dense_forward_s: Column,
    launch_overlap: Column,
    tp_reduce_s: Column,
    dense_layer_s: Column,
    dense_layer_exposed_s: Column,
) -> Column:
    """Share of the forward pass in a layer's time."""
    once = host_device_time(launch_layer_s, dense_forward_s + 2 * tp_reduce_s, launch_overlap)
    return np.asarray(once / (dense_layer_s + dense_layer_exposed_s))


@term("", "share of weight gradients in a layer's time; they take as long as the forward products")
def weight_share(
    attention_products_s: Column,
    dense_products_s: Column,
    dense_layer_s: Column,
    dense_layer_exposed_s: Column,
    block_backward: Column,
) -> Column:
    """Share of weight gradients in a layer's time; frozen weights have none."""
    products = np.maximum(block_backward - 1, 0.0) * (attention_products_s + dense_products_s)
    return np.asarray(products / (dense_layer_s + dense_layer_exposed_s))


@term(
    "",
    "idle share of the ramp (time of the other stages for one micro-batch), by schedule",
    "1F1B 1, interleaved 1/v (arXiv 2104.04473); zb1p (F + B - W)/v, zbv (2401.10241), dualpipev "
    "(2412.19437) by their longest chain; pipedream 0",
)
def ramp_share(
    schedule: Column,
    virtual_stages: Column,
    forward_share: Column,
    weight_share: Column,
    pp: Column,
    accumulation: Column,
) -> Column:
    """Idle share of the ramp."""
    f, w = forward_share, weight_share
    b = 1 - f - w
    folded = np.maximum(np.maximum(f, b), np.maximum(2 * (b - w), f + b - 2 * w))
    paired = np.maximum(np.maximum(f + b, f + 2 * b - w), np.maximum(2 * f, 2 * f + b - w))
    split = np.maximum(np.maximum(f, b), f + b - w)
    waits = np.maximum(pp - accumulation, 0) * (virtual_stages - 1) / np.maximum(pp - 1, 1)
    share = np.where(schedule == SCHEDULE["interleaved_1f1b"], (1 + waits) / virtual_stages, 1.0)
    share = np.where(schedule == SCHEDULE["zb1p"], (split + waits) / virtual_stages, share)
    share = np.where(schedule == SCHEDULE["zbv"], folded / 2, share)
    share = np.where(schedule == SCHEDULE["dualpipev"], paired / 2, share)
    share = np.where(schedule == SCHEDULE["pipedream"], 0.0, share)
    return np.asarray(np.where(schedule == SCHEDULE["naive"], accumulation, share))


@term(
    "s",
    "correction x (through_s - slowest_stage_s) x ramp_share",
    "time in which a device waits for the pipeline to fill and drain",
)
def bubble_s(
    through_s: Column, slowest_stage_s: Column, ramp_share: Column, pp: Column, correction: Column
) -> Column:
    """Idle seconds per step."""
    return np.asarray(
        correction * np.maximum(through_s - slowest_stage_s, 0) * (pp > 1) * ramp_share
    )
