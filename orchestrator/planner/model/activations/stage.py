"""Activations of a pipeline rank at its worst moment: layers times micro-batches in flight, and
what is around them.

Knows how often a layer's bytes are held; not what is in them.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.inputs import RECOMPUTE, SCHEDULE
from orchestrator.planner.model.terms import Column, term
from orchestrator.planner.schedules.inflight import in_flight


@term(
    "micro-batches",
    "by schedule: gpipe m; 1f1b min(m, p - i); the others as their orders run",
    "orchestrator.planner.schedules.inflight",
)
def in_flight_micro_batches(
    schedule: Column, pp: Column, virtual_stages: Column, accumulation: Column, stage: Column
) -> Column:
    """(S, n).

    Held at once on a rank, in whole ranks: a chunk counts 1 / virtual_stages. One without a
    pipeline.
    """
    held = in_flight(schedule, pp, virtual_stages, np.maximum(1, accumulation), stage)
    return np.where(pp > 1, held, 1.0)


@term(
    "micro-batches",
    "gpipe: all of the step; else 1",
    "the last stage's backward pass follows its forward pass",
)
def last_in_flight(schedule: Column, accumulation: Column, pp: Column) -> Column:
    """Micro-batches whose logits and final norm are held at once."""
    return np.asarray(
        np.where((schedule == SCHEDULE["gpipe"]) & (pp > 1), np.maximum(1, accumulation), 1)
    )


@term("B", "dense layers x layer_activation_dense + routing layers x layer_activation_moe")
def stage_layers_bytes(
    stage_dense_layers: Column,
    layer_activation_dense_bytes: Column,
    stage_moe_layers: Column,
    layer_activation_moe_bytes: Column,
) -> Column:
    """(S, n). One micro-batch of a rank's layers."""
    return np.asarray(
        stage_dense_layers * layer_activation_dense_bytes
        + stage_moe_layers * layer_activation_moe_bytes
    )


@term("B", "recompute auto: what the budget leaves beyond the least, at most all; else 0")
def auto_kept_bytes(
    recompute: Column,
    recompute_budget_bytes: Column,
    in_flight_micro_batches: Column,
    stage_layers_bytes: Column,
    stage_dense_layers: Column,
    whole_dense_bytes: Column,
    stage_moe_layers: Column,
    whole_moe_bytes: Column,
) -> Column:
    """(S, n). The budget bounds what the rank's layers keep of all micro-batches in flight."""
    if not np.any(recompute == RECOMPUTE["auto"]):
        return np.zeros(())
    least = in_flight_micro_batches * stage_layers_bytes
    whole = in_flight_micro_batches * (
        stage_dense_layers * whole_dense_bytes + stage_moe_layers * whole_moe_bytes
    )
    more = np.clip(recompute_budget_bytes - least, 0.0, np.maximum(whole - least, 0.0))
    return np.where(recompute == RECOMPUTE["auto"], more, 0.0)


@term(
    "",
    "share of the layers' forward work that runs again: full 1; auto what it does not keep of "
    "all; else 0",
    "on the rank that keeps the least share; work taken in proportion to what is kept",
)
def recomputed_share(
    recompute: Column,
    auto_kept_bytes: Column,
    in_flight_micro_batches: Column,
    stage_layers_bytes: Column,
    stage_dense_layers: Column,
    whole_dense_bytes: Column,
    stage_moe_layers: Column,
    whole_moe_bytes: Column,
) -> Column:
    """(n,)."""
    full = np.asarray(recompute == RECOMPUTE["full"], float)
    if not np.any(recompute == RECOMPUTE["auto"]):
        return full
    whole = in_flight_micro_batches * (
        stage_dense_layers * whole_dense_bytes + stage_moe_layers * whole_moe_bytes
    )
    room = np.maximum(whole - in_flight_micro_batches * stage_layers_bytes, 0.0)
    dropped = np.where(room > 0, 1 - auto_kept_bytes / np.maximum(room, 1.0), 0.0).max(axis=0)
    return np.where(recompute == RECOMPUTE["auto"], dropped, full)


