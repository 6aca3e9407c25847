"""Tokens of a micro-batch per device, and bytes that norms and dropouts save per element.

Other activation terms multiply these columns by a width of the model.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term

KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, section 4"


@term(
    "tokens",
    "micro_batch x (seq_len + virtual_tokens) / cp",
    "context parallelism divides the sequence",
)
def local_tokens(
    micro_batch: Column, seq_len: Column, cp: Column, virtual_tokens: Column
) -> Column:
    """Tokens of one micro-batch on one device."""
    return np.asarray(micro_batch * (seq_len + virtual_tokens) / cp)


@term("tokens", "local_tokens / tp", KORTHIKANTI)
def split_tokens(local_tokens: Column, tp: Column) -> Column:
    """Full-width equivalents inside attention and MLP, which tensor parallelism shards."""
    return np.asarray(local_tokens / tp)


@term("tokens", "local_tokens / (tp with sequence parallelism, else 1)", f"{KORTHIKANTI}.2.2")
def residual_tokens(local_tokens: Column, tp: Column, sequence_parallel: Column) -> Column:
    """Tokens outside attention and MLP: norms, dropouts, the residual stream."""
    return np.asarray(local_tokens / np.where(sequence_parallel == 1, tp, 1))


@term("tokens", "residual_tokens if inputs are gathered again, else local_tokens", KORTHIKANTI)
def input_tokens(residual_tokens: Column, local_tokens: Column, regathers_inputs: Column) -> Column:
    """Tokens at the inputs of column-parallel products.

    Megatron saves a shard and gathers it again, DTensor saves the full tensor.
    """
    return np.asarray(np.where(regathers_inputs == 1, residual_tokens, local_tokens))


@term("", "fused_norm, on a CPU fused_norm_on_cpu", "torch has a kernel for RMSNorm on GPUs only")
def one_norm_kernel(fused_norm: Column, fused_norm_on_cpu: Column, is_cpu: Column) -> Column:
    """1 if an RMSNorm is one kernel, 0 if autograd sees its separate operations."""
    return np.asarray(np.where(is_cpu == 1, fused_norm_on_cpu, fused_norm))


@term(
    "B",
    "4 + (4 if the weight is applied in fp32, else compute_bytes) x keeps_norm_products",
    "an fp32 copy of the input, and for the weight's gradient the normalized input",
)
def decomposed_norm_element_bytes(
    norm_weight_in_fp32: Column, compute_bytes: Column, keeps_norm_products: Column
) -> Column:
    """What an RMSNorm without a kernel saves per element."""
    normalized = np.where(norm_weight_in_fp32 == 1, 4.0, compute_bytes)
    return np.asarray(4.0 + normalized * keeps_norm_products)


@term(
    "B",
    "compute_bytes if the norm is one kernel, else decomposed_norm_element_bytes",
    KORTHIKANTI,
)
def rms_element_bytes(
    one_norm_kernel: Column, compute_bytes: Column, decomposed_norm_element_bytes: Column
) -> Column:
    """What an RMSNorm saves per element."""
    return np.asarray(np.where(one_norm_kernel == 1, compute_bytes, decomposed_norm_element_bytes))


@term(
    "B",
    "8 (LayerNorm: mean and reciprocal deviation) or 4 (RMSNorm), fp32",
    "Korthikanti et al. omit these",
)
def norm_statistics_bytes(layernorm: Column) -> Column:
    """Statistics per normalized row."""
    return np.asarray(np.where(layernorm == 1, 8.0, 4.0))


@term(
    "B",
    "hidden x (compute_bytes for a LayerNorm, else rms_element_bytes) + norm_statistics_bytes",
    KORTHIKANTI,
)
def norm_bytes_per_token(
    hidden: Column,
    compute_bytes: Column,
    layernorm: Column,
    rms_element_bytes: Column,
    norm_statistics_bytes: Column,
) -> Column:
    """What a norm over the hidden width saves per token."""
    return np.asarray(
        hidden * np.where(layernorm == 1, compute_bytes, rms_element_bytes) + norm_statistics_bytes
    )


@term("B", "mask_bytes, on a CPU mask_bytes_on_cpu", "on a CPU torch saves the scaled noise")
def dropout_mask_element_bytes(
    mask_bytes: Column, mask_bytes_on_cpu: Column, is_cpu: Column
) -> Column:
    """What a dropout saves per element."""
    return np.asarray(np.where(is_cpu == 1, mask_bytes_on_cpu, mask_bytes))
