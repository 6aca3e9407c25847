"""Exact parameter counts of a ModelSpec.

Does not depend on precision, sharding or time.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.contracts.specs.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a model by module.

    `total` = embedding + positions + head + final_norm + sum over layers. `active` is what one
    token uses (top_k experts instead of all). `embedding` is the token table, `head` the output
    projection (0 if tied). Per layer: `attention` (with inner norms), `dense_mlp`, and of a
    routing layer `router`, `expert` (one of them), `shared` (all shared experts), `norms` (both).
    """

    total: int
    active: int
    embedding: int
    positions: int
    head: int
    final_norm: int
    attention: int
    norms: int
    dense_mlp: int
    router: int
    expert: int
    shared: int
    moe_layers: int
    dense_layers: int

    def layer(self, *, moe: bool, experts: int = 0) -> int:
        """Parameters of one layer, with `experts` experts if it routes."""
        mlp = self.router + self.shared + experts * self.expert if moe else self.dense_mlp
        return self.attention + self.norms + mlp


def parameter_count(model: ModelSpec) -> ParameterCount:
    """Exact count, vocabulary not padded, without the routers' load-balancing bias (a buffer)."""
    norm = model.hidden * (2 if model.norm == "layernorm" and model.bias == "all" else 1)
    embedding = model.vocab * model.hidden
    head = 0 if model.tie_embeddings else model.hidden if model.scalar_head else embedding
    positions = model.max_seq_len * model.hidden if model.position == "learned" else 0
    attention, dense, moe = _attention(model), _mlp(model, model.ffn), model.moe
    router = model.hidden * moe.experts if moe else 0
    expert = _mlp(model, moe.expert_ffn) if moe else 0
    shared = _mlp(model, moe.shared_width) if moe and moe.shared_experts else 0
    moe_layers = model.moe_layers
    dense_layers = model.layers - moe_layers
    common = (
        embedding
        + head
        + positions
        + norm
        + model.layers * (attention + 2 * norm)
        + dense_layers * dense
    )
    every = moe_layers * (router + shared)
    return ParameterCount(
        total=common + every + moe_layers * expert * (moe.experts if moe else 0),
        active=common + every + moe_layers * expert * (moe.top_k if moe else 0),
        embedding=embedding,
        positions=positions,
        head=head,
        final_norm=norm,
        attention=attention,
        norms=2 * norm,
        dense_mlp=dense,
        router=router,
        expert=expert,
        shared=shared,
        moe_layers=moe_layers,
        dense_layers=dense_layers,
    )


def attention_width(model: ModelSpec) -> float:
    """heads x head_dim of scores and values, their mean if they differ."""
    if model.mla:
        key = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
        return model.heads * (key + model.mla.v_head_dim) / 2
    return float(
        model.mfa.heads * model.mfa.head_dim if model.mfa else model.heads * model.head_dim
    )


def kv_elements_per_token(model: ModelSpec) -> int:
    """Numbers per token in the KV cache over all layers; MLA caches its latent and rotary key."""
    if model.mla:
        return model.layers * (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    per_layer = 2 * (model.mfa.head_dim if model.mfa else model.kv_heads * model.head_dim)
    return model.layers * per_layer


def _attention(model: ModelSpec) -> int:
    hidden = model.hidden
    if model.mla:
        mla = model.mla
        query_width = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        query = hidden * query_width
        if mla.q_lora_rank:
            query = hidden * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * query_width
        down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        out = model.heads * mla.v_head_dim * hidden
        # DeepSeek's `attention_bias` sits on the down projections and the output
        q_bias = mla.q_lora_rank or query_width
        in_bias = (q_bias + mla.kv_lora_rank + mla.qk_rope_head_dim) if model.bias != "none" else 0
        return query + down + up + out + in_bias + (hidden if model.bias == "all" else 0)
    if model.mfa:
        mfa = model.mfa
        width = mfa.heads * mfa.head_dim
        in_bias = (mfa.qk_rank + 2 * mfa.head_dim) if model.bias != "none" else 0
        norms = mfa.qk_rank + (2 * mfa.head_dim if model.qk_norm else 0)
        weights = (
            hidden * mfa.qk_rank + mfa.qk_rank * width + 2 * hidden * mfa.head_dim + width * hidden
        )
        return weights + norms + in_bias + (hidden if model.bias == "all" else 0)
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    in_bias = (query + 2 * kv) if model.bias != "none" else 0
    norms = 2 * model.head_dim if model.qk_norm else 0
    return (
        hidden * (query + 2 * kv)
        + query * hidden
        + norms
        + in_bias
        + (hidden if model.bias == "all" else 0)
    )


def _mlp(model: ModelSpec, width: int) -> int:
    weights = (3 if model.gated_mlp else 2) * model.hidden * width
    if model.bias != "all":
        return weights
    return weights + (2 if model.gated_mlp else 1) * width + model.hidden
