"""Families of the Llama block, RMSNorm and a gated MLP: Llama, Mistral, Mixtral, Qwen, Phi-3,
DeepSeek.

One function a family, from its `config.json` to ModelSpec's fields. Defaults are those of the
family's own
configuration class (transformers 5.23).
"""

from __future__ import annotations

from orchestrator.planner.interchange.fields import Fields
from orchestrator.planner.interchange.parts import Shape, bias_on_output, gated
from orchestrator.planner.interchange.rotary import rope_of


def llama(config: Fields) -> Shape:
    """Llama 1 to 3 and everything saved in their shape (SmolLM2, Yi, DeepSeek-Coder, ...)."""
    heads = config.whole("num_attention_heads")
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention != mlp:
        raise bias_on_output(config, "attention_bias" if attention else "mlp_bias")
    kv_heads = config.whole("num_key_value_heads", default=heads)
    return {**gated(config), "kv_heads": kv_heads, "bias": "all" if mlp else "none"}


def mistral(config: Fields) -> Shape:
    # the class's own default is a window of 4096, an explicit null none
    everything = "sliding_window" in config.values and not config.has("sliding_window")
    window = None if everything else config.whole("sliding_window", default=4096)
    return {**gated(config), "kv_heads": config.whole("num_key_value_heads"), "window": window}


def mixtral(config: Fields) -> Shape:
    shape = gated(config, theta=1e6, eps=1e-5)
    return {
        **shape,
        "kv_heads": config.whole("num_key_value_heads"),
        "window": config.whole("sliding_window") if config.has("sliding_window") else None,
        "moe": {
            "experts": config.whole("num_local_experts"),
            "top_k": config.whole("num_experts_per_tok"),
            "expert_ffn": shape["ffn"],
            "aux_loss": config.number("router_aux_loss_coef", default=0.001),
        },
    }


def qwen2(config: Fields) -> Shape:
    kv_heads = config.whole("num_key_value_heads", default=config.whole("num_attention_heads"))
    return {**gated(config), "kv_heads": kv_heads, "bias": "qkv", "window": _qwen_window(config)}


def qwen3(config: Fields) -> Shape:
    if config.flag("attention_bias", False):
        raise bias_on_output(config, "attention_bias")
    return {
        **gated(config),
        "kv_heads": config.whole("num_key_value_heads"),
        "head_dim": config.whole("head_dim", default=128),
        "qk_norm": True,
        "window": _qwen_window(config),
    }


def qwen3_moe(config: Fields) -> Shape:
    every = config.whole("decoder_sparse_step", default=1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        isinstance(i, bool) or not isinstance(i, int) for i in dense
    ):
        raise config.refuse("mlp_only_layers", f"is {dense!r}", "a list of layer numbers is wanted")
    if dense and (every != 1 or sorted(dense) != list(range(len(dense)))):
        raise config.refuse(
            "mlp_only_layers",
            f"names layers {dense} as dense",
            "only the first layers can be, with decoder_sparse_step 1",
        )
    # layer i routes where (i + 1) divides by the step
    first = len(dense) or every - 1
    moe = {
        "experts": config.whole("num_experts", "num_local_experts"),
        "top_k": config.whole("num_experts_per_tok"),
        "expert_ffn": config.whole("moe_intermediate_size"),
        "first_dense_layers": first,
        "every": every,
        "renormalise": config.flag("norm_topk_prob", False),
        "aux_loss": config.number("router_aux_loss_coef", default=0.001),
    }
    head_dim = config.whole("hidden_size") // config.whole("num_attention_heads")
    return {**qwen3(config), "head_dim": config.whole("head_dim", default=head_dim), "moe": moe}


def deepseek_v2(config: Fields) -> Shape:
    method = config.word("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse(
            "topk_method", f"is {method!r}", "greedy or group_limited_greedy can be read"
        )
    return _deepseek(
        config, grouped=method == "group_limited_greedy", renormalise=False, routed_scale=1.0
    )


def deepseek_v3(config: Fields) -> Shape:
    """DeepSeek-V3, R1 and Kimi K2.

    Layers of multi-token prediction are left out, as transformers leaves them.
    """
    config.want(
        "topk_method", "noaux_tc", default="noaux_tc", why="the router chooses in another way"
    )
    config.want(
        "scoring_func", "sigmoid", default="sigmoid", why="the router scores in another way"
    )
    shape = _deepseek(config, grouped=True, renormalise=True, routed_scale=2.5)
    # the files do not carry the rate of the balancing bias; arXiv 2412.19437, section 4.2
    shape["moe"] |= {"scoring": "sigmoid", "bias_update": 0.001}
    return shape


def phi3(config: Fields) -> Shape:
    heads = config.whole("num_attention_heads")
    shape = gated(
        config, eps=1e-5, dropouts={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    )
    return {
        **shape,
        "kv_heads": config.whole("num_key_value_heads", default=heads),
        "window": config.whole("sliding_window") if config.has("sliding_window") else None,
    }


def _deepseek(config: Fields, *, grouped: bool, renormalise: bool, routed_scale: float) -> Shape:
    if config.flag("attention_bias", False):
        raise bias_on_output(config, "attention_bias")
    first = int(config.number("first_k_dense_replace", default=0))
    every = config.whole("moe_layer_freq", default=1)
    if first % every:
        message = f"is {every} and first_k_dense_replace {first}"
        raise config.refuse(
            "moe_layer_freq", message, "a first_k_dense_replace that it divides can be read"
        )
    moe: Shape = {
        "experts": config.whole("n_routed_experts"),
        "top_k": config.whole("num_experts_per_tok"),
        "expert_ffn": config.whole("moe_intermediate_size"),
        "shared_experts": config.whole("n_shared_experts") if config.has("n_shared_experts") else 0,
        "first_dense_layers": first,
        "every": every,
        "renormalise": config.flag("norm_topk_prob", renormalise),
        "routed_scale": config.number("routed_scaling_factor", default=routed_scale),
        "aux_loss": config.number("aux_loss_alpha", default=0.0),
    }
    if grouped and config.whole("n_group", default=1) > 1:
        moe |= {"groups": config.whole("n_group"), "groups_per_token": config.whole("topk_group")}
    mla = {
        name: config.whole(name)
        for name in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        if name != "q_lora_rank" or config.has(name)
    }
    interleaved = config.flag("rope_interleave", True)
    shape = {**gated(config), "rope": rope_of(config, theta=10000.0, interleaved=interleaved)}
    shape.pop("head_dim", None)  # transformers writes qk_rope_head_dim there
    return {**shape, "attention": "mla", "mla": mla, "moe": moe}


def _qwen_window(config: Fields) -> int | None:
    """Layers from `max_window_layers` on see a window; all or none of them can be read."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return None
    full, layers = (
        int(config.number("max_window_layers", default=28)),
        config.whole("num_hidden_layers"),
    )
    if full >= layers:
        return None
    if full > 0:
        raise config.refuse(
            "max_window_layers",
            f"is {full} of {layers} layers",
            "ModelSpec has one window for all layers, or none",
        )
    return config.whole("sliding_window")
