"""Device memory besides states and activations: gathered or cast weights, buckets, workspace.

Counts temporary peaks of the backward pass as well. Does not depend on what activations contain.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.inputs import OFFLOAD, RECOMPUTE
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
    "parameters",
    "FSDP: head, or the table it is tied to; DeepSpeed: stage3_max_live_parameters",
    "parameters kept gathered",
)
def resident_params(
    edge_params: Column,
    head_params: Column,
    tied: Column,
    stage_params: Column,
    fully_sharded: Column,
    max_live_params: Column,
) -> Column:
    """Parameters that stay gathered from forward to backward if all are sharded, (S, n)."""
    live = np.where(max_live_params > 0, max_live_params, DEEPSPEED_LIVE_PARAMS)
    whole = np.where(fully_sharded == 1, np.where(tied == 1, edge_params, head_params), live)
    return np.asarray(np.minimum(whole, stage_params))


@term(
    "B",
    "full copies of sharded weights and casts of wider ones, held from forward to backward x "
    "compute_bytes",
)
def gathered_bytes(
    stage_params: Column,
    resident_params: Column,
    edge_params: Column,
    lookup_params: Column,
    tied: Column,
    params_sharded: Column,
    zero: Column,
    shard: Column,
    param_bytes: Column,
    compute_bytes: Column,
    recompute: Column,
    offload: Column,
) -> Column:
    """Full copies and casts held from forward to backward, (S, n).

    ZeRO 2 keeps every copy, and so do casts unless the layer is recomputed; a lookup saves no
    table.
    """
    sharded, away = (params_sharded == 1) & (shard > 1), offload >= OFFLOAD["all"]
    used = np.where(recompute == RECOMPUTE["full"], edge_params, stage_params) - np.where(
        tied == 1, 0, lookup_params
    )
    casts = used * (param_bytes > compute_bytes)
    copies = np.where(
        sharded,
        np.where(zero == 3, resident_params, stage_params),
        np.where(away, edge_params, casts),
    )
    return np.asarray(copies * compute_bytes)


@term("B", "layers gathered or cast temporarily: (1 + prefetch_layers) x layer x compute_bytes")
def gathered_layers_bytes(
    layer_params: Column,
    prefetch_layers: Column,
    params_sharded: Column,
    zero: Column,
    shard: Column,
    param_bytes: Column,
    compute_bytes: Column,
    recompute: Column,
    offload: Column,
    fully_sharded: Column,
    resident_params: Column,
) -> Column:
    """Layers that are gathered or cast temporarily, (S, n)."""
    sharded, away = (params_sharded == 1) & (shard > 1), offload >= OFFLOAD["all"]
    ahead = (1 + prefetch_layers) * layer_params
    beyond = np.where(fully_sharded == 1, ahead, np.maximum(ahead - resident_params, 0.0))
    cast = (param_bytes > compute_bytes) & (recompute == RECOMPUTE["full"])
    layers = np.where(sharded, beyond * (zero == 3), np.where(away, ahead, layer_params * cast))
    return np.asarray(layers * compute_bytes)


@term(
    "B",
    "one layer's full gradient and its copy in the reduction's dtype, if sharded",
    "torch fully_shard",
)
def reduction_bytes(
    layer_params: Column,
    compute_bytes: Column,
    sharded_reduce_bytes: Column,
    params_sharded: Column,
    shard: Column,
) -> Column:
    """Temporary gradients of one layer during their reduction, (n,)."""
    whole = layer_params * (compute_bytes + sharded_reduce_bytes)
    return np.where((params_sharded == 1) & (shard > 1), whole, 0.0)


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
    "last stage: local_vocab x hidden x compute_bytes, unless fused_wgrad accumulates it in place",
)
def head_gradient_bytes(
    stage_last: Column,
    local_vocab: Column,
    hidden: Column,
    compute_bytes: Column,
    fused_wgrad: Column,
) -> Column:
    """The full gradient of the head's weight for one micro-batch, (S, n)."""
    return np.asarray(stage_last * (local_vocab * hidden * compute_bytes * (1 - fused_wgrad)))


