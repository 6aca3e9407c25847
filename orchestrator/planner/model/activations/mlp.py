"""Saved activations of norms, residual dropouts and a dense MLP per micro-batch and device.

Does not depend on attention or experts.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.activations.tokens import KORTHIKANTI
from orchestrator.planner.model.terms import Column, term


@term("B", "residual_tokens x norm_bytes_per_token", KORTHIKANTI)
def attention_norm_bytes(residual_tokens: Column, norm_bytes_per_token: Column) -> Column:
    """The block's input, saved by the norm before attention."""
    return np.asarray(residual_tokens * norm_bytes_per_token)


@term("B", "residual_tokens x norm_bytes_per_token", KORTHIKANTI)
def mlp_norm_bytes(residual_tokens: Column, norm_bytes_per_token: Column) -> Column:
    """The residual stream after attention, saved by the norm before the MLP."""
    return np.asarray(residual_tokens * norm_bytes_per_token)


@term(
    "B",
    "residual_tokens x hidden x dropout_mask_element_bytes with dropout, else 0",
    f"{KORTHIKANTI}.1: 1 byte",
)
def residual_mask_bytes(
    residual_tokens: Column, hidden: Column, dropout_mask_element_bytes: Column, dropout: Column
) -> Column:
    """The mask of one dropout on the residual stream; a block has two."""
    return np.asarray(residual_tokens * (hidden * dropout_mask_element_bytes * (dropout > 0)))


@term("B", "input_tokens x hidden x compute_bytes x keeps_mlp_input", KORTHIKANTI)
def mlp_input_bytes(
    input_tokens: Column, hidden: Column, compute_bytes: Column, keeps_mlp_input: Column
) -> Column:
    """The normalized input of the MLP, of the router and of the shared experts."""
    return np.asarray(input_tokens * (hidden * compute_bytes * keeps_mlp_input))


@term("", "fused_swiglu, on a CPU fused_swiglu_on_cpu", "kernels of a GPU")
def one_gate_kernel(fused_swiglu: Column, fused_swiglu_on_cpu: Column, is_cpu: Column) -> Column:
    """1 if one kernel computes a gate's activation and its product with the other half."""
    return np.asarray(np.where(is_cpu == 1, fused_swiglu_on_cpu, fused_swiglu))


@term(
    "",
    "gated: 3 (gate, up, product) fused, 4 unfused (also the activated gate; with relu 3); "
    "plain: 2, relu 1; the last product's input only if it is trained or adapted",
    "SwiGLU, arXiv 2002.05202; GELU saves its input, relu only its output",
)
def mlp_saved_widths(
    gated: Column,
    one_gate_kernel: Column,
    relu: Column,
    keeps_layers: Column,
    keeps_down_input: Column,
) -> Column:
    """Number of tensors of the inner width that an MLP saves, with the last product's input."""
    gated_widths = np.where((one_gate_kernel == 1) | (relu == 1), 3.0, 4.0)
    widths = np.where(gated == 1, gated_widths, 2.0 - relu)
    between = np.maximum(widths - 1, relu * (1 - gated)) * keeps_layers
    last = np.minimum(widths - np.maximum(widths - 1, relu * (1 - gated)), 1.0)
    return np.asarray(between + last * keeps_down_input)


@term("B", "split_tokens x ffn x mlp_saved_widths x compute_bytes", f"{KORTHIKANTI}.1: 8sbh + 8sbh")
def mlp_hidden_bytes(
    split_tokens: Column, ffn: Column, mlp_saved_widths: Column, compute_bytes: Column
) -> Column:
    """Tensors between the matrix products of a dense MLP."""
    return np.asarray(split_tokens * (ffn * mlp_saved_widths * compute_bytes))
