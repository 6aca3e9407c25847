"""Saved activations of a mixture-of-experts (MoE) layer in place of the dense MLP.

Assumes balanced loads: every expert gets tokens x top_k / experts, times the capacity factor.
Expert parallelism exchanges tokens without changing their number per device. Does not depend on
attention.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term

MOE = "Megatron-LM's token dispatcher; DeepSeekMoE, arXiv 2401.06066"


@term(
    "B", "input_tokens x (4 x experts + 40 x top_k): fp32 scores, chosen weights and indices", MOE
)
def router_bytes(input_tokens: Column, experts: Column, top_k: Column) -> Column:
    """Scores of all experts; per choice its index, sort order, inverse order and weight.

    Indices and orders are 64-bit; the weight is stored before and after sorting.
    """
    return np.asarray(input_tokens * (4.0 * experts + 40.0 * top_k))


@term("tokens", "top_k x capacity", MOE)
def routed_share(top_k: Column, capacity: Column) -> Column:
    """Expert rows per token of the layer."""
    return np.asarray(top_k * capacity)


@term("B", "input_tokens x top_k x capacity x hidden x compute_bytes", MOE)
def permuted_input_bytes(
    input_tokens: Column, routed_share: Column, hidden: Column, compute_bytes: Column
) -> Column:
    """Tokens sorted by expert: the input of the experts' first matrix products."""
    return np.asarray(input_tokens * (routed_share * hidden * compute_bytes))


@term("B", "split_tokens x top_k x capacity x expert_ffn x mlp_saved_widths x compute_bytes", MOE)
def expert_hidden_bytes(
    split_tokens: Column,
    routed_share: Column,
    expert_ffn: Column,
    mlp_saved_widths: Column,
    compute_bytes: Column,
) -> Column:
    """Tensors between the matrix products of the experts."""
    return np.asarray(split_tokens * (routed_share * expert_ffn * mlp_saved_widths * compute_bytes))


@term("B", "residual_tokens x top_k x capacity x hidden x compute_bytes", MOE)
def combine_bytes(
    residual_tokens: Column, routed_share: Column, hidden: Column, compute_bytes: Column
) -> Column:
    """Expert outputs before weighting, needed for the gradient of the weights."""
    return np.asarray(residual_tokens * (routed_share * hidden * compute_bytes))


@term("B", "split_tokens x shared_ffn x mlp_saved_widths x compute_bytes", MOE)
def shared_hidden_bytes(
    split_tokens: Column, shared_ffn: Column, mlp_saved_widths: Column, compute_bytes: Column
) -> Column:
    """Tensors between the matrix products of the shared experts, whose input is the MLP's."""
    return np.asarray(split_tokens * (shared_ffn * mlp_saved_widths * compute_bytes))


@term("B", "router + permuted_input + expert_hidden + combine + shared_hidden", MOE)
def moe_hidden_bytes(
    router_bytes: Column,
    permuted_input_bytes: Column,
    expert_hidden_bytes: Column,
    combine_bytes: Column,
    shared_hidden_bytes: Column,
) -> Column:
    """All tensors between the input and the output of an MoE layer's MLP."""
    return np.asarray(
        router_bytes
        + permuted_input_bytes
        + expert_hidden_bytes
        + combine_bytes
        + shared_hidden_bytes
    )
