"""Logits and cross-entropy on the rank that holds the last stage, with and without a fused loss.

Knows the vocabulary's padding and split; no layers.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.terms import Column, term


@term("", "vocab rounded up to vocab_multiple x tp, / tp", "the vocabulary is padded for tensor parallelism")
def local_vocab(vocab: Column, vocab_multiple: Column, tp: Column) -> Column:
    """Columns of the logits on one device."""
    multiple = vocab_multiple * tp
    return np.asarray(np.ceil(vocab / multiple) * vocab_multiple)


@term("B", "compute_bytes where logits are capped by a tanh, else 0", "the tanh keeps its output")
def softcap_bytes_per_logit(softcapped: Column, compute_bytes: Column) -> Column:
    """Beside what the loss keeps."""
    return np.asarray(softcapped * compute_bytes)


@term(
    "B",
    "fused: compute_bytes; else 4; with a softcap its output too",
    "log-probabilities or softmax in fp32; fused: the logits' own storage",
)
def kept_bytes_per_logit(fused_cross_entropy: Column, compute_bytes: Column, softcap_bytes_per_logit: Column) -> Column:
    """From the loss to its backward pass."""
    return np.asarray(np.where(fused_cross_entropy == 1, compute_bytes, 4.0) + softcap_bytes_per_logit)


@term(
    "B",
    "fused: compute_bytes; in place: 4 and the 16-bit gradient; else 12 (log-probabilities, their gradient, the "
    "logits' gradient, fp32); with a softcap its output too",
    "torch.nn.functional.cross_entropy; Megatron-LM's vocab_parallel_cross_entropy",
)
def bytes_per_logit(
    fused_cross_entropy: Column, cross_entropy_in_place: Column, compute_bytes: Column, softcap_bytes_per_logit: Column
) -> Column:
    """At the loss's worst moment."""
    in_place = 4.0 + np.where(compute_bytes < 4, compute_bytes, 0.0)
    unfused = np.where(cross_entropy_in_place == 1, in_place, 12.0)
    return np.asarray(np.where(fused_cross_entropy == 1, compute_bytes, unfused) + softcap_bytes_per_logit)


@term("logits", "local_tokens x local_vocab / loss_chunks", "a loss in pieces has one piece's logits at a time")
def live_logits(local_tokens: Column, local_vocab: Column, loss_chunks: Column) -> Column:
    """Of one micro-batch on one device."""
    return np.asarray(local_tokens * local_vocab / loss_chunks)


@term(
    "B",
    "last stage: targets, and live_logits x kept_bytes_per_logit, or in pieces the hidden states' gradient, which is "
    "taken at once",
)
def logits_kept_bytes(
    stage_last: Column, live_logits: Column, kept_bytes_per_logit: Column, loss_chunks: Column, local_tokens: Column,
    hidden: Column, compute_bytes: Column,
) -> Column:  # fmt: skip
    """(S, n). What autograd keeps of one micro-batch's loss."""
    in_pieces = local_tokens * (hidden * compute_bytes)
    kept = np.where(loss_chunks > 1, in_pieces, live_logits * kept_bytes_per_logit)
    return np.asarray(stage_last * (kept + 8.0 * local_tokens))


@term("B", "last stage: live_logits x bytes_per_logit + logits_kept x (last_in_flight - 1), in pieces x last_in_flight")
def logits_bytes(
    stage_last: Column, live_logits: Column, bytes_per_logit: Column, logits_kept_bytes: Column, last_in_flight: Column,
    loss_chunks: Column,
) -> Column:  # fmt: skip
    """(S, n). Logits and their loss at their worst moment."""
    others = last_in_flight - np.where(loss_chunks > 1, 0, 1)
    return np.asarray(stage_last * live_logits * bytes_per_logit + logits_kept_bytes * others)
