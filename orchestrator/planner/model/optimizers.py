"""Optimizer states that are not a fixed number of bytes per parameter: Adafactor and Muon.

Does not depend on sharding.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term

_ADAFACTOR = (
    "arXiv 1804.04235, section 3; torch.optim.Adafactor stores a row and a column of each matrix"
)


@term("", "rows + columns of each matrix of a layer, and its vectors", _ADAFACTOR)
def layer_factors(
    hidden: Column,
    heads: Column,
    kv_heads: Column,
    head_dim: Column,
    ffn: Column,
    expert_ffn: Column,
    shared_ffn: Column,
    experts: Column,
    gated: Column,
    moe_layers: Column,
    layers: Column,
    params_norms: Column,
    tp: Column,
    ep: Column,
    kv_split: Column,
) -> Column:
    """Adafactor's factors per layer on one tensor parallel rank, mean over layers.

    Latent attention counts as plain attention with its heads.
    """
    query, kv = heads * head_dim / tp, kv_heads * head_dim / kv_split
    attention = 2 * (hidden + query) + 2 * (hidden + kv) + params_norms

    def mlp(width: Column) -> Column:
        return np.where(width > 0, (2 + gated) * (hidden + width / tp), 0.0)

    routing = mlp(shared_ffn) + experts / ep * mlp(expert_ffn) + hidden + experts
    routed = moe_layers / layers
    return np.asarray(attention + (1 - routed) * mlp(ffn) + routed * routing)


@term(
    "",
    "layers x layer_factors + rows and columns of the token table and of an untied head",
    _ADAFACTOR,
)
def stage_factors(
    stage_layers: Column,
    layer_factors: Column,
    stage_first: Column,
    local_vocab: Column,
    hidden: Column,
    head_params: Column,
) -> Column:
    """Adafactor's factors per stage, (S, n)."""
    table = local_vocab + hidden
    return np.asarray(
        stage_layers * layer_factors
        + stage_first * table
        + np.where(head_params > hidden * 2, table, head_params)
    )


@term(
    "parameters",
    "token table, head and norms",
    "Muon updates matrices of layers, AdamW the rest (Jordan 2024)",
)
def not_matrix_params(
    stage_first: Column,
    embedding_params: Column,
    head_params: Column,
    stage_layers: Column,
    params_norms: Column,
) -> Column:
    """Parameters that Muon leaves to AdamW, (S, n)."""
    return np.asarray(stage_first * embedding_params + head_params + stage_layers * params_norms)


@term(
    "B",
    "adafactor: 4 x stage_factors; muon: one more moment for other parameters; times the updated "
    "share",
)
def special_moments_bytes(
    stage_factors: Column,
    not_matrix_params: Column,
    trained_stage_params: Column,
    updated_params: Column,
    factored: Column,
    muon: Column,
    moment_bytes: Column,
) -> Column:
    """States of Adafactor and Muon on this device, (S, n)."""
    own = updated_params / np.maximum(trained_stage_params, 1.0)
    return np.asarray(
        own * (factored * 4 * stage_factors + muon * moment_bytes * not_matrix_params)
    )
