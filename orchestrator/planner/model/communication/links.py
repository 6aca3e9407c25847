"""Placement of a group's ranks on nodes, and the time of a collective by size and hierarchy.

Ranks are ordered tensor, context, data, pipeline, innermost first, as in Megatron and device
meshes. Does not depend on a model.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term


@term("", "min(tp, devices_per_node)", "tensor parallel is innermost")
def tp_local(tp: Column, devices_per_node: Column) -> Column:
    """Ranks of a tensor group on one node."""
    return np.asarray(np.minimum(tp, devices_per_node))


@term("", "clip(devices_per_node / tp, 1, cp)")
def cp_local(tp: Column, cp: Column, devices_per_node: Column) -> Column:
    """Ranks of a context group on one node."""
    return np.asarray(np.clip(devices_per_node / tp, 1, cp))


@term(
    "",
    "clip(devices_per_node / tp, 1, dp x cp)",
    "the group that reduces gradients: data and context ranks",
)
def dp_local(tp: Column, cp: Column, dp: Column, devices_per_node: Column) -> Column:
    """Ranks of a gradient reduction group on one node."""
    return np.asarray(np.clip(devices_per_node / tp, 1, dp * cp))


@term("B/s", "intra_bandwidth x intra_efficiency")
def intra_rate(intra_bandwidth: Column, intra_efficiency: Column) -> Column:
    """Achieved bandwidth inside a node."""
    return np.asarray(intra_bandwidth * intra_efficiency)


@term("B/s", "inter_bandwidth x inter_efficiency")
def inter_rate(inter_bandwidth: Column, inter_efficiency: Column) -> Column:
    """Achieved bandwidth between nodes."""
    return np.asarray(inter_bandwidth * inter_efficiency)


def seconds_per_byte(size: Column, local: Column, intra_rate: Column, inter_rate: Column) -> Column:
    """Seconds of one ring pass per byte.

    `(g - 1)/g` inside a node, `(n - 1)/n` of a g-th between n nodes. A reduce-scatter of S bytes
    takes S times this, an all-reduce twice. The g local ranks share the network links of their
    node, each its own (hierarchical rings, arXiv 1909.09756; NCCL's rails).
    """
    nodes = size / local
    return np.asarray((1 - 1 / local) / intra_rate + (1 - 1 / nodes) / (local * inter_rate))


def latency(
    size: Column, local: Column, intra_latency_s: Column, inter_latency_s: Column
) -> Column:
    """Latency of one pass; 0 for one rank.

    Grows with the ranks of a node (ring) and with the logarithm of the nodes (tree). All-reduces of
    1 MiB on 2, 4, 8 A100 take 45, 53, 92 us (NCCL, published by arXiv 2312.12391). The default of
    13 us inside a node fits these and that paper's seven larger all-reduces by least squares.
    """
    return np.asarray(
        intra_latency_s * (1 + local / 4) * (size > 1) + inter_latency_s * np.log2(size / local)
    )
