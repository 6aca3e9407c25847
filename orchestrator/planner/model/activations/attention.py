"""Saved activations of attention per micro-batch and device.

One set of terms for MHA, GQA, MQA, multi-head latent attention (MLA) and multi-matrix factorization
attention (MFA), which differ in widths only. Does not depend on the norms of the residual stream or
the MLP.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.activations.tokens import KORTHIKANTI
from orchestrator.planner.model.terms import Column, term

FLASH = (
    "FlashAttention saves q, k, v, its output and the fp32 log-sum-exp (arXiv 2205.14135, "
    "algorithm 1)"
)
MLA = "DeepSeek-V2, arXiv 2405.04434, section 2.1, keys and values expanded as in training"
MFA = "multi-matrix factorization attention, arXiv 2412.19255"


@term("", "qk_nope + qk_rope (MLA), else head_dim")
def query_head_dim(is_mla: Column, qk_nope: Column, qk_rope: Column, head_dim: Column) -> Column:
    """Width of a query or key head."""
    return np.asarray(np.where(is_mla == 1, qk_nope + qk_rope, head_dim))


@term("", "v_head_dim (MLA), else head_dim")
def value_head_dim(is_mla: Column, v_head_dim: Column, head_dim: Column) -> Column:
    """Width of a value head and of a head's output."""
    return np.asarray(np.where(is_mla == 1, v_head_dim, head_dim))


@term(
    "tokens x heads",
    "split_tokens x heads (MLA), else local_tokens x kv_heads / min(tp, kv_heads)",
    "key and value heads are replicated if tp > kv_heads",
)
def kv_rows(
    local_tokens: Column,
    split_tokens: Column,
    heads: Column,
    kv_heads: Column,
    tp: Column,
    is_mla: Column,
) -> Column:
    """Rows of keys and values on one device."""
    grouped = local_tokens * kv_heads / np.minimum(tp, kv_heads)
    return np.asarray(np.where(is_mla == 1, split_tokens * heads, grouped))


@term("B", "input_tokens x hidden x compute_bytes x keeps_qkv_input", KORTHIKANTI)
def qkv_input_bytes(
    input_tokens: Column, hidden: Column, compute_bytes: Column, keeps_qkv_input: Column
) -> Column:
    """The normalized input, shared by all projections of attention."""
    return np.asarray(input_tokens * (hidden * compute_bytes * keeps_qkv_input))


@term(
    "B",
    "residual_tokens x (latents before their norms with the rotary key, latents after, statistics)",
    MLA,
)
def latent_bytes(
    residual_tokens: Column,
    is_mla: Column,
    q_lora: Column,
    kv_lora: Column,
    qk_rope: Column,
    is_mfa: Column,
    mfa_rank: Column,
    compute_bytes: Column,
    one_norm_kernel: Column,
    rms_element_bytes: Column,
) -> Column:
    """What norms and up-projections save of low-rank queries (MLA, MFA), keys and values (MLA)."""
    query = np.where(is_mfa == 1, mfa_rank, np.where(is_mla == 1, q_lora, 0.0))
    latents, rows = query + kv_lora, (query > 0).astype(float) + (kv_lora > 0)
    # unless it is cast first, the norm's input is a view of the whole output of the
    # down-projection, including the rotary key
    viewed = (is_mla == 1) & ((one_norm_kernel == 1) | (compute_bytes == 4))
    rotary_key = np.where(viewed, qk_rope, 0.0) * compute_bytes
    return np.asarray(
        residual_tokens * (latents * (rms_element_bytes + compute_bytes) + rotary_key + 4.0 * rows)
    )


