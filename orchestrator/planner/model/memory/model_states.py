"""Model states of each pipeline rank: parameters, gradients, optimizer states and sharding.

Does not depend on activations, buffers or time.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import OFFLOAD
from orchestrator.planner.model.terms import Column, term

_ZERO = "ZeRO, arXiv 1910.02054, section 5"


@term("", "devices that share one copy of what ZeRO shards: dp / dp_replicate x cp", _ZERO)
def shard(dp_shard: Column, cp: Column) -> Column:
    """Devices of one shard group."""
    return dp_shard * cp


@term(
    "",
    "shard / ep: devices that share one copy of an expert's states",
    "expert data parallel, DeepSpeed-MoE",
)
def expert_shard(shard: Column, ep: Column) -> Column:
    """Devices of one shard group of experts."""
    return np.maximum(1.0, shard / ep)


@term(
    "",
    "min(tp, kv_heads); 1 if tp > kv_heads and every rank stores all of them (orrery)",
    "arXiv 1909.08053",
)
def kv_split(tp: Column, kv_heads: Column, whole_kv: Column) -> Column:
    """Shards into which tensor parallelism splits the weights of keys and values, (n,)."""
    return np.where((whole_kv == 1) & (tp > kv_heads), 1.0, np.minimum(tp, kv_heads))


@term(
    "parameters", "norms + sharded / tp + key and value / kv_split + replicated", "arXiv 1909.08053"
)
def attention_params(
    params_norms: Column,
    params_attention_split: Column,
    params_attention_kv: Column,
    params_attention_whole: Column,
    tp: Column,
    kv_split: Column,
) -> Column:
    """Attention and both norms of one layer on one tensor parallel rank.

    Key heads are replicated if tp > kv_heads.
    """
    kv = params_attention_kv / kv_split
    return np.asarray(params_norms + params_attention_split / tp + kv + params_attention_whole)


@term("parameters", "attention + sharded part of the MLP / tp + the rest of it", "arXiv 1909.08053")
def dense_layer_params(
    attention_params: Column, params_dense_split: Column, params_dense_whole: Column, tp: Column
) -> Column:
    """Parameters of a dense layer on one tensor parallel rank."""
    return attention_params + params_dense_split / tp + params_dense_whole


@term(
    "parameters",
    "attention + router + sharded part of shared experts / tp + the rest of them",
    "an MoE layer without its routed experts",
)
def routing_layer_params(
    attention_params: Column,
    params_router: Column,
    params_shared_split: Column,
    params_shared_whole: Column,
    tp: Column,
) -> Column:
    """Parameters of an MoE layer without routed experts on one tensor parallel rank."""
    return attention_params + params_router + params_shared_split / tp + params_shared_whole


@term(
    "parameters",
    "experts / ep x (sharded part of an expert / tp + the rest of it)",
    "routed experts of one layer on one device",
)
def layer_expert_params(
    experts: Column,
    params_expert_split: Column,
    params_expert_whole: Column,
    tp: Column,
    ep: Column,
) -> Column:
    """Routed experts of one layer on one device."""
    return experts / ep * (params_expert_split / tp + params_expert_whole)


@term("parameters", "local_vocab x hidden + learned positions", "token table on the first stage")
def embedding_params(local_vocab: Column, hidden: Column, params_positions: Column) -> Column:
    """Token table and positions on one tensor parallel rank."""
    return local_vocab * hidden + params_positions


@term(
    "parameters",
    "last stage: final norm + head_rows x hidden if untied or copied from another stage",
)
def head_params(
    head_rows: Column,
    hidden: Column,
    tied: Column,
    params_final_norm: Column,
    stage_first: Column,
    stage_last: Column,
) -> Column:
    """Final norm and output head, (S, n).

    A tied head on a stage without the token table is a copy, synchronized by an all-reduce of its
    gradient.
    """
    own = np.where((tied == 1) & (stage_first == 1), 0.0, head_rows * hidden)
    return np.asarray(stage_last * (params_final_norm + own))


@term(
    "parameters",
    "layers of the stage + embedding on the first + head on the last, without routed experts",
)
def dense_stage_params(
    stage_dense_layers: Column,
    dense_layer_params: Column,
    stage_moe_layers: Column,
    routing_layer_params: Column,
    stage_first: Column,
    embedding_params: Column,
    head_params: Column,
) -> Column:
    """Parameters of a stage without routed experts, (S, n)."""
    layers = stage_dense_layers * dense_layer_params + stage_moe_layers * routing_layer_params
    return np.asarray(layers + stage_first * embedding_params + head_params)


@term("parameters", "MoE layers of the stage x their experts on this device")
def expert_stage_params(stage_moe_layers: Column, layer_expert_params: Column) -> Column:
    """Routed experts of a stage, (S, n)."""
    return stage_moe_layers * layer_expert_params


@term("parameters", "dense + routed experts, on one device before ZeRO")
def stage_params(dense_stage_params: Column, expert_stage_params: Column) -> Column:
    """Parameters of a stage before ZeRO, (S, n)."""
    return dense_stage_params + expert_stage_params


@term("parameters", "dense / shard + experts / expert_shard + rows rounded up", _ZERO)
def sharded_params(
    dense_stage_params: Column,
    expert_stage_params: Column,
    shard: Column,
    expert_shard: Column,
    stage_dense_layers: Column,
    layer_row_excess: Column,
    edge_row_excess: Column,
) -> Column:
    """Parameters of a stage that one device stores if all are sharded, (S, n)."""
    rounded = stage_dense_layers * layer_row_excess + edge_row_excess
    return np.asarray(dense_stage_params / shard + expert_stage_params / expert_shard + rounded)


@term(
    "",
    "versions of the weights that PipeDream stores: pp - stage, or pp with vertical sync",
    "arXiv 1806.03377, 3.3",
)
def weight_versions(
    weight_stashing: Column, vertical_sync: Column, pp: Column, stage: Column
) -> Column:
    """Stored weight versions, (S, n)."""
    versions = np.where(vertical_sync == 1, pp, pp - stage)
    return np.where(weight_stashing == 1, np.maximum(1.0, versions), 1.0)


@term("", "1 if each device stores only a shard of the weights: zero 3, or 2 in FSDP")
def params_sharded(zero: Column, fully_sharded: Column) -> Column:
    """1 if stored weights are sharded."""
    return np.asarray(zero >= np.where(fully_sharded == 1, 2, 3), float)


@term("", "1 if layers are gathered to full copies: sharded weights, in FSDP also on one device")
def params_gathered(params_sharded: Column, shard: Column, fully_sharded: Column) -> Column:
    """1 if full copies of stored weights exist for a time."""
    return np.asarray((params_sharded == 1) & ((shard > 1) | (fully_sharded == 1)), float)


@term(
    "B",
    "trained weights x param_bytes x versions + frozen ones x compute_bytes, sharded if "
    "params_sharded; + quantized x quantized_bytes; x (1 + value model's share)",
    _ZERO,
)
def all_params_bytes(
    trained_stage_params: Column,
    trained_sharded_params: Column,
    frozen_stage_params: Column,
    quantized_stage_params: Column,
    quantized_bytes: Column,
    shard: Column,
    params_sharded: Column,
    weight_versions: Column,
    param_bytes: Column,
    compute_bytes: Column,
    value_parameters_share: Column,
) -> Column:
    """Stored weights on device or host, (S, n); of PPO also the value model's."""
    sharded = params_sharded == 1
    trained = np.where(sharded, trained_sharded_params, trained_stage_params)
    frozen = np.where(sharded, frozen_stage_params / shard, frozen_stage_params) * compute_bytes
    own = trained * param_bytes * weight_versions + frozen
    own = own + quantized_stage_params * quantized_bytes
    return np.asarray(own * (1 + value_parameters_share))


