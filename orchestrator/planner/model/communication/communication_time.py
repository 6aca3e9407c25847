"""Seconds of communication per micro-batch and step, and the part that compute does not hide.

Does not compose steps.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.communication.links import latency, seconds_per_byte
from orchestrator.planner.model.terms import Column, term


@term(
    "s",
    "2 x state_bytes / rate + 2 x latency",
    "all-reduce (reduce-scatter and all-gather) of a hidden state, ring",
)
def tp_reduce_s(
    tp: Column,
    tp_local: Column,
    state_bytes: Column,
    intra_rate: Column,
    inter_rate: Column,
    intra_latency_s: Column,
    inter_latency_s: Column,
) -> Column:
    """Seconds of one tensor parallel all-reduce."""
    once = state_bytes * seconds_per_byte(tp, tp_local, intra_rate, inter_rate)
    return np.asarray(2 * (once + latency(tp, tp_local, intra_latency_s, inter_latency_s)))


@term(
    "s",
    "two all-to-alls of routed_bytes: every rank keeps 1/ep, traffic to other nodes uses the "
    "network",
    "off-node share (n - 1)/n over inter_rate, the rest inside",
)
def ep_forward_s(
    ep: Column,
    tp: Column,
    devices_per_node: Column,
    routed_bytes: Column,
    intra_rate: Column,
    inter_rate: Column,
    intra_latency_s: Column,
    inter_latency_s: Column,
) -> Column:
    """Seconds of dispatch and combine of one MoE layer's forward pass."""
    local = np.clip(devices_per_node / tp, 1, ep)
    off = 1 - local / ep
    inside = (local - 1) / ep
    one_way = routed_bytes * (inside / intra_rate + off / inter_rate)
    return np.asarray(2 * (one_way + latency(ep, local, intra_latency_s, inter_latency_s)))


@term(
    "s",
    "cp steps of the ring, each the longer of its attention and of a transfer, minus the attention "
    "alone",
    "ring attention, arXiv 2310.01889; forward pass",
)
def cp_forward_s(
    cp: Column,
    cp_local: Column,
    kv_bytes: Column,
    attention_core_s: Column,
    intra_rate: Column,
    inter_rate: Column,
    intra_latency_s: Column,
) -> Column:
    """Exposed seconds of ring attention in a layer's forward pass."""
    rate = np.where(cp_local < cp, inter_rate, intra_rate)
    wait = kv_bytes / rate + intra_latency_s - attention_core_s / cp
    return np.asarray((cp - 1) * np.maximum(wait, intra_latency_s))


@term(
    "s",
    "as cp_forward_s with twice the attention, and with the gradient sums of keys and values",
    "ring attention, arXiv 2310.01889; backward pass",
)
def cp_backward_s(
    cp: Column,
    cp_local: Column,
    kv_bytes: Column,
    attention_core_s: Column,
    intra_rate: Column,
    inter_rate: Column,
    intra_latency_s: Column,
    ring_grad_bytes: Column,
    compute_bytes: Column,
) -> Column:
    """Exposed seconds of ring attention in a layer's backward pass."""
    rate = np.where(cp_local < cp, inter_rate, intra_rate)
    carried = kv_bytes * (1 + ring_grad_bytes / compute_bytes)
    wait = carried / rate + 2 * intra_latency_s - 2 * attention_core_s / cp
    return np.asarray((cp - 1) * np.maximum(wait, 2 * intra_latency_s))


@term("s", "boundary_bytes / rate + latency; over the network if the pipeline spans nodes")
def hop_s(
    pp: Column,
    devices: Column,
    devices_per_node: Column,
    boundary_bytes: Column,
    intra_rate: Column,
    inter_rate: Column,
    intra_latency_s: Column,
    inter_latency_s: Column,
) -> Column:
    """Seconds of one transfer between pipeline stages."""
    far = devices > devices_per_node
    hop = (
        boundary_bytes / np.where(far, inter_rate, intra_rate)
        + intra_latency_s
        + inter_latency_s * far
    )
    return np.asarray(hop * (pp > 1))


