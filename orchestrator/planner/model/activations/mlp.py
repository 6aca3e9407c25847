"""What the norms, the residual stream's dropouts and a dense MLP keep of a micro-batch on one
device.

Knows no attention and no experts.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.activations.tokens import KORTHIKANTI
from orchestrator.planner.model.terms import Column, term


@term("B", "residual_tokens x norm_bytes_per_token", KORTHIKANTI)
def attention_norm_bytes(residual_tokens: Column, norm_bytes_per_token: Column) -> Column:
    """The block's input, as the norm before attention keeps it."""
    return np.asarray(residual_tokens * norm_bytes_per_token)


@term("B", "residual_tokens x norm_bytes_per_token", KORTHIKANTI)
def mlp_norm_bytes(residual_tokens: Column, norm_bytes_per_token: Column) -> Column:
    """The residual stream after attention, as the norm before the MLP keeps it."""
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


@term("B", "input_tokens x hidden x compute_bytes", KORTHIKANTI)
def mlp_input_bytes(input_tokens: Column, hidden: Column, compute_bytes: Column) -> Column:
    """The normalised input of the MLP, of the router and of the shared experts."""
    return np.asarray(input_tokens * (hidden * compute_bytes))


@term("", "fused_swiglu, on a CPU fused_swiglu_on_cpu", "kernels of a GPU")
def one_gate_kernel(fused_swiglu: Column, fused_swiglu_on_cpu: Column, is_cpu: Column) -> Column:
    """1 where a gate's activation and its product with the other half are one kernel."""
    return np.asarray(np.where(is_cpu == 1, fused_swiglu_on_cpu, fused_swiglu))


@term(
    "",
    "gated: 3 (gate, up, product) fused, 4 unfused (the activated gate too, which relu shares); "
    "plain: 2, relu 1",
    "SwiGLU, arXiv 2002.05202; GELU keeps its input, relu only its output",
)
def mlp_kept_widths(gated: Column, one_gate_kernel: Column, relu: Column) -> Column:
    """How many tensors of the inner width an MLP keeps, the input of the last product among them."""
    gated_widths = np.where((one_gate_kernel == 1) | (relu == 1), 3.0, 4.0)
    return np.asarray(np.where(gated == 1, gated_widths, 2.0 - relu))


@term("B", "split_tokens x ffn x mlp_kept_widths x compute_bytes", f"{KORTHIKANTI}.1: 8sbh + 8sbh")
def mlp_hidden_bytes(
    split_tokens: Column, ffn: Column, mlp_kept_widths: Column, compute_bytes: Column
) -> Column:
    """Between the products of a dense MLP."""
    return np.asarray(split_tokens * (ffn * mlp_kept_widths * compute_bytes))
