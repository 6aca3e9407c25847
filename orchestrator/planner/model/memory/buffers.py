"""Device memory besides states and activations: gathered or cast weights, buckets, workspace.

`moments` has the temporary peaks of the backward pass, which the sum includes. Does not depend on
what activations contain.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import OFFLOAD, RECOMPUTE
from orchestrator.planner.model.terms import Column, term

DEEPSPEED_LIVE_PARAMS = 1e9  # stage3_max_live_parameters


@term("parameters", "the largest layer on one device, its experts included")
def layer_params(
    dense_layers: Column,
    moe_layers: Column,
    dense_layer_params: Column,
    routing_layer_params: Column,
    layer_expert_params: Column,
) -> Column:
    """Parameters of the largest layer on one device, with its experts."""
    dense = np.where(dense_layers > 0, dense_layer_params, 0.0)
    return np.asarray(
        np.maximum(dense, np.where(moe_layers > 0, routing_layer_params + layer_expert_params, 0.0))
    )


@term("parameters", "embedding on the rank of the first stage, else 0")
def lookup_params(stage_first: Column, embedding_params: Column) -> Column:
    """Embedding parameters of each rank, (S, n)."""
    return stage_first * embedding_params


@term("parameters", "lookup + head: parameters outside the layers")
def edge_params(lookup_params: Column, head_params: Column) -> Column:
    """Parameters outside the layers, (S, n)."""
    return lookup_params + head_params


@term(
    "",
    "1 if layers, and if the table, have fewer parameters than the persistence threshold",
    "DeepSpeed stage3_param_persistence_threshold, for units of one all-gather",
)
def persistent_layers(
    layer_params: Column, persistence_threshold: Column, fully_sharded: Column
) -> Column:
    """Whether a stage's layers stay gathered until the update, (n,)."""
    return np.asarray((layer_params < persistence_threshold) * fully_sharded, float)


@term(
    "layers",
    "the last layers of a stage that fit max_live_params besides the head and the (1 + "
    "prefetch_layers) layers gathered at a time; all if persistent",
    "DeepSpeed stage3_max_live_parameters; fully_shard: reshard_after_forward",
)
def live_layers(
    stage_layers: Column,
    layer_params: Column,
    edge_params: Column,
    head_params: Column,
    tied: Column,
    prefetch_layers: Column,
    max_live_params: Column,
    persistent_layers: Column,
    fully_sharded: Column,
    zero: Column,
) -> Column:
    """Layers that ZeRO 3 keeps gathered from forward to backward pass, (S, n)."""
    rest = np.where(tied == 1, edge_params, head_params)
    room = max_live_params - rest - (1 + prefetch_layers) * layer_params
    fit = np.clip(np.floor(room / layer_params), 0, stage_layers) * (max_live_params > 0)
    retained = np.where(persistent_layers > 0, stage_layers, fit)
    return np.asarray(retained * fully_sharded * (zero == 3))


@term(
    "parameters",
    "FSDP: head, or the table it is tied to, and live_layers; DeepSpeed: "
    "stage3_max_live_parameters",
    "parameters kept gathered",
)
def resident_params(
    edge_params: Column,
    head_params: Column,
    lookup_params: Column,
    tied: Column,
    stage_params: Column,
    fully_sharded: Column,
    max_live_params: Column,
    live_layers: Column,
    layer_params: Column,
    persistence_threshold: Column,
) -> Column:
    """Parameters that stay gathered from forward to backward if all are sharded, (S, n)."""
    live = np.where(max_live_params > 0, max_live_params, DEEPSPEED_LIVE_PARAMS)
    edges = (tied == 1) | (lookup_params < persistence_threshold)
    whole = np.where(edges, edge_params, head_params) + live_layers * layer_params
    return np.asarray(np.minimum(np.where(fully_sharded == 1, whole, live), stage_params))


@term(
    "B",
    "full copies of sharded weights and casts of wider ones, held from forward to backward x "
    "gathered_weight_bytes; those of token table and head x compute_bytes",
)
def gathered_bytes(
    stage_params: Column,
    frozen_stage_params: Column,
    quantized_stage_params: Column,
    resident_params: Column,
    edge_params: Column,
    lookup_params: Column,
    tied: Column,
    params_gathered: Column,
    zero: Column,
    param_bytes: Column,
    compute_bytes: Column,
    gathered_weight_bytes: Column,
    keeps_weights: Column,
    recompute: Column,
    offload: Column,
    trains_table: Column,
) -> Column:
    """Full copies and casts held from forward to backward, (S, n).

    ZeRO 2 keeps every copy, and so do casts unless the layer is recomputed; a lookup saves no
    table.
    """
    sharded, away = params_gathered == 1, offload >= OFFLOAD["all"]
    used = np.where(recompute == RECOMPUTE["full"], edge_params, stage_params) - np.where(
        tied == 1, 0, lookup_params * trains_table
    )
    # frozen weights are stored in the compute type, or in 4 bits and not gathered
    wide = np.maximum(used - frozen_stage_params - quantized_stage_params, 0.0)
    casts = wide * (param_bytes > compute_bytes)
    copies = np.where(
        sharded,
        np.where(
            (zero == 3) & (keeps_weights == 0),
            resident_params,
            stage_params - quantized_stage_params,
        ),
        np.where(away, edge_params, casts),
    )
    # the table and the head are not in fp8
    edge = np.minimum(copies, edge_params)
    return np.asarray((copies - edge) * gathered_weight_bytes + edge * compute_bytes)