@term(
    "s",
    "stage_dp_sent_bytes x seconds per byte + latency of each pass and layer",
    "hierarchical rings",
)
def stage_dp_s(
    stage_dp_sent_bytes: Column,
    dp: Column,
    cp: Column,
    dp_local: Column,
    intra_rate: Column,
    inter_rate: Column,
    intra_latency_s: Column,
    inter_latency_s: Column,
    stage_layers: Column,
    gather_passes: Column,
    reduce_passes: Column,
    zero: Column,
) -> Column:
    """Seconds of data parallel traffic per step, (S, n)."""
    group = dp * cp
    calls = np.where(zero >= 2, (gather_passes + reduce_passes) * stage_layers, 2)
    wait = latency(group, dp_local, intra_latency_s, inter_latency_s)
    return np.asarray(
        stage_dp_sent_bytes * seconds_per_byte(group, dp_local, intra_rate, inter_rate)
        + calls * wait
    )


@term(
    "s",
    "dp_overlap x concurrent compute: the last backward, or all micro-batches if sharded (ZeRO 2 "
    "and 3; only backward passes without prefetch)",
    "gradient buckets over the backward (arXiv 2006.15704); prefetched layers over the "
    "previous layer (2304.11277)",
)
def stage_hiding_s(
    stage_compute_s: Column,
    accumulation: Column,
    zero: Column,
    dp_overlap: Column,
    overlap_grad_reduce: Column,
    prefetch_layers: Column,
    recomputed_share: Column,
) -> Column:
    """Seconds of compute that can hide data parallel traffic, (S, n)."""
    backward = 0.667 + recomputed_share * 0.083
    every = accumulation * np.where(prefetch_layers > 0, 1.0, backward)
    concurrent = np.where(zero >= 2, every, overlap_grad_reduce * backward)
    return np.asarray(stage_compute_s * dp_overlap * concurrent)


@term(
    "s",
    "stage_dp_s x share of gathers; ZeRO 3, which gathers in both passes",
    "arXiv 2304.11277, section 3.3",
)
def stage_gather_s(
    stage_dp_s: Column,
    stage_gather_passes: Column,
    reduce_passes: Column,
    weight_sent_bytes: Column,
    gradient_sent_bytes: Column,
    zero: Column,
) -> Column:
    """Seconds of gathering weights per step, (S, n)."""
    gathers = stage_gather_passes * weight_sent_bytes
    share = gathers / np.maximum(gathers + reduce_passes * gradient_sent_bytes, 1e-9)
    return np.asarray(stage_dp_s * share * (zero == 3))


@term(
    "s",
    "gathers that no compute can hide: all without prefetch; else of the head, less the forward "
    "passes of the layers before it that are gathered ahead",
    "a head is larger than a layer if the vocabulary is large",
)
def stage_unhidden_gather_s(
    stage_gather_s: Column,
    stage_compute_s: Column,
    stage_layers: Column,
    stage_params: Column,
    head_params: Column,
    tied: Column,
    accumulation: Column,
    prefetch_layers: Column,
    dp_overlap: Column,
    recomputed_share: Column,
) -> Column:
    """Seconds of gathers per step that are exposed whatever runs at the same time, (S, n)."""
    forward = 0.333 - recomputed_share * 0.083
    layer = stage_compute_s * accumulation * forward / np.maximum(stage_layers, 1)
    # of two passes, the head is gathered in the forward pass only
    head = stage_gather_s / 2 * np.where(tied == 1, 0.0, head_params / stage_params)
    ahead = np.maximum(head - prefetch_layers * layer * dp_overlap, 0.0)
    return np.where(prefetch_layers > 0, ahead, stage_gather_s)


@term(
    "s",
    "stage_dp_s - hidden + overlap_slowdown x hidden; stage_unhidden_gather_s and the share of one "
    "layer stay exposed",
)
def stage_dp_exposed_s(
    stage_dp_s: Column,
    stage_hiding_s: Column,
    stage_unhidden_gather_s: Column,
    stage_layers: Column,
    overlap_slowdown: Column,
) -> Column:
    """Exposed seconds of data parallel traffic per step, (S, n)."""
    can_hide = (stage_dp_s - stage_unhidden_gather_s) * (1 - 1 / np.maximum(stage_layers, 1))
    hidden = np.minimum(stage_hiding_s, can_hide)
    return np.asarray(stage_dp_s - hidden * (1 - overlap_slowdown))
