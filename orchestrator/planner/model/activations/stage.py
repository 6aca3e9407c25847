"""Saved activations of a pipeline rank at its peak: layers times micro-batches in flight.

Does not depend on which tensors a layer saves.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import RECOMPUTE, SCHEDULE
from orchestrator.planner.model.terms import Column, term
from orchestrator.planner.schedules.inflight import in_flight


@term(
    "micro-batches",
    "by schedule: gpipe m; 1f1b min(m, p - i); others by their orders",
    "orchestrator.planner.schedules.inflight",
)
def in_flight_micro_batches(
    schedule: Column, pp: Column, virtual_stages: Column, accumulation: Column, stage: Column
) -> Column:
    """Micro-batches held at once on a rank, (S, n); 1 without a pipeline.

    In full ranks: a chunk counts 1 / virtual_stages.
    """
    held = in_flight(schedule, pp, virtual_stages, np.maximum(1, accumulation), stage)
    return np.where(pp > 1, held, 1.0)


@term(
    "micro-batches",
    "gpipe: all of the step; else 1",
    "on the last stage, a backward pass directly follows its forward pass",
)
def last_in_flight(schedule: Column, accumulation: Column, pp: Column) -> Column:
    """Micro-batches whose logits and final norm are held at once."""
    return np.asarray(
        np.where((schedule == SCHEDULE["gpipe"]) & (pp > 1), np.maximum(1, accumulation), 1)
    )


@term("B", "dense layers x layer_activation_dense + MoE layers x layer_activation_moe")
def stage_layers_bytes(
    stage_dense_layers: Column,
    layer_activation_dense_bytes: Column,
    stage_moe_layers: Column,
    layer_activation_moe_bytes: Column,
) -> Column:
    """One micro-batch of a rank's layers, (S, n)."""
    return np.asarray(
        stage_dense_layers * layer_activation_dense_bytes
        + stage_moe_layers * layer_activation_moe_bytes
    )


@term("B", "recompute auto: budget beyond its minimum, at most all activations; else 0")
def auto_saved_bytes(
    recompute: Column,
    recompute_budget_bytes: Column,
    in_flight_micro_batches: Column,
    stage_layers_bytes: Column,
    stage_dense_layers: Column,
    full_dense_bytes: Column,
    stage_moe_layers: Column,
    full_moe_bytes: Column,
) -> Column:
    """What recompute auto saves beyond its minimum, (S, n).

    The budget bounds what the rank's layers save for all micro-batches in flight.
    """
    if not np.any(recompute == RECOMPUTE["auto"]):
        return np.zeros(())
    minimum = in_flight_micro_batches * stage_layers_bytes
    full = in_flight_micro_batches * (
        stage_dense_layers * full_dense_bytes + stage_moe_layers * full_moe_bytes
    )
    extra = np.clip(recompute_budget_bytes - minimum, 0.0, np.maximum(full - minimum, 0.0))
    return np.where(recompute == RECOMPUTE["auto"], extra, 0.0)


@term(
    "",
    "share of the layers' forward work that is recomputed: full 1; auto what is not saved; else 0",
    "on the rank that saves the smallest share; work is taken as proportional to saved bytes",
)
def recomputed_share(
    recompute: Column,
    auto_saved_bytes: Column,
    in_flight_micro_batches: Column,
    stage_layers_bytes: Column,
    stage_dense_layers: Column,
    full_dense_bytes: Column,
    stage_moe_layers: Column,
    full_moe_bytes: Column,
) -> Column:
    """Share of forward work that is recomputed, (n,)."""
    always = np.asarray(recompute == RECOMPUTE["full"], float)
    if not np.any(recompute == RECOMPUTE["auto"]):
        return always
    full = in_flight_micro_batches * (
        stage_dense_layers * full_dense_bytes + stage_moe_layers * full_moe_bytes
    )
    room = np.maximum(full - in_flight_micro_batches * stage_layers_bytes, 0.0)
    dropped = np.where(room > 0, 1 - auto_saved_bytes / np.maximum(room, 1.0), 0.0).max(axis=0)
    return np.where(recompute == RECOMPUTE["auto"], dropped, always)