@term(
    "B",
    "keeps_weights: trained stage parameters x sharded_reduce_bytes, until the last micro-batch",
    "torch fully_shard without gradient synchronization: unsharded gradients in the reduction's "
    "dtype",
)
def unsharded_grads_bytes(
    keeps_weights: Column,
    accumulation: Column,
    trained_stage_params: Column,
    sharded_reduce_bytes: Column,
) -> Column:
    """Full gradients that a pipeline adds before it reduces them once, (S, n)."""
    held = keeps_weights * (accumulation > 1)
    return np.asarray(held * trained_stage_params * sharded_reduce_bytes)


@term(
    "B",
    "layers gathered temporarily: (1 + prefetch_layers) x layer x gathered_weight_bytes; offloaded "
    "ones x compute_bytes; a layer that is cast: layer x compute_bytes",
)
def gathered_layers_bytes(
    layer_params: Column,
    prefetch_layers: Column,
    params_gathered: Column,
    shard: Column,
    zero: Column,
    param_bytes: Column,
    compute_bytes: Column,
    recompute: Column,
    offload: Column,
    fully_sharded: Column,
    resident_params: Column,
    stage_params: Column,
    quantized_stage_params: Column,
    trains_all: Column,
    keeps_weights: Column,
    gathered_weight_bytes: Column,
) -> Column:
    """Layers that are gathered or cast temporarily, (S, n)."""
    layer_params = layer_params * (1 - quantized_stage_params / stage_params)
    sharded, away = params_gathered == 1, offload >= OFFLOAD["all"]
    single = (shard == 1) & (offload < OFFLOAD["all"])  # gathers nothing ahead
    ahead = np.where(single, layer_params, (1 + prefetch_layers) * layer_params)
    ahead = ahead * (1 - keeps_weights)
    others = np.maximum(stage_params - resident_params, 0.0)
    beyond = np.where(
        fully_sharded == 1, np.minimum(ahead, others), np.maximum(ahead - resident_params, 0.0)
    )
    cast = (param_bytes > compute_bytes) & (recompute == RECOMPUTE["full"]) & (trains_all == 1)
    layers = np.where(
        sharded,
        beyond * (zero == 3) * gathered_weight_bytes,
        np.where(away, ahead, layer_params * cast) * compute_bytes,
    )
    return np.asarray(layers)


@term(
    "B",
    "one layer's full gradient and its copy in the reduction's dtype, if sharded",
    "torch fully_shard",
)
def reduction_bytes(
    layer_params: Column,
    compute_bytes: Column,
    sharded_reduce_bytes: Column,
    params_gathered: Column,
    stage_params: Column,
    trained_stage_params: Column,
) -> Column:
    """Temporary gradients of one layer during their reduction, (S, n)."""
    share = np.minimum(trained_stage_params / stage_params, 1.0)
    whole = share * layer_params * (compute_bytes + sharded_reduce_bytes)
    return np.where(params_gathered == 1, whole, 0.0)


@term(
    "B", "reduction and gathering bucket: min(bucket_elements, stage) x (grad_bytes + param_bytes)"
)
def bucket_bytes(
    bucket_elements: Column,
    stage_params: Column,
    grad_bytes: Column,
    param_bytes: Column,
    zero: Column,
    shard: Column,
) -> Column:
    """Reduction and gathering buckets, (S, n).

    DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size`, 5e8 elements by default.
    """
    held = np.minimum(bucket_elements, stage_params) * (grad_bytes + param_bytes)
    return np.where((zero >= 1) & (shard > 1), held, 0.0)


