"""Families of the Llama block (RMSNorm, gated MLP): Llama, Mistral, Mixtral, Qwen, Phi-3, DeepSeek.

One function per family maps its `config.json` to ModelSpec's fields. Defaults are those of the
family's own configuration class (transformers 5.23).
"""

from __future__ import annotations

from workers.contracts.huggingface.blocks import (
    Shape,
    llama_block,
    partial_bias_error,
    read_window,
)
from workers.contracts.huggingface.fields import ConfigFields


def llama(config: ConfigFields) -> Shape:
    """Llama 1 to 3 and everything saved in their shape (SmolLM2, Yi, DeepSeek-Coder, ...)."""
    heads = config.integer("num_attention_heads")
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention != mlp:
        raise partial_bias_error(config, "attention_bias" if attention else "mlp_bias")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    return {**llama_block(config), "kv_heads": kv_heads, "bias": "all" if mlp else "none"}


def mistral(config: ConfigFields) -> Shape:
    """Mistral; the class's default is a window of 4096, an explicit null means none."""
    full = "sliding_window" in config.values and not config.has("sliding_window")
    window = None if full else config.integer("sliding_window", default=4096)
    kv_heads = config.integer("num_key_value_heads", default=8)
    return {**llama_block(config), "kv_heads": kv_heads, "window": window}


def mixtral(config: ConfigFields) -> Shape:
    """Mixtral."""
    shape = llama_block(config, theta=1e6, eps=1e-5)
    return {
        **shape,
        "kv_heads": config.integer("num_key_value_heads", default=8),
        "window": read_window(config),
        "moe": {
            "experts": config.integer("num_local_experts", default=8),
            "top_k": config.integer("num_experts_per_tok", default=2),
            "expert_ffn": shape["ffn"],
            "aux_loss": config.number("router_aux_loss_coef", default=0.001),
        },
    }


def qwen2(config: ConfigFields) -> Shape:
    """Qwen2 and Qwen2.5."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    return {
        **llama_block(config),
        "kv_heads": kv_heads,
        "bias": "qkv",
        "window": _qwen_window(config),
    }


def qwen3(config: ConfigFields) -> Shape:
    """Qwen3, dense."""
    if config.flag("attention_bias", False):
        raise partial_bias_error(config, "attention_bias")
    return {
        **llama_block(config),
        "kv_heads": config.integer("num_key_value_heads"),
        "head_dim": config.integer("head_dim", default=128),
        "qk_norm": True,
        "window": _qwen_window(config),
    }


def qwen3_moe(config: ConfigFields) -> Shape:
    """Qwen3 with routed experts."""
    every = config.integer("decoder_sparse_step", default=1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        isinstance(i, bool) or not isinstance(i, int) for i in dense
    ):
        raise config.error("mlp_only_layers", f"is {dense!r}", "Use a list of layer numbers.")
    if dense and (every != 1 or sorted(dense) != list(range(len(dense)))):
        raise config.error(
            "mlp_only_layers",
            f"lists layers {dense} as dense",
            "Use a model whose first layers only are dense, with decoder_sparse_step 1.",
        )
    moe = {
        "experts": config.integer("num_experts", "num_local_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "expert_ffn": config.integer("moe_intermediate_size"),
        # layer i routes if (i + 1) is a multiple of the step
        "first_dense_layers": len(dense) or every - 1,
        "every": every,
        "renormalise": config.flag("norm_topk_prob", False),
        "aux_loss": config.number("router_aux_loss_coef", default=0.001),
    }
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return {**qwen3(config), "head_dim": config.integer("head_dim", default=head_dim), "moe": moe}


def phi3(config: ConfigFields) -> Shape:
    """Phi-3."""
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    heads = config.integer("num_attention_heads")
    return {
        **llama_block(config, eps=1e-5, dropouts=dropouts),
        "kv_heads": config.integer("num_key_value_heads", default=heads),
        "window": read_window(config),
    }


def deepseek_v2(config: ConfigFields) -> Shape:
    """DeepSeek-V2; its class always rotates interleaved pairs."""
    method = config.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", f"is {method!r}", "Use greedy or group_limited_greedy.")
    if config.for_weights:
        config.require("norm_topk_prob", False, why="the class does not renormalise")
        config.require("mlp_bias", False, why="it adds a bias to some linear layers only")
    moe = {"renormalise": config.flag("norm_topk_prob", False)}
    return _deepseek(
        config, moe, grouped=method == "group_limited_greedy", routed_scale=1.0, interleaved=True
    )


def deepseek_v3(config: ConfigFields) -> Shape:
    """DeepSeek-V3, R1 and Kimi K2, without layers of multi-token prediction, as in transformers."""
    config.require("topk_method", "noaux_tc", why="the router selects experts differently")
    config.require("scoring_func", "sigmoid", why="the router scores experts differently")
    # the files do not contain the rate of the balancing bias; arXiv 2412.19437, section 4.2
    moe = {
        "scoring": "sigmoid",
        "bias_update": 0.001,
        "renormalise": config.flag("norm_topk_prob", True),
    }
    interleaved = config.flag("rope_interleave", True)
    return _deepseek(config, moe, grouped=True, routed_scale=2.5, interleaved=interleaved)


def _deepseek(
    config: ConfigFields, moe: Shape, *, grouped: bool, routed_scale: float, interleaved: bool
) -> Shape:
    if config.flag("attention_bias", False):
        raise partial_bias_error(config, "attention_bias")
    if config.for_weights:
        config.require("moe_layer_freq", 1, why="the class routes every layer after the dense ones")
    first = int(config.number("first_k_dense_replace", default=0))
    every = config.integer("moe_layer_freq", default=1)
    if first % every:
        raise config.error(
            "moe_layer_freq",
            f"is {every} and first_k_dense_replace {first}",
            "Use a first_k_dense_replace that is a multiple of it.",
        )
    # its absence means none to the planner; the class's default depends on the version
    shared = config.for_weights or config.has("n_shared_experts")
    moe = {
        "experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "expert_ffn": config.integer("moe_intermediate_size"),
        "shared_experts": config.integer("n_shared_experts") if shared else 0,
        "first_dense_layers": first,
        "every": every,
        "routed_scale": config.number("routed_scaling_factor", default=routed_scale),
        "aux_loss": config.number("aux_loss_alpha", default=0.0),
        **moe,
    }
    if grouped and config.integer("n_group", default=1) > 1:
        moe |= {
            "groups": config.integer("n_group"),
            "groups_per_token": config.integer("topk_group"),
        }
    mla = {
        name: config.integer(name)
        for name in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        if name != "q_lora_rank" or config.has(name)
    }
    shape = llama_block(config, interleaved=interleaved)
    shape.pop("head_dim", None)  # transformers writes qk_rope_head_dim there
    return {**shape, "attention": "mla", "mla": mla, "moe": moe}


def _qwen_window(config: ConfigFields) -> int | None:
    """Layers from `max_window_layers` on have the window; only all or none of them can be read."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return None
    full = int(config.number("max_window_layers", default=28))
    layers = config.integer("num_hidden_layers")
    if full >= layers:
        return None
    if full > 0:
        raise config.error(
            "max_window_layers",
            f"is {full} of {layers} layers",
            "Use a model with one window for all layers, or without a window.",
        )
    return config.integer("sliding_window")
