"""The `config.json` of the Hugging Face family that computes the same as a ModelSpec.

Does not depend on tensors.
"""

from __future__ import annotations

from typing import Any

from workers.contracts.huggingface.config_reader import CLASSIFIER
from workers.contracts.huggingface.rotary import SCALING_FIELDS
from workers.contracts.specs.model import ModelSpec
from workers.models.errors import WeightsError

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def family_for(spec: ModelSpec) -> str:
    """The family that computes the same logits. Raises WeightsError if there is no such family."""
    if spec.logit_softcap is not None:
        raise _no_family(spec, "logit_softcap", "Omit the field.")
    if spec.attention == "mfa":
        raise _no_family(spec, "attention mfa", "Keep these weights in Orrery's format.")
    if spec.norm == "layernorm":
        return _gpt2(spec)
    if spec.position != "rope" or not spec.gated_mlp:
        raise _no_family(
            spec,
            "RMSNorm without rotary positions or without a gated MLP",
            "Use position rope and gated_mlp.",
        )
    if spec.attention == "mla":
        return _deepseek(spec)
    if spec.rope.interleaved:
        raise _no_family(
            spec, "interleaved rotation without latent attention", "Use rope.interleaved false."
        )
    if spec.moe is not None:
        return _routed(spec)
    if spec.qk_norm:
        if spec.bias != "none":
            raise _no_family(spec, f"qk_norm with bias {spec.bias}", "Use bias none.")
        return "qwen3"
    if spec.bias == "qkv":
        if spec.head_dim * spec.heads != spec.hidden:
            raise _no_family(
                spec, "bias qkv with a head_dim of its own", "Set head_dim to hidden / heads."
            )
        return "qwen2"
    if spec.window is not None:
        if spec.bias != "none":
            raise _no_family(spec, "a window with bias all", "Use bias none.")
        return "mistral"
    return "llama"