@term("B", "all_params_bytes, 0 if offloaded", _ZERO)
def params_bytes(all_params_bytes: Column, offload: Column) -> Column:
    """Stored weights on the device, (S, n)."""
    return np.where(offload >= OFFLOAD["all"], 0.0, all_params_bytes)


@term("B", "gradients x grad_bytes x (1 + value model's share), sharded from zero 2", _ZERO)
def all_grads_bytes(
    trained_stage_params: Column,
    trained_sharded_params: Column,
    zero: Column,
    grad_bytes: Column,
    value_parameters_share: Column,
) -> Column:
    """Gradients of trained weights on device or host, (S, n)."""
    trained = np.where(zero >= 2, trained_sharded_params, trained_stage_params)
    return np.asarray(trained * grad_bytes * (1 + value_parameters_share))


@term("B", "all_grads_bytes, 0 if offloaded", _ZERO)
def grads_bytes(all_grads_bytes: Column, offload: Column, offload_grads: Column) -> Column:
    """Gradients on the device, (S, n).

    ZeRO-Offload (arXiv 2101.06840) moves each gradient to the host as soon as it is reduced.
    """
    away = (offload >= OFFLOAD["all"]) | ((offload == OFFLOAD["optimizer"]) & (offload_grads == 1))
    return np.where(away, 0.0, all_grads_bytes)


@term(
    "parameters", "parameters whose optimizer state this device stores: sharded from zero 1", _ZERO
)
def updated_params(
    trained_stage_params: Column,
    trained_sharded_params: Column,
    trained_expert_stage_params: Column,
    trained_dense_stage_params: Column,
    adapter_stage_params: Column,
    expert_shard: Column,
    greedy_share: Column,
    zero: Column,
) -> Column:
    """Parameters that this device updates, (S, n)."""
    dense = trained_dense_stage_params + adapter_stage_params
    split = dense * greedy_share + trained_expert_stage_params / expert_shard
    return np.where(
        zero >= 2, trained_sharded_params, np.where(zero == 1, split, trained_stage_params)
    )


@term(
    "B",
    "(updated_params x (master weights + moments) + states of Adafactor and Muon) x (1 + value "
    "model's share)",
    _ZERO,
)
def all_optimizer_bytes(
    updated_params: Column,
    master_bytes: Column,
    moment_bytes: Column,
    special_moments_bytes: Column,
    value_parameters_share: Column,
) -> Column:
    """Optimizer states on device or host, (S, n).

    K = 12 of the ZeRO paper is an fp32 master copy and Adam's two fp32 moments.
    """
    states = updated_params * (master_bytes + moment_bytes) + special_moments_bytes
    return np.asarray(states * (1 + value_parameters_share))


@term("B", "all_optimizer_bytes, 0 if offloaded", _ZERO)
def optimizer_bytes(all_optimizer_bytes: Column, offload: Column) -> Column:
    """Optimizer states on the device, (S, n)."""
    return np.where(offload == OFFLOAD["none"], all_optimizer_bytes, 0.0)
