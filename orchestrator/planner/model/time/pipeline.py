"""How long pipeline stages take for a micro-batch, which is the slowest, and how long devices idle,
by schedule.

The closed forms of `schedules` in one: what the other stages take, times the schedule's share.
Knows no layer.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.compute.layer_time import held
from orchestrator.planner.model.inputs import SCHEDULE
from orchestrator.planner.model.terms import Column, term


@term("s", "compute of a stage for one micro-batch: its layers, table and head")
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
) -> Column:
    layers = stage_layers * dense_layer_s + stage_moe_layers * moe_extra_s
    return np.asarray(layers + stage_first * embedding_s + stage_last * head_s + microbatch_s)


@term("s", "communication of a stage for one micro-batch that its compute waits for")
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
    layers = stage_layers * dense_layer_exposed_s + stage_moe_layers * moe_exposed_s
    return np.asarray(
        layers + (stage_first + stage_last) * tp_reduce_s + 2 * virtual_stages * p2p_exposed * hop_s
    )


@term("s", "stage_compute_s + stage_exposed_s, a micro-batch of all the rank's stages")
def stage_time_s(stage_compute_s: Column, stage_exposed_s: Column) -> Column:
    return np.asarray(stage_compute_s + stage_exposed_s)


@term("s", "the longest stage's")
def slowest_stage_s(stage_time_s: Column) -> Column:
    return np.asarray(stage_time_s.max(axis=0))


@term("s", "one micro-batch through all stages, both ways")
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
) -> Column:
    work = layers * (dense_layer_s + dense_layer_exposed_s) + moe_layers * (
        moe_extra_s + moe_exposed_s
    )
    return np.asarray(work + embedding_s + head_s + pp * microbatch_s + 2 * (pp - 1) * hop_s)


@term("", "forward's share of a layer's time, recomputation and input gradient apart")
def forward_share(
    launch_layer_s: Column,
    dense_forward_s: Column,
    launch_overlap: Column,
    tp_reduce_s: Column,
    dense_layer_s: Column,
    dense_layer_exposed_s: Column,
) -> Column:
    once = held(launch_layer_s, dense_forward_s + 2 * tp_reduce_s, launch_overlap)
    return np.asarray(once / (dense_layer_s + dense_layer_exposed_s))


@term("", "weight gradients' share of a layer's time, as long as its forward products")
def weight_share(
    attention_products_s: Column,
    dense_products_s: Column,
    dense_layer_s: Column,
    dense_layer_exposed_s: Column,
) -> Column:
    return np.asarray(
        (attention_products_s + dense_products_s) / (dense_layer_s + dense_layer_exposed_s)
    )


@term(
    "",
    "share of the ramp (what the other stages take for one micro-batch) that idles, by schedule",
    "1F1B 1, interleaved 1/v (arXiv 2104.04473); zb1p (F + B - W)/v, zbv (2401.10241), dualpipev "
    "(2412.19437) by their "
    "longest chain; pipedream 0",
)
def ramp_share(
    schedule: Column,
    virtual_stages: Column,
    forward_share: Column,
    weight_share: Column,
    pp: Column,
    accumulation: Column,
) -> Column:
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
    "the time in which a device waits for the pipeline to fill and to drain",
)
def bubble_s(
    through_s: Column, slowest_stage_s: Column, ramp_share: Column, pp: Column, correction: Column
) -> Column:
    return np.asarray(
        correction * np.maximum(through_s - slowest_stage_s, 0) * (pp > 1) * ramp_share
    )
