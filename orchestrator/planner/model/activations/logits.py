"""Logits and cross-entropy on the rank that holds the last stage, with and without a fused loss.

Knows the vocabulary's padding and split; no layers.
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


@term("B", "compute_bytes where logits are capped by a tanh, else 0", "the tanh keeps its output")
def softcap_bytes_per_logit(
    softcapped: Column, compute_bytes: Column, loss_without_logits: Column
) -> Column:
    """Beside what the loss keeps; a loss without whole logits caps within its kernel."""
    return np.asarray(softcapped * compute_bytes * (loss_without_logits == 0))


@term(
    "B",
    "fused: compute_bytes; else 4; with a softcap its output too",
    "log-probabilities or softmax in fp32; fused: the logits' own storage",
)
def kept_bytes_per_logit(
    fused_cross_entropy: Column, compute_bytes: Column, softcap_bytes_per_logit: Column
) -> Column:
    """From the loss to its backward pass."""
    return np.asarray(
        np.where(fused_cross_entropy == 1, compute_bytes, 4.0) + softcap_bytes_per_logit
    )


@term(
    "B",
    "fp32 logits, their 16-bit copy, and over a sharded vocabulary a second one; with a softcap "
    "its output too",
    "a loss that leaves its gradient where the logits were",
)
def in_place_bytes_per_logit(
    compute_bytes: Column,
    softcap_bytes_per_logit: Column,
    in_place_whole_only: Column,
    tp: Column,
) -> Column:
    copies = (
        4.0
        + np.where(compute_bytes < 4, compute_bytes, 0.0)
        + 4.0 * (in_place_whole_only * (tp > 1))
    )
    return np.asarray(copies + softcap_bytes_per_logit)


@term(
    "B",
    "fused, or without whole logits: compute_bytes; in place: in_place_bytes_per_logit; else 12 "
    "(log-probabilities, "
    "their gradient, the logits' gradient, fp32); with a softcap its output too",
    "torch.nn.functional.cross_entropy; Megatron-LM's vocab_parallel_cross_entropy",
)
def bytes_per_logit(
    fused_cross_entropy: Column,
    cross_entropy_in_place: Column,
    compute_bytes: Column,
    softcap_bytes_per_logit: Column,
    in_place_bytes_per_logit: Column,
    loss_without_logits: Column,
) -> Column:
    """At the loss's worst moment."""
    fused = (fused_cross_entropy == 1) | (loss_without_logits == 1)
    whole = np.where(fused, compute_bytes, 12.0) + softcap_bytes_per_logit
    in_place = (cross_entropy_in_place == 1) & ~fused
    return np.asarray(np.where(in_place, in_place_bytes_per_logit, whole))


@term(
    "B",
    "whole vocabularies in place: two pieces of rows, softmax of one and the one before, in fp32",
    "rows go through the softmax a piece at a time: 2 MiB on a CPU, 256 MiB on a GPU",
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
    row = 4.0 * local_vocab
    piece = np.where(is_cpu == 1, loss_piece_bytes_on_cpu, loss_piece_bytes)
    two = 2 * np.maximum(1.0, np.floor(piece / row)) * row
    fused = (fused_cross_entropy == 1) | (loss_without_logits == 1)
    in_pieces = (piece > 0) & (tp == 1) & (cross_entropy_in_place == 1) & ~fused
    return np.asarray(np.where(in_pieces, np.minimum(two, 4.0 * live_logits), 0.0))


@term("", "1 where losses come from hidden states, a chunk of logits at a time: on a GPU, pp 1")
def loss_without_logits(
    without_logits: Column, is_cpu: Column, pp: Column, loss_chunks: Column
) -> Column:
    return np.asarray(without_logits * (is_cpu == 0) * (pp == 1) * (loss_chunks == 1))


@term(
    "tokens",
    "local_tokens / loss_chunks; without whole logits at most loss_chunk_bytes of logits",
    "multiples of 64 tokens, at least as many",
)
def loss_tokens(
    local_tokens: Column,
    loss_chunks: Column,
    loss_without_logits: Column,
    loss_chunk_bytes: Column,
    local_vocab: Column,
    compute_bytes: Column,
) -> Column:
    """Those whose logits exist at a time."""
    chunk = np.maximum(64.0, np.floor(loss_chunk_bytes / (local_vocab * compute_bytes) / 64) * 64)
    whole = local_tokens / loss_chunks
    return np.asarray(np.where(loss_without_logits == 1, np.minimum(chunk, whole), whole))


@term("logits", "loss_tokens x local_vocab", "a loss in pieces has one piece's logits at a time")
def live_logits(loss_tokens: Column, local_vocab: Column) -> Column:
    """Of one micro-batch on one device."""
    return np.asarray(loss_tokens * local_vocab)


@term(
    "B",
    "last stage: targets, and live_logits x kept_bytes_per_logit, or in pieces the hidden states' "
    "gradient, which is "
    "taken at once; without whole logits 4 bytes a token",
)
def logits_kept_bytes(
    stage_last: Column,
    live_logits: Column,
    kept_bytes_per_logit: Column,
    loss_chunks: Column,
    local_tokens: Column,
    hidden: Column,
    compute_bytes: Column,
    loss_without_logits: Column,
) -> Column:
    """(S, n). What autograd keeps of one micro-batch's loss. Gradients made in the forward pass,
    without whole logits,
    are of the head's moment."""
    in_pieces = local_tokens * (hidden * compute_bytes)
    kept = np.where(loss_chunks > 1, in_pieces, live_logits * kept_bytes_per_logit)
    kept = np.where(loss_without_logits == 1, 4.0 * local_tokens, kept)
    return np.asarray(stage_last * (kept + 8.0 * local_tokens))


@term(
    "B",
    "last stage: live_logits x bytes_per_logit + loss_pieces + logits_kept x (last_in_flight - "
    "1), in pieces x "
    "last_in_flight",
)
def logits_bytes(
    stage_last: Column,
    live_logits: Column,
    bytes_per_logit: Column,
    loss_pieces_bytes: Column,
    logits_kept_bytes: Column,
    last_in_flight: Column,
    loss_chunks: Column,
) -> Column:
    """(S, n). Logits and their loss at the loss's worst moment."""
    others = last_in_flight - np.where(loss_chunks > 1, 0, 1)
    return np.asarray(
        stage_last * (live_logits * bytes_per_logit + loss_pieces_bytes)
        + logits_kept_bytes * others
    )
