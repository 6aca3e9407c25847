"""Bytes per step that tensor, pipeline, context and expert parallel ranks exchange.

Counted as in `data_parallel_bytes`, on the pipeline stage with most traffic.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import RECOMPUTE
from orchestrator.planner.model.terms import Column, term


@term("tokens", "micro_batch x seq_len / cp")
def rank_tokens(micro_batch: Column, seq_len: Column, cp: Column) -> Column:
    """Tokens of a micro-batch on one rank."""
    return np.asarray(micro_batch * seq_len / cp)


@term("B", "rank_tokens x hidden x compute_bytes", "one hidden state of a micro-batch on one rank")
def state_bytes(rank_tokens: Column, hidden: Column, compute_bytes: Column) -> Column:
    """Bytes of one hidden state."""
    return np.asarray(rank_tokens * hidden * compute_bytes)


@term(
    "passes",
    "all-reduces of a layer and micro-batch: 2 forward, 2 backward, 2 more if recomputed in full",
    "Megatron-LM, arXiv 1909.08053; with sequence parallel each is a reduce-scatter and an "
    "all-gather (2205.05198)",
)
def tp_reduces(recompute: Column) -> Column:
    """All-reduces per layer and micro-batch."""
    return np.asarray(4 + 2 * (recompute == RECOMPUTE["full"]))


@term(
    "B",
    "(2 x tp_reduces + 2 x sequence_parallel) x state_bytes x layers x micro-batches, plus one "
    "all-reduce per micro-batch for table and head each",
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
    """Tensor parallel volume of a stage, (S, n)."""
    layer = 2 * tp_reduces + 2 * sequence_parallel
    return np.asarray(
        (tp > 1)
        * accumulation
        * state_bytes
        * (stage_layers * layer + 2 * stage_first + 2 * stage_last)
    )


@term("B", "largest of stage_tp_bytes")
def tp_bytes(stage_tp_bytes: Column) -> Column:
    """Tensor parallel volume of the worst stage, (n,)."""
    return np.asarray(stage_tp_bytes.max(axis=0))


@term(
    "B",
    "state_bytes, / tp if sharded (sequence parallel) or sent as shards and gathered (Megatron)",
    "scatter-gather, arXiv 2104.04473, section 4.1; between two stages, per micro-batch",
)
def boundary_bytes(
    state_bytes: Column, sequence_parallel: Column, scatter_gather: Column, tp: Column
) -> Column:
    """Bytes between two stages per micro-batch."""
    return np.asarray(state_bytes / np.where((sequence_parallel > 0) | (scatter_gather > 0), tp, 1))


@term(
    "B",
    "2 x virtual_stages x micro-batches x boundary_bytes sent by an inner rank (one less on "
    "end ranks)",
    "arXiv 2104.04473, section 2.2.2; sent, not received",
)
def pp_bytes(
    pp: Column, virtual_stages: Column, accumulation: Column, boundary_bytes: Column
) -> Column:
    """Pipeline volume sent by one rank."""
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
    """Bytes of keys and values of a micro-batch on one rank."""
    plain = 2 * kv_heads * head_dim / np.minimum(tp, kv_heads)
    width = np.where(is_mla > 0, heads / tp * (qk_nope + qk_rope + v_head_dim), plain)
    return np.asarray(rank_tokens * width * compute_bytes)


@term(
    "B",
    "(cp - 1) x kv_bytes x layers x micro-batches x (2, 1 more if recomputed, ring_grad_bytes "
    "/ compute_bytes)",
    "ring attention, arXiv 2310.01889: both passes send keys and values, the backward also their "
    "gradients",
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
    """Context parallel volume of the worst stage, (n,)."""
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
    """Bytes of one all-to-all."""
    return np.asarray(
        state_bytes * top_k * np.maximum(capacity, 1) / (1 + sequence_parallel * (tp - 1))
    )


@term(
    "B",
    "routed_bytes x MoE layers x micro-batches x (2 forward + 2 backward + 2 if experts are "
    "recomputed)",
    "GShard, arXiv 2006.16668: dispatch and combine; recomputation repeats them, since only "
    "outputs of matrix products are saved",
)
def ep_bytes(
    ep: Column,
    routed_bytes: Column,
    stage_moe_layers: Column,
    accumulation: Column,
    recompute: Column,
    selective_products: Column,
) -> Column:
    """Expert parallel volume of the worst stage, (n,)."""
    selective = (recompute == RECOMPUTE["selective"]) & (selective_products == 1)
    passes = 4 + 2 * (
        (recompute == RECOMPUTE["full"]) | (recompute == RECOMPUTE["auto"]) | selective
    )
    return np.asarray(
        (ep > 1) * routed_bytes * stage_moe_layers.max(axis=0) * accumulation * passes
    )
