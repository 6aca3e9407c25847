"""Sizes and parameter counts of a model as columns."""

from __future__ import annotations

from workers.contracts.catalog.counts import attention_width, parameter_count
from workers.contracts.catalog.model_flops import lookup_parameters
from workers.contracts.specs.model import ModelSpec


def model_columns(model: ModelSpec) -> dict[str, float]:
    """Sizes and parameter counts of a model.

    Counts are per layer and unsharded, by tensor parallel sharding: `_split` divides by tp, `_kv`
    by `kv_split` (key and value heads are replicated beyond kv_heads), `_whole` is replicated.
    """
    count, mla, mfa, moe = parameter_count(model), model.mla, model.mfa, model.moe
    hidden, biased, qkv_biased = model.hidden, model.bias == "all", model.bias != "none"
    out_bias = hidden if biased else 0
    if mla:
        down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        down += (hidden + 1) * mla.q_lora_rank if mla.q_lora_rank else 0
        down += (
            (mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)) if qkv_biased else 0
        )
        kv, replicated = 0, down + out_bias
    elif mfa:
        replicated = (
            hidden * mfa.qk_rank + mfa.qk_rank + (mfa.qk_rank if qkv_biased else 0) + out_bias
        )
        replicated += 2 * mfa.head_dim if model.qk_norm else 0
        # one key and value head, on every rank
        replicated += 2 * (hidden + (1 if qkv_biased else 0)) * mfa.head_dim
        kv = 0
    else:
        kv = 2 * model.kv_heads * model.head_dim * (hidden + (1 if qkv_biased else 0))
        replicated = out_bias + (2 * model.head_dim if model.qk_norm else 0)

    def mlp(total: int) -> tuple[int, int]:
        replicated = hidden if biased and total else 0
        return total - replicated, replicated

    dense_split, dense_whole = mlp(count.dense_mlp)
    expert_split, expert_whole = mlp(count.expert)
    shared_split, shared_whole = mlp(count.shared)
    return {
        "layers": model.layers,
        "hidden": hidden,
        "heads": mfa.heads if mfa else model.heads,
        "kv_heads": 1 if mfa else model.kv_heads,
        "head_dim": mfa.head_dim if mfa else model.head_dim,
        "ffn": model.ffn,
        "vocab": model.vocab,
        "max_seq_len": model.max_seq_len,
        "gated": float(model.gated_mlp),
        "norm_biased": float(model.norm == "layernorm" and biased),
        "layernorm": float(model.norm == "layernorm"),
        "learned_positions": float(model.position == "learned"),
        "rope": float(model.position == "rope"),
        "tied": float(model.tie_embeddings),
        "qk_norm": float(model.qk_norm),
        "window": model.window or 0,
        "relu": float(model.activation == "relu"),
        "softcapped": float(model.logit_softcap is not None),
        "scalar_head": float(model.scalar_head),
        "dropout": model.dropout,
        "biased": float(biased),
        "qkv_biased": float(qkv_biased),
        "is_mla": float(mla is not None),
        "is_mfa": float(mfa is not None),
        "q_lora": (mla.q_lora_rank or 0) if mla else 0,
        "kv_lora": mla.kv_lora_rank if mla else 0,
        "qk_nope": mla.qk_nope_head_dim if mla else 0,
        "qk_rope": mla.qk_rope_head_dim if mla else 0,
        "v_head_dim": mla.v_head_dim if mla else 0,
        "mfa_rank": mfa.qk_rank if mfa else 0,
        "experts": moe.experts if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "expert_ffn": moe.expert_ffn if moe else 0,
        "shared_ffn": moe.shared_width if moe else 0,
        "moe_layers": count.moe_layers,
        "dense_layers": count.dense_layers,
        "capacity": (moe.capacity or 1.0) if moe else 0,
        "capacity_limit": (moe.capacity or 0.0) if moe else 0,
        "attention_width": attention_width(model),
        "first_dense": moe.first_dense_layers if moe else model.layers,
        "moe_every": moe.every if moe else 1,
        "params_embedding": count.embedding,
        "params_head": count.head,
        "params_positions": count.positions,
        "params_final_norm": count.final_norm,
        "params_norms": count.norms,
        "params_attention_split": count.attention - kv - replicated,
        "params_attention_kv": kv,
        "params_attention_whole": replicated,
        "params_dense_split": dense_split,
        "params_dense_whole": dense_whole,
        "params_router": count.router,
        "params_expert_split": expert_split,
        "params_expert_whole": expert_whole,
        "params_shared_split": shared_split,
        "params_shared_whole": shared_whole,
        "params_total": count.total,
        "params_active": count.active,
        "params_lookup": lookup_parameters(model),
    }
