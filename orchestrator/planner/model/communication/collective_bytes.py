"""Bytes per kind of collective that a rank passes to torch.distributed in one step of the engine.

Counted by call: an all-reduce by its buffer, an all-gather by its output, a reduce-scatter by its
input, a broadcast by its tensor, a send by its message. `data_parallel_bytes` and
`model_parallel_bytes` have the volumes of textbooks.
Does not cover offloading, sharded experts or latent attention, experts with context parallelism, or
recomputation of tensor parallel blocks (see `collectives_known`). Tensor parallelism counts blocks,
not token table and head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.planner.model.columns.codes import SCHEDULE
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
    """Padded parameters of one block of one tensor parallel rank."""
    query, kv, width = heads * head_dim / tp, kv_heads * head_dim / kv_split, ffn / tp

    def padded(rows: Any, columns: Any = 1.0) -> Any:
        return np.ceil(rows / shard) * shard * columns

    attention = (
        padded(query, hidden)
        + 2 * padded(kv, hidden)
        + padded(hidden, query)
        + 2 * qk_norm * padded(head_dim)
    )
    attention = attention + qkv_biased * (padded(query) + 2 * padded(kv)) + biased * padded(hidden)
    mlp = (1 + gated) * padded(width, hidden) + padded(hidden, width)
    mlp = mlp + biased * ((1 + gated) * padded(width) + padded(hidden))
    return attention + mlp + 2 * (1 + norm_biased) * padded(hidden)


@term("parameters", "token table, its rows padded to the group", FSDP)
def table_padded_params(vocab: Any, hidden: Any, tp: Any, shard: Any) -> Any:
    """Padded parameters of the token table."""
    return np.ceil(vocab / tp / shard) * shard * hidden


@term("parameters", "output head and last norm; a tied head is the token table", FSDP)
def head_padded_params(
    table_padded_params: Any, hidden: Any, norm_biased: Any, tied: Any, shard: Any
) -> Any:
    """Padded parameters of output head and final norm."""
    return (
        np.where(tied > 0, 0.0, table_padded_params)
        + (1 + norm_biased) * np.ceil(hidden / shard) * shard
    )


@term("parameters", "learned positions, rows padded to the group", FSDP)
def position_padded_params(
    learned_positions: Any, max_seq_len: Any, hidden: Any, shard: Any
) -> Any:
    """Padded parameters of learned positions."""
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
    """Padded parameters of the largest pipeline stage."""
    edges = np.maximum(table_padded_params + position_padded_params, head_padded_params)
    whole = table_padded_params + head_padded_params + position_padded_params
    return np.ceil(layers / pp) * block_padded_params + np.where(pp > 1, edges, whole)


@term(
    "", "1 if torch's own modules communicate (orrery, fsdp2) and every kind below is counted", ""
)
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
    """1 if the counts below are complete for the plan."""
    plain = (is_mla + is_mfa == 0) & (experts == 0)
    again = (tp > 1) & (recompute > 0)  # recomputation repeats collectives
    counts = (cp > 1) & (experts > 0)  # routers sum their counts over a sequence's ranks
    known = (row_sharded == 1) & (offload == 0) & ~again & ~counts
    return np.asarray(known & (plain | (ranks_sharded == 0)), float)


@term("", "1 if fully_shard shards the weights: ZeRO 2 or 3 over more than one rank of dp x cp", "")
def ranks_sharded(zero: Any, dp: Any, cp: Any) -> Any:
    """1 if weights are sharded."""
    return np.asarray((zero >= 2) & (dp * cp > 1), float)


@term(
    "B",
    "sharded: micro-batches · Ψ · (2 - share that stays gathered), compute dtype; sequence "
    "parallel: "
    "tp_call_bytes",
    "ZeRO 3 gathers blocks and table again for the backward pass, not the head; ZeRO 2 gathers "
    "once per micro-batch, or per step if last_only",
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
    last_only: Any,
    live_layers: Any,
    persistent_layers: Any,
    embedding_params: Any,
    persistence_threshold: Any,
) -> Any:
    """Output bytes of all-gathers per step."""
    passes = np.where((zero == 2) & (last_only > 0), 1.0, accumulation)
    live = np.max(live_layers, axis=0) if np.ndim(live_layers) > 1 else live_layers
    table_stays = embedding_params < persistence_threshold
    table = np.where((tied > 0) | table_stays, 0.0, table_padded_params)
    again = (np.ceil(layers / pp) - live) * block_padded_params + table
    elements = padded_params + np.where(zero >= 3, again, 0.0)
    # persistent units are gathered on a step's first micro-batch only
    once = np.where(persistent_layers > 0, np.ceil(layers / pp) * block_padded_params, 0.0)
    once = (once + np.where((tied == 0) & table_stays, table_padded_params, 0.0)) * (pp == 1)
    elements = passes * elements - (accumulation - 1) * once * (zero >= 3)
    return ranks_sharded * elements * compute_bytes + sequence_parallel * tp_call_bytes


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
    """Input bytes of reduce-scatters per step."""
    return (
        ranks_sharded * accumulation * padded_params * sharded_reduce_bytes
        + sequence_parallel * tp_call_bytes
    )


@term(
    "B",
    "copies: Ψ of gradients once per step; hybrid: Ψ / shard per micro-batch, or per step if "
    "last_only; tensor parallel: tp_call_bytes",
    "DistributedDataParallel under no_sync; Shoeybi et al. 2019, arXiv 1909.08053, section 3",
)
def all_reduce_bytes(
    ranks_sharded: Any,
    dp: Any,
    cp: Any,
    dp_replicate: Any,
    shard: Any,
    copy_passes: Any,
    padded_params: Any,
    device_params: Any,
    grad_bytes: Any,
    sharded_reduce_bytes: Any,
    sequence_parallel: Any,
    tp: Any,
    tp_call_bytes: Any,
) -> Any:
    """Buffer bytes of all-reduces per step."""
    copies = (dp * cp > 1) * (1 - ranks_sharded) * device_params * grad_bytes
    hybrid = (
        ranks_sharded
        * (dp_replicate > 1)
        * copy_passes
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
    """Tensor bytes of broadcasts per step."""
    return np.asarray((zero == 1) & (dp * cp > 1), float) * device_params * param_bytes


@term("parameters", "parameters of a device before ZeRO, on the largest pipeline stage", "")
def device_params(stage_params: Any) -> Any:
    """Parameters of the largest pipeline stage, (n,)."""
    return np.max(stage_params, axis=0) if np.ndim(stage_params) > 1 else stage_params


@term(
    "B",
    "tensor parallel: micro-batches · ceil(layers / pp) · 4 · b · s/c · h · compute_bytes",
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
    """Bytes of the collectives of tensor parallel blocks per step."""
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
    "the token table's gradient, or this rank's shard of it, if first and last rank each hold a "
    "copy",
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
    """Gradient bytes exchanged between two copies of a tied token table."""
    rows = np.where(ranks_sharded > 0, np.ceil(local_vocab / shard), local_vocab)
    return tied * (pp > 1) * ~_folded(schedule) * rows * hidden * grad_bytes


@term(
    "B",
    "micro-batches · boundaries · b · s/c · h, forward and backward; tie_bytes on end ranks; "
    "cp_bytes",
    "one message per direction and boundary; ring attention, arXiv 2310.01889",
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
    # all stages but the last send forward, all but the first backward; middle ranks do both
    """Message bytes of sends per step."""
    message = accumulation * micro_batch * seq_len / cp * hidden * compute_bytes
    end = np.where(_folded(schedule), 2.0, 2.0 * virtual_stages - 1) * message + tie_bytes
    middle = np.where(_folded(schedule), 4.0, 2.0 * virtual_stages) * message
    return (pp > 1) * np.where(pp > 2, np.maximum(middle, end), end) + cp_bytes


def _folded(schedule: Any) -> Any:
    """Whether the schedule is V-shaped: one rank holds the first and the last stage."""
    return np.asarray((schedule == SCHEDULE["zbv"]) | (schedule == SCHEDULE["dualpipev"]))


@term(
    "B",
    "micro-batches · MoE layers · (4 · b · s/c · k · h + 4 bytes · experts); recomputed: 6 "
    "and the counts twice; with a capacity on GPUs padded rows: experts · most of one, no counts",
    "dispatch and combine, forward and backward, after the counts; mean of a group, no dropped "
    "tokens",
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
    capacity_limit: Any,
    is_cpu: Any,
) -> Any:
    """Bytes of all-to-alls per step."""
    exact, again = micro_batch * seq_len / cp * top_k, recompute > 0
    padded = (capacity_limit > 0) & (is_cpu == 0) & (cp == 1)
    most = np.ceil(capacity_limit * seq_len * top_k / np.maximum(experts, 1))
    tokens = np.where(padded, experts * micro_batch * np.minimum(seq_len, most), exact)
    counts = (1 + again) * 4 * experts * ~padded
    layer_bytes = (4 + 2 * again) * tokens * hidden * compute_bytes + counts
    return (ep > 1) * accumulation * np.ceil(moe_layers / pp) * layer_bytes


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