@term(
    "B",
    "first stage: (8 x tokens, and the mask of the embedding's dropout) x micro-batches in flight",
)
def embedding_saved_bytes(
    stage_first: Column,
    local_tokens: Column,
    residual_mask_bytes: Column,
    in_flight_micro_batches: Column,
) -> Column:
    """Token indices, (S, n); the embedding's output is the first block's input."""
    return np.asarray(
        stage_first * in_flight_micro_batches * (8.0 * local_tokens + residual_mask_bytes)
    )


@term(
    "B",
    "last stage: residual_tokens x (norm_bytes_per_token, a frozen decomposed norm without its "
    "product) + input_tokens x hidden x compute_bytes if the head is trained",
    "Korthikanti et al. 2022, section 4.3: 4sbh",
)
def final_norm_saved_bytes(
    stage_last: Column,
    residual_tokens: Column,
    norm_bytes_per_token: Column,
    input_tokens: Column,
    hidden: Column,
    compute_bytes: Column,
    last_in_flight: Column,
    keeps_head_input: Column,
) -> Column:
    """Inputs of the final norm and of the output projection, (S, n)."""
    head_input = input_tokens * (hidden * compute_bytes * keeps_head_input)
    micro_batch = residual_tokens * norm_bytes_per_token + head_input
    return np.asarray(stage_last * (last_in_flight * micro_batch))


@term(
    "B",
    "unless recomputed in full: 4 x (seq_len / cp) x rotary width",
    "fp32 cosines and sines, each half as wide",
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
    saved = rope * (recompute != RECOMPUTE["full"])
    return np.asarray(saved * (4.0 * seq_len / cp * np.where(is_mla == 1, qk_rope, head_dim)))


@term(
    "B",
    "in_flight x stage_layers + auto_saved + embedding_saved + final_norm_saved + rotary_tables",
)
def activations_bytes(
    in_flight_micro_batches: Column,
    stage_layers_bytes: Column,
    auto_saved_bytes: Column,
    embedding_saved_bytes: Column,
    final_norm_saved_bytes: Column,
    rotary_tables_bytes: Column,
) -> Column:
    """What autograd saves on each rank for all micro-batches in flight, no loss, (S, n)."""
    layers = in_flight_micro_batches * stage_layers_bytes + auto_saved_bytes
    return np.asarray(layers + embedding_saved_bytes + final_norm_saved_bytes + rotary_tables_bytes)


@term(
    "B",
    "activations + logits_saved x last_in_flight",
    "what a run's metric memory/activations_bytes counts",
)
def saved_for_backward_bytes(
    activations_bytes: Column, logits_saved_bytes: Column, last_in_flight: Column
) -> Column:
    """All that autograd saves, including the loss, (S, n)."""
    return np.asarray(activations_bytes + logits_saved_bytes * last_in_flight)


@term(
    "B",
    "the layer in its backward pass: recomputed tensors (full - saved) and gradients of (1 + "
    "gated) "
    "x inner width",
    "measured with torch's MemTracker",
)
def layer_working_bytes(
    dense_layers: Column,
    moe_layers: Column,
    full_dense_bytes: Column,
    full_moe_bytes: Column,
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
    """Temporary tensors of a layer's backward pass, in addition to saved activations."""
    gradient_bytes = (1 + gated) * compute_bytes
    dense = full_dense_bytes - layer_activation_dense_bytes + split_tokens * (ffn * gradient_bytes)
    inner = routed_share * expert_ffn + shared_ffn
    routed = full_moe_bytes - layer_activation_moe_bytes + split_tokens * (inner * gradient_bytes)
    return np.asarray(
        np.maximum(np.where(dense_layers > 0, dense, 0.0), np.where(moe_layers > 0, routed, 0.0))
    )