@term(
    "B",
    "first stage: (8 x tokens, and the mask of the embedding's dropout) x micro-batches in flight",
)
def embedding_kept_bytes(
    stage_first: Column,
    local_tokens: Column,
    residual_mask_bytes: Column,
    in_flight_micro_batches: Column,
) -> Column:
    """(S, n). Token indices; the embedding's output is the first block's input."""
    return np.asarray(
        stage_first * in_flight_micro_batches * (8.0 * local_tokens + residual_mask_bytes)
    )


@term(
    "B",
    "last stage: residual_tokens x norm_bytes_per_token + input_tokens x hidden x compute_bytes",
    "Korthikanti et al. 2022, section 4.3: 4sbh",
)
def final_norm_kept_bytes(
    stage_last: Column,
    residual_tokens: Column,
    norm_bytes_per_token: Column,
    input_tokens: Column,
    hidden: Column,
    compute_bytes: Column,
    last_in_flight: Column,
) -> Column:
    """(S, n). Inputs of the final norm and of the output projection."""
    each = residual_tokens * norm_bytes_per_token + input_tokens * (hidden * compute_bytes)
    return np.asarray(stage_last * (last_in_flight * each))


@term(
    "B",
    "unless recomputed in full: 4 x (seq_len / cp) x rotary width",
    "fp32 cosines and sines, half as wide each",
)
def rotary_tables_bytes(
    rope: Column,
    seq_len: Column,
    cp: Column,
    is_mla: Column,
    qk_rope: Column,
    head_dim: Column,
    recompute: Column,
) -> Column:
    """One pair of tables that all layers and micro-batches share."""
    kept = rope * (recompute != RECOMPUTE["full"])
    return np.asarray(kept * (4.0 * seq_len / cp * np.where(is_mla == 1, qk_rope, head_dim)))


@term(
    "B", "in_flight x stage_layers + auto_kept + embedding_kept + final_norm_kept + rotary_tables"
)
def activations_bytes(
    in_flight_micro_batches: Column,
    stage_layers_bytes: Column,
    auto_kept_bytes: Column,
    embedding_kept_bytes: Column,
    final_norm_kept_bytes: Column,
    rotary_tables_bytes: Column,
) -> Column:
    """(S, n). What autograd keeps of all micro-batches in flight on each rank, without the loss."""
    layers = in_flight_micro_batches * stage_layers_bytes + auto_kept_bytes
    return np.asarray(layers + embedding_kept_bytes + final_norm_kept_bytes + rotary_tables_bytes)


@term(
    "B",
    "activations + logits_kept x last_in_flight",
    "what a run's metric memory/activations_bytes counts",
)
def saved_for_backward_bytes(
    activations_bytes: Column, logits_kept_bytes: Column, last_in_flight: Column
) -> Column:
    """(S, n). All that autograd keeps, the loss included."""
    return np.asarray(activations_bytes + logits_kept_bytes * last_in_flight)


@term(
    "B",
    "the layer whose backward pass runs: what is computed again (whole - kept) and (1 + gated) x "
    "inner width of "
    "gradients",
    "measured with torch's MemTracker",
)
def layer_working_bytes(
    dense_layers: Column,
    moe_layers: Column,
    whole_dense_bytes: Column,
    whole_moe_bytes: Column,
    layer_activation_dense_bytes: Column,
    layer_activation_moe_bytes: Column,
    split_tokens: Column,
    ffn: Column,
    routed_share: Column,
    expert_ffn: Column,
    shared_ffn: Column,
    gated: Column,
    compute_bytes: Column,
) -> Column:
    """Beside what is kept, while one layer's backward pass runs."""
    each = (1 + gated) * compute_bytes
    dense = whole_dense_bytes - layer_activation_dense_bytes + split_tokens * (ffn * each)
    inner = routed_share * expert_ffn + shared_ffn
    routed = whole_moe_bytes - layer_activation_moe_bytes + split_tokens * (inner * each)
    return np.asarray(
        np.maximum(np.where(dense_layers > 0, dense, 0.0), np.where(moe_layers > 0, routed, 0.0))
    )