def write_config(spec: ModelSpec, *, dtype: str) -> dict[str, Any]:
    """The configuration with the keys of transformers 4, which version 5 accepts too."""
    family = family_for(spec)
    common = {
        "architectures": [_architecture(spec, family)],
        "model_type": family,
        "_name_or_path": spec.name,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if spec.scalar_head:
        common |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": None}
    if family == "gpt2":
        return {**common, **_gpt2_config(spec)}
    config: dict[str, Any] = {
        **common,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads if spec.mla else spec.kv_heads,
        "intermediate_size": spec.moe.expert_ffn if spec.moe and family == "mixtral" else spec.ffn,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": _ACTIVATIONS[spec.activation],
        "attention_dropout": 0.0,
        **_rope_config(spec),
    }
    if family not in ("deepseek_v2", "deepseek_v3"):
        config["head_dim"] = spec.head_dim
    if family == "llama":
        config |= {"attention_bias": spec.bias == "all", "mlp_bias": spec.bias == "all"}
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = spec.window
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        config |= {
            "use_sliding_window": spec.window is not None,
            "sliding_window": spec.window,
            "max_window_layers": 0,
        }
    return config | (_moe_config(spec, family) if spec.moe else {})


def _architecture(spec: ModelSpec, family: str) -> str:
    """The class that computes the same: of a reward model, a classifier with one label."""
    name = _CLASSES[family]
    if not spec.scalar_head:
        return name
    return name.removesuffix("LMHeadModel").removesuffix("ForCausalLM") + CLASSIFIER


def _gpt2(spec: ModelSpec) -> str:
    plain = (
        spec.attention == "softmax"
        and spec.moe is None
        and not spec.qk_norm
        and spec.window is None
    )
    heads = spec.kv_heads == spec.heads and spec.head_dim * spec.heads == spec.hidden
    if plain and heads and spec.position == "learned" and spec.bias == "all" and not spec.gated_mlp:
        return "gpt2"
    raise _no_family(
        spec,
        "LayerNorm other than GPT-2's block",
        "Use learned positions, bias all, a plain MLP, kv_heads = heads.",
    )


def _deepseek(spec: ModelSpec) -> str:
    moe = spec.moe
    if moe is None or not moe.shared_experts:
        raise _no_family(
            spec,
            "latent attention without shared experts",
            "Keep these weights in Orrery's format.",
        )
    if (
        spec.bias != "none"
        or spec.window is not None
        or moe.every != 1
        or moe.shared_width % moe.expert_ffn
    ):
        message = (
            "latent attention with biases, a window, every above 1 or shared experts of "
            "another width"
        )
        raise _no_family(spec, message, "Keep these weights in Orrery's format.")
    if moe.scoring == "sigmoid":
        if not moe.bias_update:
            raise _no_family(
                spec, "sigmoid scores without a balancing bias", "Use bias_update above 0."
            )
        return "deepseek_v3"
    if moe.renormalise or moe.bias_update or not spec.rope.interleaved:
        message = (
            "softmax scores with latent attention that are renormalized or biased, or rotation "
            "by halves"
        )
        raise _no_family(spec, message, "Use scoring sigmoid.")
    return "deepseek_v2"


def _routed(spec: ModelSpec) -> str:
    moe = spec.moe
    assert moe is not None
    plain = (
        moe.scoring == "softmax"
        and not moe.shared_experts
        and moe.groups in (None, 1)
        and moe.routed_scale == 1.0
    )
    if not plain or moe.bias_update or spec.bias != "none":
        message = (
            "shared experts, groups, sigmoid scores, a routed scale or biases without latent "
            "attention"
        )
        raise _no_family(spec, message, "Keep these weights in Orrery's format.")
    if not spec.qk_norm and moe.first_dense_layers == 0 and moe.every == 1 and moe.renormalise:
        return "mixtral"
    if spec.qk_norm and (moe.every == 1 or moe.first_dense_layers == moe.every - 1):
        return "qwen3_moe"
    raise _no_family(
        spec,
        "this placement of routing layers and norms",
        "Use the layout of Mixtral or Qwen3-MoE.",
    )


def _moe_config(spec: ModelSpec, family: str) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    if family == "mixtral":
        shape: dict[str, Any] = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k}
        return {**shape, "router_aux_loss_coef": moe.aux_loss}
    common: dict[str, Any] = {
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn,
    }
    if family == "qwen3_moe":
        return {
            **common,
            "num_experts": moe.experts,
            "norm_topk_prob": moe.renormalise,
            "decoder_sparse_step": moe.every,
            "mlp_only_layers": list(range(moe.first_dense_layers)) if moe.every == 1 else [],
            "router_aux_loss_coef": moe.aux_loss,
        }
    assert spec.mla is not None
    config = {
        **common,
        **spec.mla.model_dump(),
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_width // moe.expert_ffn,
        "first_k_dense_replace": moe.first_dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": moe.routed_scale,
        "norm_topk_prob": moe.renormalise,
        "n_group": moe.groups or 1,
        "topk_group": moe.groups_per_token or moe.groups or 1,
        "aux_loss_alpha": moe.aux_loss,
        "attention_bias": False,
    }
    if family == "deepseek_v2":
        method = "greedy" if moe.groups is None else "group_limited_greedy"
        return {**config, "topk_method": method, "scoring_func": "softmax"}
    routing: dict[str, Any] = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    }
    return {**config, **routing, "rope_interleave": spec.rope.interleaved}


def _gpt2_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_layer": spec.layers,
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "n_positions": spec.max_seq_len,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": "gelu_new"
        if spec.activation == "gelu_tanh"
        else _ACTIVATIONS[spec.activation],
        **{key: spec.dropout for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")},
    }


def _no_family(spec: ModelSpec, what: str, hint: str) -> WeightsError:
    return WeightsError(
        f"no Hugging Face family that can be written has {what} ({spec.name}). {hint}"
    )


def _rope_config(spec: ModelSpec) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`.

    Raises WeightsError if transformers would extend another context length.
    """
    scaling = spec.rope.scaling
    if scaling is None:
        return {"rope_theta": spec.rope.theta, "rope_scaling": None}
    original = scaling.original_max_seq_len
    if scaling.name == "dynamic" and original not in (None, spec.max_seq_len):
        message = (
            f"rope.scaling extends {original} positions, transformers always max_seq_len "
            f"{spec.max_seq_len}"
        )
        raise WeightsError(f"{spec.name}: {message}; set them equal")
    config = {"rope_type": scaling.name, "type": scaling.name, "factor": scaling.factor}
    for key, field in SCALING_FIELDS[scaling.name].items():
        value = getattr(scaling, field)
        if value is None and field == "original_max_seq_len":
            value = 8192 if scaling.name == "llama3" else spec.max_seq_len
        if value is not None:
            config[key] = value
    return {"rope_theta": spec.rope.theta, "rope_scaling": config}
