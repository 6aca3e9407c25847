"""Sums of trained, frozen, quantized and added parameters over the stages and ranks of a plan.

Does not depend on dtypes of frozen weights, memory or time.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.memory import model_states
from orchestrator.planner.model.terms import TERMS, Column, Term, term


def _trained_variant(name: str) -> None:
    """Register `trained_<name>`: the same sum over the trained parameters."""
    whole = TERMS.terms[name]
    renamed = tuple(
        f"trained_{each}"
        if each.startswith("params_") or f"trained_{each}" in TERMS.terms
        else each
        for each in whole.inputs
    )
    TERMS.terms[f"trained_{name}"] = Term(
        f"trained_{name}",
        whole.unit,
        f"{whole.formula}; of trained parameters",
        whole.source,
        renamed,
        whole.function,
    )


for _term in (
    model_states.attention_params,
    model_states.dense_layer_params,
    model_states.routing_layer_params,
    model_states.layer_expert_params,
):
    _trained_variant(_term.__name__)


@term("parameters", "embedding_params if the table and positions are trained")
def trained_embedding_params(
    embedding_params: Column,
    params_positions: Column,
    trained_params_embedding: Column,
    trained_params_positions: Column,
) -> Column:
    """Trained parameters of the token table and positions on one tensor parallel rank."""
    table = (embedding_params - params_positions) * (trained_params_embedding > 0)
    return np.asarray(table + trained_params_positions)


@term("parameters", "head_params if final norm and head, or the table it is tied to, are trained")
def trained_head_params(
    head_params: Column,
    params_final_norm: Column,
    stage_last: Column,
    tied: Column,
    trained_params_final_norm: Column,
    trained_params_head: Column,
    trained_params_embedding: Column,
) -> Column:
    """Trained parameters of final norm and head, (S, n)."""
    weight = np.where(tied == 1, trained_params_embedding, trained_params_head) > 0
    own = (head_params - stage_last * params_final_norm) * weight
    return np.asarray(own + stage_last * trained_params_final_norm)


for _term in (model_states.dense_stage_params, model_states.expert_stage_params):
    _trained_variant(_term.__name__)


@term("parameters", "layers x (split / tp + whole) + what the adapter adds once, first stage")
def adapter_stage_params(
    stage_layers: Column,
    adapter_split: Column,
    adapter_whole: Column,
    adapter_edge: Column,
    stage_first: Column,
    tp: Column,
) -> Column:
    """Parameters that an adapter adds to a stage, (S, n)."""
    return np.asarray(
        stage_layers * (adapter_split / tp + adapter_whole) + stage_first * adapter_edge
    )


@term("parameters", "trained dense + trained experts + adapter, on one device before ZeRO")
def trained_stage_params(
    trained_dense_stage_params: Column,
    trained_expert_stage_params: Column,
    adapter_stage_params: Column,
) -> Column:
    """Parameters of a stage that are trained, before ZeRO, (S, n)."""
    return trained_dense_stage_params + trained_expert_stage_params + adapter_stage_params


@term("parameters", "sharded_params of trained parameters; the adapter's over shard")
def trained_sharded_params(
    sharded_params: Column,
    trained_dense_stage_params: Column,
    trained_expert_stage_params: Column,
    adapter_stage_params: Column,
    shard: Column,
    expert_shard: Column,
    trains_all: Column,
) -> Column:
    """Trained parameters of a stage that one device stores if all are sharded, (S, n)."""
    dense = trained_dense_stage_params + adapter_stage_params
    own = dense / shard + trained_expert_stage_params / expert_shard
    return np.asarray(np.where(trains_all == 1, sharded_params, own))


@term("parameters", "linear layers in 4 bits, sharded by tp; buffers, which ZeRO does not shard")
def quantized_stage_params(
    stage_layers: Column,
    stage_dense_layers: Column,
    stage_moe_layers: Column,
    quantized_attention_split: Column,
    quantized_attention_kv: Column,
    quantized_attention_whole: Column,
    quantized_dense_split: Column,
    quantized_shared_split: Column,
    tp: Column,
    kv_split: Column,
) -> Column:
    """Parameters of a stage that are stored in 4 bits, (S, n)."""
    attention = quantized_attention_split / tp + quantized_attention_kv / kv_split
    return np.asarray(
        stage_layers * (attention + quantized_attention_whole)
        + (stage_dense_layers * quantized_dense_split + stage_moe_layers * quantized_shared_split)
        / tp
    )


@term("parameters", "stage_params - trained - quantized, without the adapter")
def frozen_stage_params(
    stage_params: Column,
    trained_dense_stage_params: Column,
    trained_expert_stage_params: Column,
    quantized_stage_params: Column,
    trains_all: Column,
) -> Column:
    """Frozen parameters of a stage in the compute type, before ZeRO, (S, n)."""
    trained = trained_dense_stage_params + trained_expert_stage_params
    rest = np.maximum(stage_params - trained - quantized_stage_params, 0.0)
    return np.asarray(np.where(trains_all == 1, 0.0, rest))