@term(
    "B",
    "(split_tokens x heads + kv heads on the device) x (head_dim x rms_element_bytes + 4) with "
    "qk_norm, else 0",
    "Qwen3 normalizes each head of queries and keys",
)
def qk_norm_bytes(
    split_tokens: Column,
    heads: Column,
    local_tokens: Column,
    kv_heads: Column,
    tp: Column,
    head_dim: Column,
    qk_norm: Column,
    rms_element_bytes: Column,
    is_mla: Column,
) -> Column:
    """Queries and keys before their norms."""
    rows = split_tokens * heads + local_tokens * kv_heads / np.minimum(tp, kv_heads)
    return np.asarray(rows * ((head_dim * rms_element_bytes + 4.0) * (qk_norm * (1 - is_mla))))


@term(
    "B",
    "split_tokens x heads x query_head_dim x compute_bytes",
    f"{KORTHIKANTI}; rotation saves only its tables",
)
def query_bytes(
    split_tokens: Column, heads: Column, query_head_dim: Column, compute_bytes: Column
) -> Column:
    """Queries, input of the scores."""
    return np.asarray(split_tokens * (heads * query_head_dim * compute_bytes))


@term("B", "kv_rows x query_head_dim x compute_bytes", KORTHIKANTI)
def key_bytes(kv_rows: Column, query_head_dim: Column, compute_bytes: Column) -> Column:
    """Keys, input of the scores."""
    return np.asarray(kv_rows * (query_head_dim * compute_bytes))


@term("B", "kv_rows x value_head_dim x compute_bytes", KORTHIKANTI)
def value_bytes(kv_rows: Column, value_head_dim: Column, compute_bytes: Column) -> Column:
    """Values."""
    return np.asarray(kv_rows * (value_head_dim * compute_bytes))


@term(
    "",
    "1 with flash attention on a CPU if dropout, or values narrower than keys, exclude its kernel",
    "torch.nn.functional.scaled_dot_product_attention then computes in steps, in fp32",
)
def core_in_steps(
    flash: Column, is_cpu: Column, dropout: Column, query_head_dim: Column, value_head_dim: Column
) -> Column:
    """1 if torch computes flash attention as separate operations instead of one kernel."""
    return np.asarray(flash * is_cpu * ((dropout > 0) | (query_head_dim != value_head_dim)))


@term("", "flash - core_in_steps")
def flash_runs(flash: Column, core_in_steps: Column) -> Column:
    """1 if scores are never stored."""
    return np.asarray(flash - core_in_steps)


@term("B", "split_tokens x heads x 4 with flash attention, else 0", FLASH)
def log_sum_exp_bytes(split_tokens: Column, heads: Column, flash_runs: Column) -> Column:
    """One fp32 number per query and head."""
    return np.asarray(split_tokens * (heads * 4.0 * flash_runs))


@term(
    "B",
    "compute_bytes in one kernel; else 4, and compute_bytes for the 16-bit copy without dropout; "
    "4 in steps",
    f"{KORTHIKANTI}.1: 2as; an unfused softmax is computed in fp32",
)
def softmax_element_bytes(
    core_in_steps: Column, fused_softmax: Column, compute_bytes: Column, dropout: Column
) -> Column:
    """Bytes per probability.

    With dropout the 16-bit copy is an intermediate that is not saved.
    """
    cast = np.where((compute_bytes < 4) & (dropout == 0), compute_bytes, 0.0)
    return np.asarray(
        np.where(core_in_steps == 1, 4.0, np.where(fused_softmax == 1, compute_bytes, 4.0 + cast))
    )


@term(
    "B",
    "without flash attention: split_tokens x heads x seq_len x softmax_element_bytes",
    f"{KORTHIKANTI}.1: 2as",
)
def softmax_bytes(
    split_tokens: Column,
    heads: Column,
    seq_len: Column,
    flash_runs: Column,
    softmax_element_bytes: Column,
) -> Column:
    """Probabilities of the attention scores."""
    return np.asarray(split_tokens * (heads * seq_len * (1 - flash_runs) * softmax_element_bytes))


