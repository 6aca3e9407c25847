"""Bytes per kind of collective that a rank hands to torch.distributed in one step, as Orrery's
engine and torch send.

Counted as they are called: an all-reduce by its buffer, an all-gather by its output, a
reduce-scatter by its input, a
broadcast by its tensor, a send by its message. The textbook's volumes (`communication.py`) know
nothing of engines.
Knows no offloading, no sharded experts or latent attention, no experts beside context parallelism
and no recomputation
of tensor parallel blocks: `collectives_known` tells. Of tensor parallelism it counts blocks, not
table and head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.planner.model.inputs import SCHEDULE
from orchestrator.planner.model.terms import term

FSDP = "torch.distributed.fsdp.fully_shard: dim 0 of each parameter is padded to the shard group"


@term(
    "parameters", "rows padded to the group, summed over a block's weights, norms and biases", FSDP
)
def block_padded_params(
    hidden: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    ffn: Any,
    gated: Any,
    norm_biased: Any,
    qk_norm: Any,
    qkv_biased: Any,
    biased: Any,
    tp: Any,
    kv_split: Any,
    shard: Any,
) -> Any:
    query, kv, width = heads * head_dim / tp, kv_heads * head_dim / kv_split, ffn / tp

    def held(rows: Any, columns: Any = 1.0) -> Any:
        return np.ceil(rows / shard) * shard * columns

    attention = (
        held(query, hidden)
        + 2 * held(kv, hidden)
        + held(hidden, query)
        + 2 * qk_norm * held(head_dim)
    )
    attention = attention + qkv_biased * (held(query) + 2 * held(kv)) + biased * held(hidden)
    mlp = (1 + gated) * held(width, hidden) + held(hidden, width)
    mlp = mlp + biased * ((1 + gated) * held(width) + held(hidden))
    return attention + mlp + 2 * (1 + norm_biased) * held(hidden)


@term("parameters", "token table, its rows padded to the group", FSDP)
def table_padded_params(vocab: Any, hidden: Any, tp: Any, shard: Any) -> Any:
    return np.ceil(vocab / tp / shard) * shard * hidden


@term("parameters", "output head and last norm; a tied head is the token table", FSDP)
def head_padded_params(
    table_padded_params: Any, hidden: Any, norm_biased: Any, tied: Any, shard: Any
) -> Any:
    return (
        np.where(tied > 0, 0.0, table_padded_params)
        + (1 + norm_biased) * np.ceil(hidden / shard) * shard
    )


@term("parameters", "learned positions, rows padded to the group", FSDP)
def position_padded_params(
    learned_positions: Any, max_seq_len: Any, hidden: Any, shard: Any
) -> Any:
    return learned_positions * np.ceil(max_seq_len / shard) * shard * hidden


@term("parameters", "layers · block + table + head + positions", FSDP)
def padded_params(
    layers: Any,
    pp: Any,
    block_padded_params: Any,
    table_padded_params: Any,
    head_padded_params: Any,
    position_padded_params: Any,
) -> Any:
    edges = np.maximum(table_padded_params + position_padded_params, head_padded_params)
    whole = table_padded_params + head_padded_params + position_padded_params
    return np.ceil(layers / pp) * block_padded_params + np.where(pp > 1, edges, whole)


@term("", "1 where torch's own parts send (orrery, fsdp2) and every kind below is counted", "")
def collectives_known(
    row_sharded: Any,
    ranks_sharded: Any,
    is_mla: Any,
    is_mfa: Any,
    experts: Any,
    cp: Any,
    offload: Any,
    tp: Any,
    recompute: Any,
) -> Any:
    plain = (is_mla + is_mfa == 0) & (experts == 0)
    again = (tp > 1) & (recompute > 0)  # what recomputation sends anew
    counts = (cp > 1) & (experts > 0)  # routers add up their counts over a sequence's ranks
    known = (row_sharded == 1) & (offload == 0) & ~again & ~counts
    return np.asarray(known & (plain | (ranks_sharded == 0)), float)


@term(
    "", "1 where fully_shard splits the weights: ZeRO 2 or 3 over more than one rank of dp x cp", ""
)
def ranks_sharded(zero: Any, dp: Any, cp: Any) -> Any:
    return np.asarray((zero >= 2) & (dp * cp > 1), float)


@term(
    "B",
    "sharded: micro-batches · Ψ · (2 - what stays whole), compute dtype; sequence parallel: "
    "tp_call_bytes",
    "ZeRO 3 gathers blocks and table again for the backward pass, the head stays; ZeRO 2 gathers "
    "once",
)
def all_gather_bytes(
    ranks_sharded: Any,
    zero: Any,
    accumulation: Any,
    padded_params: Any,
    layers: Any,
    pp: Any,
    block_padded_params: Any,
    table_padded_params: Any,
    tied: Any,
    compute_bytes: Any,
    sequence_parallel: Any,
    tp_call_bytes: Any,
) -> Any:
    again = np.ceil(layers / pp) * block_padded_params + np.where(
        tied > 0, 0.0, table_padded_params
    )
    elements = padded_params + np.where(zero >= 3, again, 0.0)
    return (
        ranks_sharded * accumulation * elements * compute_bytes + sequence_parallel * tp_call_bytes
    )


@term(
    "B",
    "sharded: micro-batches · Ψ, in the reduce dtype; sequence parallel: tp_call_bytes",
    "gradients are reduced after every micro-batch",
)
def reduce_scatter_bytes(
    ranks_sharded: Any,
    accumulation: Any,
    padded_params: Any,
    sharded_reduce_bytes: Any,
    sequence_parallel: Any,
    tp_call_bytes: Any,
) -> Any:
    return (
        ranks_sharded * accumulation * padded_params * sharded_reduce_bytes
        + sequence_parallel * tp_call_bytes
    )


@term(
    "B",
    "copies: Ψ of gradients once a step; hybrid: Ψ / shard each micro-batch; tensor parallel: "
    "tp_call_bytes",
    "DistributedDataParallel under no_sync; Shoeybi et al. 2019, arXiv 1909.08053, section 3",
)
def all_reduce_bytes(
    ranks_sharded: Any,
    dp: Any,
    cp: Any,
    dp_replicate: Any,
    shard: Any,
    accumulation: Any,
    padded_params: Any,
    device_params: Any,
    grad_bytes: Any,
    sharded_reduce_bytes: Any,
    sequence_parallel: Any,
    tp: Any,
    tp_call_bytes: Any,
) -> Any:
    copies = (dp * cp > 1) * (1 - ranks_sharded) * device_params * grad_bytes
    hybrid = (
        ranks_sharded
        * (dp_replicate > 1)
        * accumulation
        * padded_params
        / shard
        * sharded_reduce_bytes
    )
    return copies + hybrid + (tp > 1) * (1 - sequence_parallel) * tp_call_bytes


@term(
    "B",
    "ZeRO 1: Ψ of updated weights as they are stored",
    "ZeroRedundancyOptimizer sends each rank's part to all",
)
def broadcast_bytes(zero: Any, dp: Any, cp: Any, device_params: Any, param_bytes: Any) -> Any:
    return np.asarray((zero == 1) & (dp * cp > 1), float) * device_params * param_bytes


@term("parameters", "parameters of a device before ZeRO, its heaviest pipeline stage", "")
def device_params(stage_params: Any) -> Any:
    return np.max(stage_params, axis=0) if np.ndim(stage_params) > 1 else stage_params


@term(
    "B",
    "tensor parallel: micro-batches · layers · 4 · b · s/c · h",
    "two in the forward, two in the backward pass",
)
def tp_call_bytes(
    tp: Any,
    accumulation: Any,
    layers: Any,
    pp: Any,
    micro_batch: Any,
    seq_len: Any,
    cp: Any,
    hidden: Any,
    compute_bytes: Any,
) -> Any:
    return (
        (tp > 1)
        * accumulation
        * np.ceil(layers / pp)
        * 4
        * micro_batch
        * seq_len
        / cp
        * hidden
        * compute_bytes
    )


@term(
    "B",
    "the token table's gradient, or this rank's shard of it, where first and last rank hold a "
    "copy each",
    "",
)
def tie_bytes(
    tied: Any,
    pp: Any,
    schedule: Any,
    local_vocab: Any,
    hidden: Any,
    grad_bytes: Any,
    ranks_sharded: Any,
    shard: Any,
) -> Any:
    rows = np.where(ranks_sharded > 0, np.ceil(local_vocab / shard), local_vocab)
    return tied * (pp > 1) * ~_folded(schedule) * rows * hidden * grad_bytes


@term(
    "B",
    "micro-batches · boundaries · b · s/c · h, forward and backward, by the ends tie_bytes; "
    "cp_bytes",
    "one message each way and boundary; ring attention, arXiv 2310.01889",
)
def send_bytes(
    accumulation: Any,
    pp: Any,
    virtual_stages: Any,
    schedule: Any,
    micro_batch: Any,
    seq_len: Any,
    cp: Any,
    hidden: Any,
    compute_bytes: Any,
    cp_bytes: Any,
    tie_bytes: Any,
) -> Any:
    # chunks of a rank send forward, all but the last stage, and backward, all but the first; a
    # middle rank both
    message = accumulation * micro_batch * seq_len / cp * hidden * compute_bytes
    end = np.where(_folded(schedule), 2.0, 2.0 * virtual_stages - 1) * message + tie_bytes
    middle = np.where(_folded(schedule), 4.0, 2.0 * virtual_stages) * message
    return (pp > 1) * np.where(pp > 2, np.maximum(middle, end), end) + cp_bytes


def _folded(schedule: Any) -> Any:
    """V-shaped: first and last stage are one rank's."""
    return np.asarray((schedule == SCHEDULE["zbv"]) | (schedule == SCHEDULE["dualpipev"]))


@term(
    "B",
    "micro-batches · routing layers · (4 · b · s/c · k · h + 4 bytes · experts); recomputed: 6 "
    "and counts twice",
    "dispatch and combine, forward and backward, counts before; a group's mean, nothing dropped",
)
def all_to_all_bytes(
    ep: Any,
    accumulation: Any,
    moe_layers: Any,
    pp: Any,
    micro_batch: Any,
    seq_len: Any,
    cp: Any,
    top_k: Any,
    hidden: Any,
    compute_bytes: Any,
    experts: Any,
    recompute: Any,
) -> Any:
    tokens, again = micro_batch * seq_len / cp * top_k, recompute > 0
    each = (4 + 2 * again) * tokens * hidden * compute_bytes + (1 + again) * 4 * experts
    return (ep > 1) * accumulation * np.ceil(moe_layers / pp) * each


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
