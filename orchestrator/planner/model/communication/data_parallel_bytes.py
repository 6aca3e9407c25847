"""Bytes per step that data parallel ranks exchange, on the pipeline stage with most traffic.

Counted as in the ZeRO paper (arXiv 1910.02054, section 7): an all-reduce twice its buffer, an all-
gather its output, a reduce-scatter its input. Does not depend on time.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term


@term(
    "passes",
    "gathers of the full parameters per step: 0, 1, 1 (FSDP: each micro-batch, unless kept), "
    "2 x micro-batches (1 if keeps_weights)",
    "ZeRO, arXiv 1910.02054, section 7; ZeRO-1 and 2 gather updated parameters once, ZeRO-3 in "
    "each pass",
)
def gather_passes(
    zero: Column,
    fully_sharded: Column,
    accumulation: Column,
    last_only: Column,
    keeps_weights: Column,
) -> Column:
    """Gathers of the full parameters per step."""
    again = 1 + (accumulation - 1) * (fully_sharded * (zero == 2) * (1 - last_only))
    each = np.where(keeps_weights > 0, 1.0, 2 * accumulation)
    return np.asarray(np.where(zero == 3, each, (zero > 0) * np.where(keeps_weights > 0, 1, again)))


@term(
    "",
    "1 if a pipeline keeps a stage's gathered weights and full gradients for the whole step",
    "torchtitan: reshard_after_forward is off with pp, and torch's pipeline stages reduce "
    "gradients with the last micro-batch",
)
def keeps_weights(pipeline_keeps_weights: Column, pp: Column, zero: Column) -> Column:
    """Whether a pipeline of sharded weights gathers and reduces once per step, (n,)."""
    return np.asarray(pipeline_keeps_weights * (pp > 1) * (zero >= 2), float)


@term(
    "",
    "1 if hybrid sharding adds copies, and ZeRO 2 releases weights, on a step's last micro-batch",
    "fully_shard: set_requires_all_reduce, set_reshard_after_backward; pipelines do it each time",
)
def last_only(syncs_once: Column, pp: Column) -> Column:
    """Whether copies of shards communicate once per step, (n,)."""
    return np.asarray(syncs_once * (pp == 1), float)


@term(
    "passes",
    "reduce_passes, or once per step if last_only",
    "all-reduces of shards among the copies of hybrid sharding",
)
def copy_passes(reduce_passes: Column, last_only: Column) -> Column:
    """All-reduces among copies of shards per step."""
    return np.asarray(np.where(last_only > 0, 1.0, reduce_passes))


@term(
    "passes",
    "reductions of the gradients per step: one, or one per micro-batch for ZeRO-2 and 3 unless "
    "keeps_weights",
    "sharded gradients are reduced before the next micro-batch adds to them",
)
def reduce_passes(zero: Column, accumulation: Column, keeps_weights: Column) -> Column:
    """Reductions of the gradients per step."""
    return np.asarray(1 + (accumulation - 1) * (zero >= 2) * (1 - keeps_weights))


@term(
    "passes",
    "gather_passes, less the backward pass of live layers, and later micro-batches of persistent "
    "ones",
    "fully_shard: reshard_after_forward, set_reshard_after_backward",
)
def stage_gather_passes(
    gather_passes: Column,
    accumulation: Column,
    live_layers: Column,
    persistent_layers: Column,
    layer_params: Column,
    stage_params: Column,
    pp: Column,
) -> Column:
    """Gathers of the full parameters per step, averaged over a stage's parameters, (S, n)."""
    share = np.minimum(live_layers * layer_params / stage_params, 1.0)
    once = (persistent_layers > 0) & (pp == 1)
    return np.asarray(gather_passes - share * np.where(once, 2 * accumulation - 1, accumulation))


@term(
    "B",
    "reduce_bytes; torch's own modules (orrery, fsdp2): sharded_reduce_bytes from ZeRO 2, else "
    "grad_bytes",
    "DistributedDataParallel reduces gradients in their own dtype, fully_shard in "
    "MixedPrecisionPolicy.reduce_dtype",
)
def gradient_sent_bytes(
    row_sharded: Column,
    zero: Column,
    sharded_reduce_bytes: Column,
    grad_bytes: Column,
    reduce_bytes: Column,
) -> Column:
    """Bytes per gradient element in collectives, (n,)."""
    return np.where(
        row_sharded == 1, np.where(zero >= 2, sharded_reduce_bytes, grad_bytes), reduce_bytes
    )