@term(
    "B",
    "without flash attention, with dropout: split_tokens x heads x seq_len x (mask + probability)",
    f"{KORTHIKANTI}.1: as + 2as",
)
def score_dropout_bytes(
    split_tokens: Column,
    heads: Column,
    seq_len: Column,
    flash_runs: Column,
    dropout: Column,
    dropout_mask_element_bytes: Column,
    compute_bytes: Column,
    core_in_steps: Column,
) -> Column:
    """The dropout mask and the remaining probabilities; flash attention regenerates its mask."""
    element_bytes = np.where(core_in_steps == 1, 8.0, dropout_mask_element_bytes + compute_bytes)
    return np.asarray(
        split_tokens * (heads * seq_len * (1 - flash_runs) * (dropout > 0) * element_bytes)
    )


@term(
    "B",
    "repeats_kv: keys and values per query head; in steps: fp32 queries as well; minus those "
    "already counted; else 0",
    "torch.ops.aten._scaled_dot_product_attention_math",
)
def core_copies_bytes(
    split_tokens: Column,
    heads: Column,
    query_head_dim: Column,
    value_head_dim: Column,
    core_in_steps: Column,
    query_bytes: Column,
    key_bytes: Column,
    value_bytes: Column,
    repeats_kv: Column,
    compute_bytes: Column,
) -> Column:
    """Copies of queries, keys and values that attention saves instead of them."""
    rows, kv_width = split_tokens * heads, query_head_dim + value_head_dim
    in_steps = rows * ((query_head_dim + kv_width) * 4.0) - query_bytes
    repeated = np.where(core_in_steps == 1, in_steps, rows * (kv_width * compute_bytes))
    copied = (core_in_steps == 1) | (repeats_kv == 1)
    return np.asarray(np.where(copied, repeated - key_bytes - value_bytes, 0.0))


@term(
    "B",
    "if the window is shorter than the sequence and a mask tensor: (seq_len / cp) x seq_len x "
    "compute_bytes, else 0",
    "scaled_dot_product_attention adds its mask to the scores",
)
def window_mask_bytes(
    window: Column,
    seq_len: Column,
    cp: Column,
    windows_as_masks: Column,
    compute_bytes: Column,
    core_in_steps: Column,
) -> Column:
    """The mask of a windowed layer, shared by all sequences and heads."""
    masked = windows_as_masks * (window > 0) * (window < seq_len) * (1 - core_in_steps)
    return np.asarray(seq_len * (seq_len * masked * compute_bytes) / cp)


@term(
    "B",
    "softmax + score_dropout + log_sum_exp + core_copies + window_mask",
    f"{KORTHIKANTI}.3: what selective recomputation drops",
)
def attention_core_bytes(
    softmax_bytes: Column,
    score_dropout_bytes: Column,
    log_sum_exp_bytes: Column,
    core_copies_bytes: Column,
    window_mask_bytes: Column,
) -> Column:
    """Saved between scores and output, and not needed to recompute it."""
    return np.asarray(
        softmax_bytes
        + score_dropout_bytes
        + log_sum_exp_bytes
        + core_copies_bytes
        + window_mask_bytes
    )


@term("B", "split_tokens x heads x value_head_dim x compute_bytes", KORTHIKANTI)
def output_input_bytes(
    split_tokens: Column, heads: Column, value_head_dim: Column, compute_bytes: Column
) -> Column:
    """The output of attention: input of the output projection, also saved by flash attention."""
    return np.asarray(split_tokens * (heads * value_head_dim * compute_bytes))


@term("B", "latent + qk_norm + query + key + value + attention_core + output_input", KORTHIKANTI)
def attention_bytes(
    latent_bytes: Column,
    qk_norm_bytes: Column,
    query_bytes: Column,
    key_bytes: Column,
    value_bytes: Column,
    attention_core_bytes: Column,
    output_input_bytes: Column,
) -> Column:
    """All tensors between the input of attention and its output projection."""
    qkv = query_bytes + key_bytes + value_bytes
    return np.asarray(
        latent_bytes + qk_norm_bytes + qkv + attention_core_bytes + output_input_bytes
    )