@term(
    "B",
    "flat copies of own gradients for the update: updated_params x (grad_bytes + 4) below fp32",
    "DeepSpeed",
)
def flat_gradient_bytes(
    flat_step: Column,
    updated_params: Column,
    stage_params: Column,
    grad_bytes: Column,
    param_bytes: Column,
    zero: Column,
    offload: Column,
) -> Column:
    """Flattened gradients for the update, (S, n).

    ZeRO 1 and 2 flatten the gradients of their partition and copy them to fp32. With fp32 gradients
    and 16-bit weights (`BF16_Optimizer`) all of autograd's gradients exist until they are added,
    after the backward pass.
    """
    flat = np.where(grad_bytes < 4, updated_params * (grad_bytes + 4), 0.0)
    own = np.where(grad_bytes > param_bytes, stage_params * param_bytes, 0.0)
    return np.asarray(
        flat_step * np.where((zero >= 1) & (offload == OFFLOAD["none"]), flat + own, 0.0)
    )


@term(
    "B",
    "dummy gradients: (layer + head) x compute_bytes",
    "Transformer Engine, fuse_wgrad_accumulation",
)
def dummy_gradient_bytes(
    fused_wgrad: Column, layer_params: Column, head_params: Column, compute_bytes: Column
) -> Column:
    """One empty gradient per weight shape, which autograd requires, (S, n)."""
    return np.asarray(fused_wgrad * (layer_params + head_params) * compute_bytes)


@term(
    "B",
    "keys and values x (min(2, cp - 1) x compute_bytes + min(4, cp + 1) x ring_grad_bytes) + "
    "queries x "
    "ring_grad_bytes + (queries, keys and values) x compute_bytes",
    "ring attention, arXiv 2310.01889, backward: one block in use and one arriving; gradient sums "
    "computed here, stored here, sent and received; the queries' sum; a block's own gradients",
)
def ring_bytes(
    cp: Column,
    kv_rows: Column,
    query_head_dim: Column,
    value_head_dim: Column,
    split_tokens: Column,
    heads: Column,
    compute_bytes: Column,
    ring_grad_bytes: Column,
) -> Column:
    """Ring attention buffers in a layer's backward pass, besides saved activations, (n,).

    The engine on gloo holds 7 to 26% more: gradients of a block live until those of the next block
    exist, and the CPU kernel repeats shared heads.
    """
    pairs, queries = (
        kv_rows * (query_head_dim + value_head_dim),
        split_tokens * heads * query_head_dim,
    )
    at_work, sums = np.minimum(2, cp - 1), np.minimum(4, cp + 1)
    held = pairs * (at_work * compute_bytes + sums * ring_grad_bytes) + queries * ring_grad_bytes
    return np.asarray((cp > 1) * (held + (queries + pairs) * compute_bytes))


@term(
    "B",
    "tokens x hidden x compute_bytes x (2 gathered + 2 and kept outputs in a pipeline) + "
    "ring_bytes",
)
def communication_bytes(
    local_tokens: Column,
    residual_tokens: Column,
    in_flight_micro_batches: Column,
    pp: Column,
    hidden: Column,
    compute_bytes: Column,
    sequence_parallel: Column,
    keeps_outputs: Column,
    ring_bytes: Column,
) -> Column:
    """Communication buffers, (S, n).

    Gathered sequence and its gradient; received activation and gradient; outputs of micro-batches
    in flight if they are kept (Megatron's `deallocate_output_tensor` frees them).
    """
    gathered = np.where(sequence_parallel == 1, 2 * local_tokens * hidden, 0.0)
    pipe = np.where(
        pp > 1, (2 + keeps_outputs * in_flight_micro_batches) * residual_tokens * hidden, 0.0
    )
    return np.asarray((gathered + pipe) * compute_bytes + ring_bytes)


@term(
    "B",
    "working_tensors x residual_tokens x hidden x compute_bytes",
    "gradients and products of one layer at a time",
)
def working_bytes(
    working_tensors: Column, residual_tokens: Column, hidden: Column, compute_bytes: Column
) -> Column:
    """Temporary tensors of a layer's forward or backward pass, besides saved ones."""
    return working_tensors * residual_tokens * hidden * compute_bytes


@term(
    "B",
    "gathered + unsharded gradients + buckets + flat and dummy gradients + communication + head, "
    "layer and lookup peaks + workspace",
)
def buffers_bytes(
    gathered_bytes: Column,
    unsharded_grads_bytes: Column,
    bucket_bytes: Column,
    flat_gradient_bytes: Column,
    dummy_gradient_bytes: Column,
    communication_bytes: Column,
    head_moment_bytes: Column,
    layer_moment_bytes: Column,
    lookup_moment_bytes: Column,
    workspace_bytes: Column,
    is_cpu: Column,
) -> Column:
    """All buffers, (S, n); only a GPU has a workspace."""
    states = (
        gathered_bytes
        + unsharded_grads_bytes
        + bucket_bytes
        + (flat_gradient_bytes + dummy_gradient_bytes)
    )
    batches = communication_bytes + np.where(is_cpu == 1, 0.0, workspace_bytes)
    return np.asarray(
        states + batches + (head_moment_bytes + layer_moment_bytes + lookup_moment_bytes)
    )
