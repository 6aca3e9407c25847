"""Optimizer states that are no fixed number of bytes per parameter: Adafactor's factors, Muon's
share of Adam.

Knows which tensors an optimizer treats apart; not how states are sharded.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term

_ADAFACTOR = (
    "arXiv 1804.04235, section 3; torch.optim.Adafactor keeps a row and a column of each matrix"
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
    """Mean over layers, on one tensor-parallel rank; latent attention counted as plain attention of
    its heads.
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
    "layers x layer_factors + rows and columns of the token table, of a head of its own",
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
    """(S, n)."""
    table = local_vocab + hidden
    return np.asarray(
        stage_layers * layer_factors
        + stage_first * table
        + np.where(head_params > hidden * 2, table, head_params)
    )


@term(
    "parameters",
    "token table, head and norms",
    "Muon is for matrices of layers, the rest stays with AdamW (Jordan 2024)",
)
def not_matrix_params(
    stage_first: Column,
    embedding_params: Column,
    head_params: Column,
    stage_layers: Column,
    params_norms: Column,
) -> Column:
    """(S, n)."""
    return np.asarray(stage_first * embedding_params + head_params + stage_layers * params_norms)


@term(
    "B",
    "adafactor: 4 x stage_factors; muon: one more moment for what is not a matrix; as far as this "
    "device updates",
)
def special_moments_bytes(
    stage_factors: Column,
    not_matrix_params: Column,
    stage_params: Column,
    updated_params: Column,
    factored: Column,
    muon: Column,
    moment_bytes: Column,
) -> Column:
    """(S, n)."""
    own = updated_params / stage_params
    return np.asarray(
        own * (factored * 4 * stage_factors + muon * moment_bytes * not_matrix_params)
    )
