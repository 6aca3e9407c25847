"""From a `config.json` of transformers 4 or 5 to a ModelSpec, for the families whose weights can be
read.

What would change a logit and cannot be expressed is refused. Defaults are those of each family's
own class
(transformers 5.23). Does not know tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import problems_of
from workers.contracts.specs.model import ModelSpec
from workers.models.errors import WeightsError
from workers.models.hf.fields import Fields
from workers.models.hf.rotary import read_rope

Shape = dict[str, Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def read_shape(config: Mapping[str, Any], *, what: str, name: str) -> tuple[str, ModelSpec]:
    """The family (`model_type`) and the shape.

    Raises WeightsError naming the field that stands in the way.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise WeightsError(
            f"{what}: model_type is {kind!r}; the families that can be read are {known}"
        )
    fields = Fields(config, f"{what} ({kind})")
    own = fields.word("_name_or_path", default="").rstrip("/").rsplit("/", 1)[-1]
    try:
        shape = ModelSpec.from_dict({"name": (own or name or kind)[:120], **FAMILIES[kind](fields)})
    except ValidationError as error:
        raise WeightsError(
            f"{what}: " + "; ".join(str(item) for item in problems_of(error))
        ) from None
    return kind, shape


def _gpt2(config: Fields) -> Shape:
    config.want("scale_attn_weights", True, default=True)
    config.want("scale_attn_by_inverse_layer_idx", False, default=False)
    config.want("add_cross_attention", False, default=False)
    hidden = config.whole("n_embd", default=768)
    return {
        "layers": config.whole("n_layer", default=12),
        "hidden": hidden,
        "heads": config.whole("n_head", default=12),
        "ffn": config.whole("n_inner", default=4 * hidden),
        "vocab": config.whole("vocab_size", default=50257),
        "max_seq_len": config.whole("n_positions", "n_ctx", default=1024),
        "norm": "layernorm",
        "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "position": "learned",
        "gated_mlp": False,
        "activation": _activation(config, "activation_function", "gelu_new"),
        "bias": "all",
        "tie_embeddings": config.flag("tie_word_embeddings", True),
    }


def _llama(config: Fields) -> Shape:
    shape = _block(config)
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention != mlp:
        raise config.refuse(
            "attention_bias", f"is {attention}, mlp_bias {mlp}", "only both or none can be read"
        )
    return {**shape, "bias": "all" if mlp else "none"}


def _mistral(config: Fields) -> Shape:
    # the class's own default is a window of 4096, an explicit null none
    null = "sliding_window" in config.given and "sliding_window" not in config.values
    window = None if null else config.whole("sliding_window", default=4096)
    return {**_block(config, kv_heads=8), "window": window}


def _mixtral(config: Fields) -> Shape:
    shape = _block(config, theta=1e6, eps=1e-5, kv_heads=8)
    window = config.whole("sliding_window") if "sliding_window" in config.values else None
    moe = {
        "experts": config.whole("num_local_experts", default=8),
        "top_k": config.whole("num_experts_per_tok", default=2),
        "expert_ffn": shape["ffn"],
        "aux_loss": config.number("router_aux_loss_coef", default=0.001),
    }
    return {**shape, "window": window, "moe": moe}


def _qwen2(config: Fields) -> Shape:
    return {**_block(config), "bias": "qkv", "window": _qwen_window(config)}


def _qwen3(config: Fields) -> Shape:
    config.want("attention_bias", False, default=False)
    head_dim = config.whole("head_dim", default=128)
    return {**_block(config), "head_dim": head_dim, "qk_norm": True, "window": _qwen_window(config)}


def _qwen3_moe(config: Fields) -> Shape:
    every = config.whole("decoder_sparse_step", default=1)
    dense = config.values.get("mlp_only_layers", [])
    if dense and (every != 1 or sorted(dense) != list(range(len(dense)))):
        raise config.refuse(
            "mlp_only_layers", f"is {dense}", "only the first layers can be dense by name"
        )
    head_dim = config.whole("hidden_size") // config.whole("num_attention_heads")
    moe = {
        "experts": config.whole("num_experts", "num_local_experts"),
        "top_k": config.whole("num_experts_per_tok"),
        "expert_ffn": config.whole("moe_intermediate_size"),
        # layer i routes where (i + 1) divides by the step
        "first_dense_layers": len(dense) or every - 1,
        "every": every,
        "renormalise": config.flag("norm_topk_prob", False),
        "aux_loss": config.number("router_aux_loss_coef", default=0.001),
    }
    return {**_qwen3(config), "head_dim": config.whole("head_dim", default=head_dim), "moe": moe}