@term(
    "B",
    "head_gradient, the hidden states' gradient, and the larger of the logits' gradient and, "
    "if sharded, head_gradient in the reduction's dtype; ZeRO 3, tied: the last layer, prefetched; "
    "at least the three tensors of a softcap; minus logits",
    "the head's backward pass: results and inputs of both products",
)
def head_moment_bytes(
    stage_last: Column,
    live_logits: Column,
    compute_bytes: Column,
    head_gradient_bytes: Column,
    local_tokens: Column,
    hidden: Column,
    loss_chunks: Column,
    sharded_reduce_bytes: Column,
    params_sharded: Column,
    shard: Column,
    tied: Column,
    logits_bytes: Column,
    logits_saved_bytes: Column,
    last_in_flight: Column,
    softcap_bytes_per_logit: Column,
    layer_params: Column,
    fully_sharded: Column,
    zero: Column,
) -> Column:
    """Peak of the head's backward pass beyond `logits_bytes`, (S, n).

    Of the loss only the gradient remains; other micro-batches keep theirs. The backward pass of a
    softcap holds its tanh and the gradients before and after it.
    """
    sharded = (params_sharded == 1) & (shard > 1)
    reduced = sharded & (tied == 0)
    ahead = stage_last * (
        layer_params * compute_bytes * (sharded & (tied == 1) & (zero == 3) & (fully_sharded == 1))
    )
    first = stage_last * (live_logits * compute_bytes)
    copy = head_gradient_bytes * np.where(reduced, sharded_reduce_bytes / compute_bytes, 0.0)
    hidden_gradient = stage_last * (local_tokens / loss_chunks * hidden * compute_bytes)
    others = logits_saved_bytes * (last_in_flight - 1)
    products = np.maximum(first, copy) + head_gradient_bytes + hidden_gradient + ahead
    held = np.maximum(products, stage_last * (3 * live_logits * softcap_bytes_per_logit)) + others
    return np.asarray(np.maximum(held - logits_bytes, 0.0))


@term(
    "B",
    "head_gradient if it exists until the end of the backward pass: tied table or cast weight",
)
def waiting_gradient_bytes(
    head_gradient_bytes: Column,
    param_bytes: Column,
    compute_bytes: Column,
    params_sharded: Column,
    shard: Column,
    tied: Column,
    stage_first: Column,
) -> Column:
    """Head gradient that exists until the backward pass ends, (S, n).

    The gradient of a tied table is added to that of its lookup; that of a cast weight returns
    through the cast, which precedes all layers.
    """
    cast = (param_bytes > compute_bytes) & ~((params_sharded == 1) & (shard > 1))
    return np.asarray(head_gradient_bytes * (((tied == 1) & (stage_first == 1)) | cast))


@term(
    "B",
    "layer_working + gathered_layers + reduction + working + waiting_gradient - logits - "
    "head_moment, at least 0",
)
def layer_moment_bytes(
    layer_working_bytes: Column,
    gathered_layers_bytes: Column,
    reduction_bytes: Column,
    working_bytes: Column,
    waiting_gradient_bytes: Column,
    logits_bytes: Column,
    head_moment_bytes: Column,
) -> Column:
    """Peak of a layer's backward pass beyond logits and `head_moment_bytes`, (S, n).

    The logits are freed before the first layer's backward pass, so that only the larger of the two
    counts.
    """
    # sums over few axes first: only two passes over the full grid of a search
    head = logits_bytes + head_moment_bytes - waiting_gradient_bytes
    beyond = (layer_working_bytes + working_bytes - head) + (
        gathered_layers_bytes + reduction_bytes
    )
    return np.asarray(np.maximum(beyond, 0.0))


@term(
    "B",
    "first stage: full gradient of the token table and its wider copy, beyond "
    "activations and logits",
)
def lookup_moment_bytes(
    lookup_params: Column,
    compute_bytes: Column,
    param_bytes: Column,
    params_sharded: Column,
    shard: Column,
    sharded_reduce_bytes: Column,
    activations_bytes: Column,
    in_flight_micro_batches: Column,
    logits_bytes: Column,
    layer_moment_bytes: Column,
    head_moment_bytes: Column,
    waiting_gradient_bytes: Column,
    tied: Column,
) -> Column:
    """Peak of the embedding's backward pass beyond activations and logits, (S, n).

    It is the last operation: the activations of its micro-batch are freed. Matters if tokens are
    few.
    """
    wide = np.where(
        (params_sharded == 1) & (shard > 1),
        sharded_reduce_bytes,
        param_bytes * (param_bytes > compute_bytes),
    )
    freed = activations_bytes / np.maximum(1.0, in_flight_micro_batches) + (
        logits_bytes + head_moment_bytes
    )
    # tied: two gradients and their sum; untied: one gradient, and that of a cast head
    two = (tied == 1) & (waiting_gradient_bytes > 0)
    held = lookup_params * np.where(
        two, np.maximum(3 * compute_bytes, compute_bytes + wide), compute_bytes + wide
    )
    held = held + np.where(two, 0.0, waiting_gradient_bytes)
    return np.asarray(np.maximum(held - freed - layer_moment_bytes, 0.0))


@term(
    "B",
    "gathered + buckets + flat and dummy gradients + communication + head, layer and lookup "
    "peaks + workspace",
)
def buffers_bytes(
    gathered_bytes: Column,
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
    states = gathered_bytes + bucket_bytes + (flat_gradient_bytes + dummy_gradient_bytes)
    batches = communication_bytes + np.where(is_cpu == 1, 0.0, workspace_bytes)
    return np.asarray(
        states + batches + (head_moment_bytes + layer_moment_bytes + lookup_moment_bytes)
    )
