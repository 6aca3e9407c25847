"""Saved activations of one layer per micro-batch and device, for each kind of recomputation.

Selective recomputation is one of two: "core" drops what lies between scores and output (Megatron);
"products" saves only the outputs of matrix products and recomputes the rest, including the
attention core.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.activations.tokens import KORTHIKANTI
from orchestrator.planner.model.columns.codes import RECOMPUTE
from orchestrator.planner.model.terms import Column, term

PRODUCTS = (
    "selective checkpointing that saves the outputs of matrix products (torch.utils.checkpoint)"
)


@term(
    "B",
    "(ranks' inner values and scaled outputs) x compute_bytes; with dropout a copy of each input",
    "LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353; IA3, arXiv 2205.05638",
)
def adapter_saved_bytes(
    split_tokens: Column,
    local_tokens: Column,
    adapter_saved_split: Column,
    adapter_saved_whole: Column,
    adapter_saved_masks: Column,
    dropout_mask_element_bytes: Column,
    compute_bytes: Column,
) -> Column:
    """What an adapter saves per layer."""
    inner = split_tokens * adapter_saved_split + local_tokens * adapter_saved_whole
    dropped = local_tokens * adapter_saved_masks * (compute_bytes + dropout_mask_element_bytes)
    return np.asarray(inner * compute_bytes + dropped)


@term(
    "B",
    "(attention_norm + attention + residual_mask + mlp_norm + residual_mask) x keeps_layers + "
    "qkv_input + mlp_input + adapter_saved",
    KORTHIKANTI,
)
def layer_shared_bytes(
    attention_norm_bytes: Column,
    qkv_input_bytes: Column,
    attention_bytes: Column,
    residual_mask_bytes: Column,
    mlp_norm_bytes: Column,
    mlp_input_bytes: Column,
    adapter_saved_bytes: Column,
    keeps_layers: Column,
) -> Column:
    """What dense and MoE layers have in common, without recomputation."""
    around = attention_norm_bytes + mlp_norm_bytes + 2 * residual_mask_bytes
    inputs = qkv_input_bytes + mlp_input_bytes + adapter_saved_bytes
    return np.asarray((around + attention_bytes) * keeps_layers + inputs)


@term("B", "layer_shared + mlp_hidden", f"{KORTHIKANTI}.1: 34 + 5as/h")
def full_dense_bytes(layer_shared_bytes: Column, mlp_hidden_bytes: Column) -> Column:
    """A dense layer without recomputation."""
    return np.asarray(layer_shared_bytes + mlp_hidden_bytes)


@term("B", "layer_shared + moe_hidden")
def full_moe_bytes(layer_shared_bytes: Column, moe_hidden_bytes: Column) -> Column:
    """An MoE layer without recomputation."""
    return np.asarray(layer_shared_bytes + moe_hidden_bytes)


@term("B", "residual_tokens x hidden x compute_bytes", f"{KORTHIKANTI}: 2sbh")
def block_input_bytes(residual_tokens: Column, hidden: Column, compute_bytes: Column) -> Column:
    """The input of a block, the only tensor that full recomputation saves."""
    return np.asarray(residual_tokens * (hidden * compute_bytes))


@term(
    "B",
    "latents, queries, keys and values as projected, and the output projection's output",
    PRODUCTS,
)
def attention_products_bytes(
    split_tokens: Column,
    local_tokens: Column,
    residual_tokens: Column,
    heads: Column,
    kv_heads: Column,
    tp: Column,
    head_dim: Column,
    query_head_dim: Column,
    hidden: Column,
    is_mla: Column,
    is_mfa: Column,
    q_lora: Column,
    kv_lora: Column,
    qk_rope: Column,
    qk_nope: Column,
    v_head_dim: Column,
    mfa_rank: Column,
    compute_bytes: Column,
) -> Column:
    """Outputs of the matrix products of attention."""
    latents = np.where(
        is_mla == 1, q_lora + kv_lora + qk_rope, np.where(is_mfa == 1, mfa_rank, 0.0)
    )
    per_head = query_head_dim + np.where(is_mla == 1, qk_nope + v_head_dim, 0.0)
    grouped = local_tokens * (2 * head_dim * kv_heads * (1 - is_mla)) / np.minimum(tp, kv_heads)
    elements = residual_tokens * (latents + hidden) + split_tokens * (heads * per_head) + grouped
    return np.asarray(elements * compute_bytes)


@term(
    "B",
    "block_input + attention_products + (split_tokens x (gate and) up width + residual_tokens x "
    "hidden) x compute_bytes",
    PRODUCTS,
)
def products_dense_bytes(
    block_input_bytes: Column,
    attention_products_bytes: Column,
    split_tokens: Column,
    residual_tokens: Column,
    ffn: Column,
    gated: Column,
    hidden: Column,
    compute_bytes: Column,
) -> Column:
    """A dense layer that saves only the outputs of its matrix products."""
    mlp = split_tokens * (ffn * (1 + gated) * compute_bytes) + residual_tokens * (
        hidden * compute_bytes
    )
    return np.asarray(block_input_bytes + attention_products_bytes + mlp)


@term(
    "B",
    "block_input + attention_products + experts' and shared experts' products and the router's",
    PRODUCTS,
)
def products_moe_bytes(
    block_input_bytes: Column,
    attention_products_bytes: Column,
    split_tokens: Column,
    residual_tokens: Column,
    input_tokens: Column,
    routed_share: Column,
    experts: Column,
    expert_ffn: Column,
    shared_ffn: Column,
    gated: Column,
    hidden: Column,
    compute_bytes: Column,
) -> Column:
    """An MoE layer that saves only the outputs of its matrix products."""
    inner = split_tokens * ((routed_share * expert_ffn + shared_ffn) * (1 + gated))
    outer = residual_tokens * ((routed_share + (shared_ffn > 0)) * hidden)
    products = inner + outer + input_tokens * experts
    return np.asarray(block_input_bytes + attention_products_bytes + products * compute_bytes)


@term(
    "B",
    "by recompute: none full_dense; selective full_dense - attention_core, products_dense, "
    "alternate_dense, or half of full_dense and block_input; "
    "full and auto (its minimum) block_input",
    KORTHIKANTI,
)
def layer_activation_dense_bytes(
    recompute: Column,
    full_dense_bytes: Column,
    attention_core_bytes: Column,
    selective_products: Column,
    alternate_products: Column,
    alternate_layers: Column,
    products_dense_bytes: Column,
    alternate_dense_bytes: Column,
    block_input_bytes: Column,
    is_mla: Column,
    is_mfa: Column,
) -> Column:
    """Saved by one dense layer for one micro-batch; the mean of two with alternate layers."""
    plain = (is_mla == 0) & (is_mfa == 0)
    products = np.where(
        (alternate_products == 1) & plain, alternate_dense_bytes, products_dense_bytes
    )
    selective = np.where(selective_products == 1, products, full_dense_bytes - attention_core_bytes)
    selective = np.where(
        alternate_layers == 1, (full_dense_bytes + block_input_bytes) / 2, selective
    )
    return _by_recompute(recompute, full_dense_bytes, selective, block_input_bytes)


@term(
    "B",
    "by recompute: none full_moe; selective full_moe - attention_core, products_moe, or half of "
    "full_moe and block_input; full and auto (its minimum) block_input",
    KORTHIKANTI,
)
def layer_activation_moe_bytes(
    recompute: Column,
    full_moe_bytes: Column,
    attention_core_bytes: Column,
    selective_products: Column,
    alternate_layers: Column,
    products_moe_bytes: Column,
    block_input_bytes: Column,
) -> Column:
    """Saved by one MoE layer for one micro-batch; the mean of two with alternate layers."""
    selective = np.where(
        selective_products == 1, products_moe_bytes, full_moe_bytes - attention_core_bytes
    )
    selective = np.where(alternate_layers == 1, (full_moe_bytes + block_input_bytes) / 2, selective)
    return _by_recompute(recompute, full_moe_bytes, selective, block_input_bytes)


@term(
    "B",
    "block_input + queries, values, attention output and its logsumexp + gate and output of the "
    "MLP; with tp also both reduced outputs",
    "torchtitan, torchtitan/distributed/activation_checkpoint.py: saves the attention kernel's "
    "output and every second of wq, wk, wv, wo, w1, w3, w2, and what reduce-scatters return",
)
def alternate_dense_bytes(
    block_input_bytes: Column,
    split_tokens: Column,
    local_tokens: Column,
    residual_tokens: Column,
    heads: Column,
    kv_heads: Column,
    tp: Column,
    head_dim: Column,
    hidden: Column,
    ffn: Column,
    compute_bytes: Column,
) -> Column:
    """A dense layer that saves every second product and the attention kernel's output."""
    inner = split_tokens * (2 * heads * head_dim + ffn)
    values = local_tokens * (kv_heads / np.minimum(tp, kv_heads) * head_dim)
    outer = local_tokens * hidden + (tp > 1) * 2 * residual_tokens * hidden
    saved = (inner + values + outer) * compute_bytes
    return np.asarray(block_input_bytes + saved + 4.0 * split_tokens * heads)


def _by_recompute(recompute: Column, full: Column, selective: Column, minimum: Column) -> Column:
    saved = np.where(recompute == RECOMPUTE["none"], full, minimum)
    return np.where(recompute == RECOMPUTE["selective"], selective, saved)
