"""How many bytes each kind of parallelism moves per device and step, on the pipeline stage that
moves most.

Counted as in the ZeRO paper (arXiv 1910.02054, section 7): an all-reduce twice its buffer, an
all-gather its output,
a reduce-scatter its input. Knows no time.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.inputs import RECOMPUTE
from orchestrator.planner.model.terms import Column, term


@term(
    "passes",
    "how often a step gathers whole parameters: 0, 1, 1 (FSDP: each micro-batch), 2 x "
    "micro-batches",
    "ZeRO, arXiv 1910.02054, section 7; ZeRO-1 and 2 gather updated parameters once, ZeRO-3 in "
    "each pass",
)
def gather_passes(zero: Column, fully_sharded: Column, accumulation: Column) -> Column:
    again = 1 + (accumulation - 1) * (fully_sharded * (zero == 2))
    return np.asarray(np.where(zero == 3, 2 * accumulation, (zero > 0) * again))


@term(
    "passes",
    "how often gradients are reduced: once, each micro-batch for ZeRO-2 and 3",
    "sharded gradients are reduced before the next micro-batch adds to them",
)
def reduce_passes(zero: Column, accumulation: Column) -> Column:
    return np.asarray(1 + (accumulation - 1) * (zero >= 2))


@term(
    "B",
    "reduce_bytes; torch's own parts (orrery, fsdp2): sharded_reduce_bytes from ZeRO 2, else "
    "grad_bytes",
    "DistributedDataParallel reduces gradients as they are kept, fully_shard in "
    "MixedPrecisionPolicy.reduce_dtype",
)
def gradient_sent_bytes(
    row_sharded: Column,
    zero: Column,
    sharded_reduce_bytes: Column,
    grad_bytes: Column,
    reduce_bytes: Column,
) -> Column:
    """(n,). Of one gradient on its way."""
    return np.where(
        row_sharded == 1, np.where(zero >= 2, sharded_reduce_bytes, grad_bytes), reduce_bytes
    )


@term(
    "B",
    "compute_bytes; torch's own parts (orrery, fsdp2) under ZeRO 1: param_bytes",
    "ZeroRedundancyOptimizer",
)
def weight_sent_bytes(
    row_sharded: Column, zero: Column, param_bytes: Column, compute_bytes: Column
) -> Column:
    """(n,). Of one weight on its way: under ZeRO 1 updated ones travel as they are stored."""
    return np.where((row_sharded == 1) & (zero == 1), param_bytes, compute_bytes)


@term(
    "B",
    "gather_passes x params x compute_bytes + (2 or 1 where sharded) x reduce_passes x params x "
    "reduce_bytes",
    "ZeRO, arXiv 1910.02054, section 7: 2, 2, 2, 3 times the parameters; experts over dp x cp / ep",
)
def stage_dp_bytes(
    dense_stage_params: Column,
    expert_stage_params: Column,
    gather_passes: Column,
    reduce_passes: Column,
    zero: Column,
    dp: Column,
    cp: Column,
    ep: Column,
    dp_replicate: Column,
    compute_bytes: Column,
    reduce_bytes: Column,
) -> Column:
    params, shards = (
        dense_stage_params * (dp * cp > 1) + expert_stage_params * (dp * cp > ep),
        zero > 0,
    )
    groups = (dp * cp, dp_replicate)
    return _sent(
        params, groups, gather_passes * compute_bytes, reduce_passes * reduce_bytes, shards, shards
    )


@term(
    "B",
    "stage_dp_bytes with weight_sent_bytes and gradient_sent_bytes; torch's own ZeRO 1 (orrery, "
    "fsdp2) reduces whole "
    "gradients",
    "what takes time; the volume of the textbooks is stage_dp_bytes",
)
def stage_dp_sent_bytes(
    dense_stage_params: Column,
    expert_stage_params: Column,
    gather_passes: Column,
    reduce_passes: Column,
    zero: Column,
    dp: Column,
    cp: Column,
    ep: Column,
    dp_replicate: Column,
    weight_sent_bytes: Column,
    gradient_sent_bytes: Column,
    row_sharded: Column,
) -> Column:
    groups, shards = (dp * cp, dp_replicate), zero > 0
    params = dense_stage_params * (dp * cp > 1) + expert_stage_params * (dp * cp > ep)
    in_parts = shards & ~((row_sharded == 1) & (zero == 1))
    return _sent(
        params,
        groups,
        gather_passes * weight_sent_bytes,
        reduce_passes * gradient_sent_bytes,
        shards,
        in_parts,
    )


def _sent(
    params: Column,
    groups: tuple[Column, Column],
    gathered: Column,
    reduced: Column,
    shards: Column,
    in_parts: Column,
) -> Column:
    """`gathered` and `reduced` bytes of a parameter over all passes of a step; `in_parts`:
    reduce-scattered.
    """
    group, copies = groups
    each = gathered + reduced * (2 - in_parts)
    parts = np.maximum(1, group / copies)
    across = 2 * reduced / parts * (copies > 1) * shards
    return np.asarray(params * (each * ((parts > 1) | ~shards) + across))


@term("B", "largest of stage_dp_bytes")
def dp_bytes(stage_dp_bytes: Column) -> Column:
    return np.asarray(stage_dp_bytes.max(axis=0))


@term(
    "B",
    "2 x stage parameters x reduce_bytes: gradients to the server, parameters back",
    "parameter server: every worker sends Psi and receives Psi; the server's own link carries dp "
    "times that",
)
def parameter_server_bytes(
    dense_stage_params: Column, expert_stage_params: Column, dp: Column, reduce_bytes: Column
) -> Column:
    worst = (dense_stage_params + expert_stage_params).max(axis=0)
    return np.asarray(2 * worst * reduce_bytes * (dp > 1))


@term(
    "B",
    "dp x parameter_server_bytes",
    "what passes the one server's link in each step, against the ring's constant",
)
def parameter_server_link_bytes(parameter_server_bytes: Column, dp: Column) -> Column:
    return np.asarray(parameter_server_bytes * dp)


@term("tokens", "micro_batch x seq_len / cp")
def rank_tokens(micro_batch: Column, seq_len: Column, cp: Column) -> Column:
    """Tokens of a micro-batch on one rank."""
    return np.asarray(micro_batch * seq_len / cp)


@term("B", "rank_tokens x hidden x compute_bytes", "one hidden state of a micro-batch on one rank")
def state_bytes(rank_tokens: Column, hidden: Column, compute_bytes: Column) -> Column:
    return np.asarray(rank_tokens * hidden * compute_bytes)


@term(
    "passes",
    "all-reduces of a layer and micro-batch: 2 forward, 2 backward, 2 more where it is recomputed "
    "in full",
    "Megatron-LM, arXiv 1909.08053; with sequence parallel each is a reduce-scatter and an "
    "all-gather (2205.05198)",
)
def tp_reduces(recompute: Column) -> Column:
    return np.asarray(4 + 2 * (recompute == RECOMPUTE["full"]))


@term(
    "B",
    "2 x tp_reduces x state_bytes x layers x micro-batches, and of the table and the head one each",
    "Megatron-LM, arXiv 1909.08053; sequence parallel gathers a column's input again in the "
    "backward (2205.05198)",
)
def stage_tp_bytes(
    tp: Column,
    tp_reduces: Column,
    state_bytes: Column,
    stage_layers: Column,
    accumulation: Column,
    sequence_parallel: Column,
    stage_first: Column,
    stage_last: Column,
) -> Column:
    layer = 2 * tp_reduces + 2 * sequence_parallel
    return np.asarray(
        (tp > 1)
        * accumulation
        * state_bytes
        * (stage_layers * layer + 2 * stage_first + 2 * stage_last)
    )


@term("B", "largest of stage_tp_bytes")
def tp_bytes(stage_tp_bytes: Column) -> Column:
    return np.asarray(stage_tp_bytes.max(axis=0))


@term(
    "B",
    "state_bytes, / tp where it is split (sequence parallel) or sent in parts and gathered "
    "(Megatron)",
    "scatter-gather, arXiv 2104.04473, section 4.1; what crosses one boundary of stages for one "
    "micro-batch",
)
def boundary_bytes(
    state_bytes: Column, sequence_parallel: Column, scatter_gather: Column, tp: Column
) -> Column:
    return np.asarray(state_bytes / np.where((sequence_parallel > 0) | (scatter_gather > 0), tp, 1))


@term(
    "B",
    "2 x virtual_stages x micro-batches x boundary_bytes sent by an inner rank (one less by the "
    "ends)",
    "arXiv 2104.04473, section 2.2.2; sent, not received",
)
def pp_bytes(
    pp: Column, virtual_stages: Column, accumulation: Column, boundary_bytes: Column
) -> Column:
    sends = np.where(pp > 2, 2 * virtual_stages, 2 * virtual_stages - 1) * (pp > 1)
    return np.asarray(sends * accumulation * boundary_bytes)


@term(
    "B",
    "rank_tokens x key and value width x compute_bytes",
    "keys and values of a micro-batch on one rank",
)
def kv_bytes(
    rank_tokens: Column,
    kv_heads: Column,
    head_dim: Column,
    tp: Column,
    is_mla: Column,
    heads: Column,
    qk_nope: Column,
    qk_rope: Column,
    v_head_dim: Column,
    compute_bytes: Column,
) -> Column:
    plain = 2 * kv_heads * head_dim / np.minimum(tp, kv_heads)
    width = np.where(is_mla > 0, heads / tp * (qk_nope + qk_rope + v_head_dim), plain)
    return np.asarray(rank_tokens * width * compute_bytes)


@term(
    "B",
    "(cp - 1) x kv_bytes x layers x micro-batches x (2, 1 more where recomputed, ring_grad_bytes "
    "/ compute_bytes)",
    "ring attention, arXiv 2310.01889: keys and values go round in both passes, in the backward "
    "their gradients too",
)
def cp_bytes(
    cp: Column,
    kv_bytes: Column,
    stage_layers: Column,
    accumulation: Column,
    recompute: Column,
    ring_grad_bytes: Column,
    compute_bytes: Column,
) -> Column:
    again = (recompute == RECOMPUTE["full"]) | (recompute == RECOMPUTE["selective"])
    passes = 2 + again + ring_grad_bytes / compute_bytes
    return np.asarray((cp - 1) * kv_bytes * stage_layers.max(axis=0) * accumulation * passes)


@term(
    "B",
    "state_bytes x top_k x capacity, / tp with sequence parallel",
    "tokens sent to experts by one all-to-all",
)
def routed_bytes(
    state_bytes: Column, top_k: Column, capacity: Column, sequence_parallel: Column, tp: Column
) -> Column:
    return np.asarray(
        state_bytes * top_k * np.maximum(capacity, 1) / (1 + sequence_parallel * (tp - 1))
    )


@term(
    "B",
    "routed_bytes x routing layers x micro-batches x (2 forward + 2 backward + 2 where experts "
    "are recomputed)",
    "GShard, arXiv 2006.16668: dispatch and combine; an exchange is no matrix product whose "
    "output would be kept",
)
def ep_bytes(
    ep: Column,
    routed_bytes: Column,
    stage_moe_layers: Column,
    accumulation: Column,
    recompute: Column,
    selective_products: Column,
) -> Column:
    selective = (recompute == RECOMPUTE["selective"]) & (selective_products == 1)
    passes = 4 + 2 * (
        (recompute == RECOMPUTE["full"]) | (recompute == RECOMPUTE["auto"]) | selective
    )
    return np.asarray(
        (ep > 1) * routed_bytes * stage_moe_layers.max(axis=0) * accumulation * passes
    )