def _deepseek_v2(config: Fields) -> Shape:
    method = config.word("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse(
            "topk_method", f"is {method!r}", "greedy or group_limited_greedy can be read"
        )
    config.want("norm_topk_prob", False, default=False)
    config.want("mlp_bias", False, default=False)
    return _deepseek(config, grouped=method == "group_limited_greedy", scale=1.0, interleaved=True)


def _deepseek_v3(config: Fields) -> Shape:
    config.want("topk_method", "noaux_tc", default="noaux_tc")
    config.want("scoring_func", "sigmoid", default="sigmoid")
    interleaved = config.flag("rope_interleave", True)
    shape = _deepseek(config, grouped=True, scale=2.5, interleaved=interleaved)
    # the files do not carry the rate of the balancing bias; arXiv 2412.19437, section 4.2
    routing = {
        "scoring": "sigmoid",
        "renormalise": config.flag("norm_topk_prob", True),
        "bias_update": 0.001,
    }
    shape["moe"] |= routing
    return shape


def _deepseek(config: Fields, *, grouped: bool, scale: float, interleaved: bool) -> Shape:
    config.want("attention_bias", False, default=False)
    config.want("moe_layer_freq", 1, default=1)
    moe: Shape = {
        "experts": config.whole("n_routed_experts"),
        "top_k": config.whole("num_experts_per_tok"),
        "expert_ffn": config.whole("moe_intermediate_size"),
        "shared_experts": config.whole("n_shared_experts"),
        "first_dense_layers": int(config.number("first_k_dense_replace", default=0)),
        "renormalise": False,
        "routed_scale": config.number("routed_scaling_factor", default=scale),
        "aux_loss": config.number("aux_loss_alpha", default=0.0),
    }
    if grouped and config.whole("n_group", default=1) > 1:
        moe |= {"groups": config.whole("n_group"), "groups_per_token": config.whole("topk_group")}
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    mla = {name: config.whole(name) for name in names}
    if "q_lora_rank" in config.values:
        mla["q_lora_rank"] = config.whole("q_lora_rank")
    shape = _block(config, interleaved=interleaved)
    shape.pop("head_dim", None)  # transformers writes qk_rope_head_dim there
    shape.pop("kv_heads")
    return {**shape, "attention": "mla", "mla": mla, "moe": moe}


def _block(
    config: Fields,
    *,
    theta: float = 10000.0,
    eps: float = 1e-6,
    kv_heads: int | None = None,
    interleaved: bool = False,
) -> Shape:
    """The Llama block: RMSNorm, gated MLP, rotary positions, no bias."""
    heads = config.whole("num_attention_heads")
    shape = {
        "layers": config.whole("num_hidden_layers"),
        "hidden": config.whole("hidden_size"),
        "heads": heads,
        "kv_heads": config.whole("num_key_value_heads", default=kv_heads or heads),
        "ffn": config.whole("intermediate_size"),
        "vocab": config.whole("vocab_size"),
        "max_seq_len": config.whole("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", default=eps),
        "activation": _activation(config, "hidden_act", "silu"),
        "rope": read_rope(config, theta=theta, interleaved=interleaved),
        "tie_embeddings": config.flag("tie_word_embeddings", False),
    }
    return shape | ({"head_dim": config.whole("head_dim")} if "head_dim" in config.values else {})


def _activation(config: Fields, key: str, default: str) -> str:
    name = config.word(key, default=default)
    if name not in ACTIVATIONS:
        raise config.refuse(key, f"is {name!r}", f"one of {', '.join(ACTIVATIONS)} can be read")
    return ACTIVATIONS[name]


def _qwen_window(config: Fields) -> int | None:
    """Layers from `max_window_layers` on see a window; all or none of them can be read."""
    if not config.flag("use_sliding_window", False) or "sliding_window" not in config.values:
        return None
    full, layers = (
        int(config.number("max_window_layers", default=28)),
        config.whole("num_hidden_layers"),
    )
    if full >= layers:
        return None
    if full > 0:
        raise config.refuse(
            "max_window_layers", f"is {full} of {layers} layers", "0 or all of them can be read"
        )
    return config.whole("sliding_window")


FAMILIES: dict[str, Callable[[Fields], Shape]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
