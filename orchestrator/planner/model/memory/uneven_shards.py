"""Deviation of torch's shards from even ones: rounded rows, and full tensors assigned to ranks.

Covers the tensors of dense softmax layers and of embeddings; other layers count as even.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from orchestrator.planner.model.terms import Column, term


@term(
    "parameters",
    "rows of each tensor of a layer rounded up to the shard, minus an even share",
    "torch fully_shard",
)
def layer_row_excess(
    hidden: Column,
    heads: Column,
    kv_heads: Column,
    head_dim: Column,
    ffn: Column,
    gated: Column,
    biased: Column,
    qkv_biased: Column,
    norm_biased: Column,
    qk_norm: Column,
    is_mla: Column,
    is_mfa: Column,
    tp: Column,
    shard: Column,
    row_sharded: Column,
    kv_split: Column,
) -> Column:
    """Parameters of one dense layer on rank 0 beyond 1 / shard, (n,).

    Each tensor is sharded along its rows.
    """
    if not np.any(row_sharded):
        return np.asarray(0.0)
    query, kv = heads * head_dim / tp, kv_heads * head_dim / kv_split
    inner = ffn / tp
    replicated = _excess(hidden, shard) * (query + inner + 2 * (1 + norm_biased) + 2 * biased)
    attention = _excess(query, shard) * (hidden + qkv_biased) + 2 * _excess(kv, shard) * (
        hidden + qkv_biased
    )
    attention = attention + 2 * qk_norm * _excess(head_dim, shard)
    softmax = (1 - is_mla) * (1 - is_mfa)
    return np.asarray(
        row_sharded
        * softmax
        * (replicated + attention + (1 + gated) * _excess(inner, shard) * (hidden + biased))
    )


@term(
    "parameters",
    "rows of embeddings and head rounded up to the shard, minus an even share",
    "torch fully_shard",
)
def edge_row_excess(
    hidden: Column,
    local_vocab: Column,
    shard: Column,
    row_sharded: Column,
    learned_positions: Column,
    max_seq_len: Column,
    norm_biased: Column,
    tied: Column,
    stage_first: Column,
    stage_last: Column,
) -> Column:
    """Parameters of embeddings and head on rank 0 beyond 1 / shard, (S, n)."""
    if not np.any(row_sharded):
        return np.asarray(0.0)
    table = _excess(local_vocab, shard) * hidden
    first = table + learned_positions * _excess(max_seq_len, shard) * hidden
    own = np.where((tied == 1) & (stage_first == 1), 0.0, table)
    last = own + (1 + norm_biased) * _excess(hidden, shard)
    return np.asarray(row_sharded * (stage_first * first + stage_last * last))


@term(
    "",
    "largest share of a rank if full tensors go to the smallest rank, largest first",
    "ZeroRedundancyOptimizer",
)
def greedy_share(
    hidden: Column,
    heads: Column,
    kv_heads: Column,
    head_dim: Column,
    ffn: Column,
    gated: Column,
    biased: Column,
    qkv_biased: Column,
    norm_biased: Column,
    qk_norm: Column,
    vocab: Column,
    tied: Column,
    learned_positions: Column,
    max_seq_len: Column,
    is_mla: Column,
    is_mfa: Column,
    moe_layers: Column,
    layers: Column,
    tp: Column,
    pp: Column,
    cp: Column,
    shard: Column,
    greedy_optimizer: Column,
) -> Column:
    """Largest share of a rank, (n,); 1 / shard if even.

    Plans with tensor, pipeline or context parallelism count as even.
    """
    even = 1.0 / shard
    greedy = (greedy_optimizer == 1) & (tp * pp * cp == 1) & (shard > 1)
    greedy = greedy & (is_mla + is_mfa + moe_layers == 0)
    if not np.any(greedy):
        return even
    shapes = np.broadcast_arrays(
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        gated,
        biased,
        qkv_biased,
        norm_biased,
        qk_norm,
        vocab,
        tied,
        learned_positions,
        max_seq_len,
        layers,
        shard,
        even,
        greedy,
    )
    sizes = np.stack([each.ravel() for each in shapes[:-2]])
    share, rows = shapes[-2].flatten(), np.flatnonzero(shapes[-1])
    for row in rows.tolist():
        share[row] = _greedy_share(tuple(sizes[:, row].tolist()))
    return share.reshape(shapes[0].shape)


def _excess(rows: Column, shard: Column) -> Column:
    """Rows that the first of `shard` ranks holds beyond an even share."""
    return np.asarray(np.ceil(rows / shard) - rows / shard)


@lru_cache(maxsize=4096)
def _greedy_share(shape: Sequence[float]) -> float:
    """Largest share of a rank for one model and number of ranks."""
    (
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        gated,
        biased,
        qkv_biased,
        norm_biased,
        qk_norm,
        vocab,
        tied,
        learned_positions,
        max_seq_len,
        layers,
        shard,
    ) = (int(each) for each in shape)
    query, kv = heads * head_dim, kv_heads * head_dim
    norms = [hidden] * (1 + norm_biased)
    layer = [query * hidden, kv * hidden, kv * hidden, hidden * query, *norms, *norms]
    layer += (
        [query, kv, kv] * qkv_biased
        + [head_dim, head_dim] * qk_norm
        + [hidden, hidden, ffn] * biased
    )
    layer += [ffn * hidden] * (2 + gated) + [ffn] * (biased * gated)
    edge = [vocab * hidden] * (2 - tied) + [max_seq_len * hidden] * learned_positions + norms
    sizes = sorted(layer * layers + edge, reverse=True)
    ranks = [0] * shard
    for size in sizes:
        heapq.heapreplace(ranks, ranks[0] + size)
    return max(ranks) / sum(sizes)