@term(
    "B",
    "gathered_weight_bytes; torch's own modules (orrery, fsdp2) under ZeRO 1: param_bytes",
    "ZeroRedundancyOptimizer",
)
def weight_sent_bytes(
    row_sharded: Column, zero: Column, param_bytes: Column, gathered_weight_bytes: Column
) -> Column:
    """Bytes per weight element in collectives, (n,).

    Under ZeRO 1 updated weights are sent in their stored dtype.
    """
    return np.where((row_sharded == 1) & (zero == 1), param_bytes, gathered_weight_bytes)


@term(
    "B",
    "gather_passes x params x compute_bytes + (2, or 1 if sharded) x reduce_passes x params x "
    "reduce_bytes",
    "ZeRO, arXiv 1910.02054, section 7: 2, 2, 2, 3 times the parameters; experts over dp x cp / ep",
)
def stage_dp_bytes(
    dense_stage_params: Column,
    expert_stage_params: Column,
    gather_passes: Column,
    reduce_passes: Column,
    copy_passes: Column,
    zero: Column,
    dp: Column,
    cp: Column,
    ep: Column,
    dp_replicate: Column,
    compute_bytes: Column,
    reduce_bytes: Column,
) -> Column:
    """Data parallel volume of a stage as textbooks count it, (S, n)."""
    params, shards = (
        dense_stage_params * (dp * cp > 1) + expert_stage_params * (dp * cp > ep),
        zero > 0,
    )
    groups = (dp * cp, dp_replicate)
    return _sent(
        params,
        groups,
        gather_passes * compute_bytes,
        (reduce_passes * reduce_bytes, copy_passes * reduce_bytes),
        shards,
        shards,
    )


@term(
    "B",
    "stage_dp_bytes with weight_sent_bytes and gradient_sent_bytes; torch's own ZeRO 1 (orrery, "
    "fsdp2) reduces full gradients",
    "determines the time; stage_dp_bytes is the volume of the textbooks",
)
def stage_dp_sent_bytes(
    dense_stage_params: Column,
    expert_stage_params: Column,
    trained_stage_params: Column,
    quantized_stage_params: Column,
    stage_gather_passes: Column,
    reduce_passes: Column,
    copy_passes: Column,
    zero: Column,
    dp: Column,
    cp: Column,
    ep: Column,
    dp_replicate: Column,
    weight_sent_bytes: Column,
    gradient_sent_bytes: Column,
    row_sharded: Column,
) -> Column:
    """Data parallel bytes that a stage sends, (S, n)."""
    groups, shards = (dp * cp, dp_replicate), zero > 0
    params = dense_stage_params * (dp * cp > 1) + expert_stage_params * (dp * cp > ep)
    total = dense_stage_params + expert_stage_params
    trained = np.minimum(trained_stage_params / total, 1.0)
    # ZeRO 1 sends what was updated; later stages gather all but weights in 4 bits
    gathered = np.where(zero == 1, trained, 1 - quantized_stage_params / total)
    reduce_scattered = shards & ~((row_sharded == 1) & (zero == 1))
    return _sent(
        params,
        groups,
        gathered * stage_gather_passes * weight_sent_bytes,
        (
            trained * reduce_passes * gradient_sent_bytes,
            trained * copy_passes * gradient_sent_bytes,
        ),
        shards,
        reduce_scattered,
    )


def _sent(
    params: Column,
    groups: tuple[Column, Column],
    gathered: Column,
    reductions: tuple[Column, Column],
    shards: Column,
    reduce_scattered: Column,
) -> Column:
    """Bytes sent per step; `gathered` and `reductions` are bytes per parameter over all passes.

    `reductions`: within the group of shards, and among copies of a shard.
    `reduce_scattered`: whether gradients are reduce-scattered instead of all-reduced.
    """
    group, copies = groups
    reduced, added = reductions
    local = gathered + reduced * (2 - reduce_scattered)
    parts = np.maximum(1, group / copies)
    across = 2 * added / parts * (copies > 1) * shards
    return np.asarray(params * (local * ((parts > 1) | ~shards) + across))


@term("B", "largest of stage_dp_bytes")
def dp_bytes(stage_dp_bytes: Column) -> Column:
    """Data parallel volume of the worst stage, (n,)."""
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
    """Volume of one worker with a parameter server, (n,)."""
    worst = (dense_stage_params + expert_stage_params).max(axis=0)
    return np.asarray(2 * worst * reduce_bytes * (dp > 1))


@term(
    "B",
    "dp x parameter_server_bytes",
    "what passes the one server's link in each step; a ring's volume per link is constant",
)
def parameter_server_link_bytes(parameter_server_bytes: Column, dp: Column) -> Column:
    """Volume of the parameter server's own link, (n,)."""
    return np.asarray(parameter_server_bytes * dp)
