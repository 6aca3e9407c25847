"""Temporary peaks of a step's backward pass: of the head, of a layer, and of the embedding.

Does not depend on what activations contain, nor on what exists throughout the step (`buffers`).
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term


@term(
    "B",
    "last stage: head_rows x hidden x compute_bytes if it is trained, unless fused_wgrad "
    "accumulates it in place",
)
def head_gradient_bytes(
    stage_last: Column,
    head_rows: Column,
    hidden: Column,
    compute_bytes: Column,
    fused_wgrad: Column,
    trains_head: Column,
) -> Column:
    """The full gradient of the head's weight for one micro-batch, (S, n)."""
    once = compute_bytes * (1 - fused_wgrad) * trains_head
    return np.asarray(stage_last * (head_rows * hidden * once))


@term(
    "B",
    "head_gradient, the hidden states' gradient, and the larger of the logits' gradient and, "
    "if sharded, head_gradient in the reduction's dtype; without stored logits in 16 bits, the sum "
    "in fp32 with the logits or with its rounded copy; ZeRO 3, tied: the last layer, prefetched; "
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
    params_gathered: Column,
    shard: Column,
    tied: Column,
    logits_bytes: Column,
    logits_saved_bytes: Column,
    last_in_flight: Column,
    softcap_bytes_per_logit: Column,
    layer_params: Column,
    fully_sharded: Column,
    zero: Column,
    head_rows: Column,
    loss_without_logits: Column,
    trains_head: Column,
) -> Column:
    """Peak of the head's backward pass beyond `logits_bytes`, (S, n).

    Of the loss only the gradient remains; other micro-batches keep theirs. The backward pass of a
    softcap holds its tanh and the gradients before and after it.
    """
    sharded = params_gathered == 1
    reduced = sharded & (tied == 0)
    # a single rank gathers nothing ahead
    prefetches = sharded & (tied == 1) & (zero == 3) & (fully_sharded == 1) & (shard > 1)
    ahead = stage_last * (layer_params * compute_bytes * prefetches)
    first = stage_last * (live_logits * compute_bytes)
    copy = head_gradient_bytes * np.where(reduced, sharded_reduce_bytes / compute_bytes, 0.0)
    hidden_gradient = stage_last * (local_tokens / loss_chunks * hidden * compute_bytes)
    others = logits_saved_bytes * (last_in_flight - 1)
    # chunks of 16-bit logits add to a gradient in fp32, which is rounded at the end
    in_chunks = (loss_without_logits == 1) & (compute_bytes < 4)
    total = np.where(
        in_chunks, stage_last * (4.0 * head_rows * hidden * trains_head), head_gradient_bytes
    )
    rounded = np.where(in_chunks, head_gradient_bytes, 0.0)
    gradient = np.maximum(total + np.maximum(first, rounded), head_gradient_bytes + copy)
    products = gradient + hidden_gradient + ahead
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
    params_gathered: Column,
    tied: Column,
    stage_first: Column,
) -> Column:
    """Head gradient that exists until the backward pass ends, (S, n).

    The gradient of a tied table is added to that of its lookup; that of a cast weight returns
    through the cast, which precedes all layers.
    """
    cast = (param_bytes > compute_bytes) & ~(params_gathered == 1)
    return np.asarray(head_gradient_bytes * (((tied == 1) & (stage_first == 1)) | cast))


@term(
    "B",
    "the largest linear layer in 4 bits / tp x compute_bytes, and fp32 values of 2^22 weights",
    "each pass dequantizes one weight at a time, rows in groups",
)
def dequantized_bytes(quantized_layer_params: Column, tp: Column, compute_bytes: Column) -> Column:
    """The 16-bit copy of one 4-bit weight in use, (n,)."""
    own = quantized_layer_params / tp
    return np.asarray(own * compute_bytes + np.minimum(own, 2.0**22) * 12.0)


@term(
    "B",
    "layer_working + gathered_layers + reduction + dequantized + working + waiting_gradient - "
    "logits - head_moment, at least 0",
)
def layer_moment_bytes(
    layer_working_bytes: Column,
    gathered_layers_bytes: Column,
    reduction_bytes: Column,
    working_bytes: Column,
    waiting_gradient_bytes: Column,
    logits_bytes: Column,
    head_moment_bytes: Column,
    dequantized_bytes: Column,
) -> Column:
    """Peak of a layer's backward pass beyond logits and `head_moment_bytes`, (S, n).

    The logits are freed before the first layer's backward pass, so that only the larger of the two
    counts.
    """
    # sums over few axes first: only two passes over the full grid of a search
    head = logits_bytes + head_moment_bytes - waiting_gradient_bytes
    beyond = (layer_working_bytes + working_bytes - head) + (
        gathered_layers_bytes + reduction_bytes + dequantized_bytes
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
    params_gathered: Column,
    sharded_reduce_bytes: Column,
    activations_bytes: Column,
    in_flight_micro_batches: Column,
    logits_bytes: Column,
    layer_moment_bytes: Column,
    head_moment_bytes: Column,
    waiting_gradient_bytes: Column,
    tied: Column,
    trains_table: Column,
) -> Column:
    """Peak of the embedding's backward pass beyond activations and logits, (S, n).

    It is the last operation: the activations of its micro-batch are freed. Matters if tokens are
    few.
    """
    wide = np.where(
        params_gathered == 1,
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
    held = held * trains_table + np.where(two, 0.0, waiting_gradient_bytes)
    return np.asarray(np.maximum(held - freed - layer_moment_bytes, 0.0))
