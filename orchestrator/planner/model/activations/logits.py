"""Memory of logits and cross-entropy on the rank of the last stage.

Includes padding and sharding of the vocabulary. Does not depend on layers.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term


@term(
    "",
    "vocab rounded up to vocab_multiple x tp, / tp",
    "the vocabulary is padded for tensor parallelism",
)
def local_vocab(vocab: Column, vocab_multiple: Column, tp: Column) -> Column:
    """Columns of the logits on one device."""
    multiple = vocab_multiple * tp
    return np.asarray(np.ceil(vocab / multiple) * vocab_multiple)


@term("", "local_vocab; 1 with a scalar head", "a reward model gives one number per token")
def head_rows(local_vocab: Column, scalar_head: Column) -> Column:
    """Outputs of the head on one device."""
    return np.asarray(np.where(scalar_head == 1, 1.0, local_vocab))


@term("B", "compute_bytes if logits are capped by a tanh, else 0", "the tanh saves its output")
def softcap_bytes_per_logit(
    softcapped: Column, compute_bytes: Column, loss_without_logits: Column
) -> Column:
    """Output of the softcap; a loss that never stores all logits caps them in its kernel."""
    return np.asarray(softcapped * compute_bytes * (loss_without_logits == 0))


@term(
    "B",
    "fused: compute_bytes; else 4; plus the output of a softcap",
    "log-probabilities or softmax in fp32; fused: the logits' own storage",
)
def saved_bytes_per_logit(
    fused_cross_entropy: Column, compute_bytes: Column, softcap_bytes_per_logit: Column
) -> Column:
    """Bytes per logit between the loss and its backward pass."""
    return np.asarray(
        np.where(fused_cross_entropy == 1, compute_bytes, 4.0) + softcap_bytes_per_logit
    )


@term(
    "B",
    "fp32 logits, their 16-bit copy, with a sharded vocabulary a second fp32 copy; plus the "
    "output of a softcap",
    "a loss that overwrites the logits with their gradient",
)
def in_place_bytes_per_logit(
    compute_bytes: Column,
    softcap_bytes_per_logit: Column,
    in_place_whole_only: Column,
    tp: Column,
) -> Column:
    """Bytes per logit at the peak of a loss that overwrites the logits."""
    copies = (
        4.0
        + np.where(compute_bytes < 4, compute_bytes, 0.0)
        + 4.0 * (in_place_whole_only * (tp > 1))
    )
    return np.asarray(copies + softcap_bytes_per_logit)


@term(
    "B",
    "fused, or without stored logits: compute_bytes; in place: in_place_bytes_per_logit; else 12 "
    "(log-probabilities, their gradient, the logits' gradient, fp32); plus the output of a "
    "softcap; distillation: divergence_bytes and both models' logits",
    "torch.nn.functional.cross_entropy; Megatron-LM's vocab_parallel_cross_entropy",
)
def bytes_per_logit(
    fused_cross_entropy: Column,
    cross_entropy_in_place: Column,
    compute_bytes: Column,
    softcap_bytes_per_logit: Column,
    in_place_bytes_per_logit: Column,
    loss_without_logits: Column,
    divergence_bytes: Column,
) -> Column:
    """Bytes per logit at the peak of the loss."""
    fused = (fused_cross_entropy == 1) | (loss_without_logits == 1)
    separate = np.where(fused, compute_bytes, 12.0) + softcap_bytes_per_logit
    in_place = (cross_entropy_in_place == 1) & ~fused
    held = np.where(in_place, in_place_bytes_per_logit, separate)
    divergence = divergence_bytes + 2 * compute_bytes + softcap_bytes_per_logit
    return np.asarray(np.where(divergence_bytes > 0, divergence, held))


@term(
    "B",
    "unsharded vocabulary in place: two fp32 pieces of rows, the current and the previous softmax",
    "the softmax is computed one piece of rows at a time: 2 MiB on a CPU, 256 MiB on a GPU",
)
def loss_pieces_bytes(
    loss_piece_bytes: Column,
    loss_piece_bytes_on_cpu: Column,
    is_cpu: Column,
    live_logits: Column,
    local_vocab: Column,
    tp: Column,
    fused_cross_entropy: Column,
    cross_entropy_in_place: Column,
    loss_without_logits: Column,
) -> Column:
    """Temporary rows of a loss that computes its softmax in pieces."""
    row = 4.0 * local_vocab
    piece = np.where(is_cpu == 1, loss_piece_bytes_on_cpu, loss_piece_bytes)
    two = 2 * np.maximum(1.0, np.floor(piece / row)) * row
    fused = (fused_cross_entropy == 1) | (loss_without_logits == 1)
    in_pieces = (piece > 0) & (tp == 1) & (cross_entropy_in_place == 1) & ~fused
    return np.asarray(np.where(in_pieces, np.minimum(two, 4.0 * live_logits), 0.0))


@term("", "1 if losses come from hidden states, one chunk of logits at a time: on a GPU with pp 1")
def loss_without_logits(
    without_logits: Column,
    is_cpu: Column,
    pp: Column,
    loss_chunks: Column,
    divergence_bytes: Column,
    scalar_head: Column,
) -> Column:
    """1 if the loss is computed from hidden states without storing all logits."""
    reads = (divergence_bytes > 0) | (scalar_head == 1)
    return np.asarray(without_logits * (is_cpu == 0) * (pp == 1) * (loss_chunks == 1) * ~reads)


@term(
    "tokens",
    "local_tokens / loss_chunks; without stored logits at most loss_chunk_bytes of logits; "
    "trained_share of them on a CPU without tp, pp and compile",
    "chunks: a multiple of 64 tokens, at least 64; on a CPU tokens with loss are counted first",
)
def loss_tokens(
    local_tokens: Column,
    loss_chunks: Column,
    loss_without_logits: Column,
    loss_chunk_bytes: Column,
    local_vocab: Column,
    compute_bytes: Column,
    trained_share: Column,
    is_cpu: Column,
    tp: Column,
    pp: Column,
    compiled: Column,
) -> Column:
    """Tokens whose logits exist at the same time."""
    chunk = np.maximum(64.0, np.floor(loss_chunk_bytes / (local_vocab * compute_bytes) / 64) * 64)
    tokens = local_tokens / loss_chunks
    selects = (is_cpu == 1) & (tp == 1) & (pp == 1) & (compiled == 0)
    tokens = np.where(selects, tokens * trained_share, tokens)
    return np.asarray(np.where(loss_without_logits == 1, np.minimum(chunk, tokens), tokens))


@term("logits", "loss_tokens x head_rows", "a loss in chunks has the logits of one chunk at a time")
def live_logits(loss_tokens: Column, head_rows: Column) -> Column:
    """Logits of one micro-batch on one device that exist at the same time."""
    return np.asarray(loss_tokens * head_rows)


@term(
    "B",
    "last stage: targets, and live_logits x saved_bytes_per_logit; in chunks the gradient of the "
    "hidden states, computed at once; without stored logits 4 bytes per token",
)
def logits_saved_bytes(
    stage_last: Column,
    live_logits: Column,
    saved_bytes_per_logit: Column,
    loss_chunks: Column,
    local_tokens: Column,
    hidden: Column,
    compute_bytes: Column,
    loss_without_logits: Column,
) -> Column:
    """What autograd saves for the loss of one micro-batch, (S, n).

    A loss without stored logits computes gradients in its forward pass; `head_moment_bytes` counts
    them.
    """
    in_chunks = local_tokens * (hidden * compute_bytes)
    saved = np.where(loss_chunks > 1, in_chunks, live_logits * saved_bytes_per_logit)
    saved = np.where(loss_without_logits == 1, 4.0 * local_tokens, saved)
    return np.asarray(stage_last * (saved + 8.0 * local_tokens))


@term(
    "B",
    "last stage: live_logits x bytes_per_logit + loss_pieces + logits_saved x (last_in_flight - "
    "1), in chunks x last_in_flight",
)
def logits_bytes(
    stage_last: Column,
    live_logits: Column,
    bytes_per_logit: Column,
    loss_pieces_bytes: Column,
    logits_saved_bytes: Column,
    last_in_flight: Column,
    loss_chunks: Column,
) -> Column:
    """Logits and their loss at the peak of the loss, (S, n)."""
    others = last_in_flight - np.where(loss_chunks > 1, 0, 1)
    return np.asarray(
        stage_last * (live_logits * bytes_per_logit + loss_pieces_bytes)
        + logits_saved_bytes * others
    )
