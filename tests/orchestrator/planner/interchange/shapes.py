"""Published `config.json` files of many families, as transformers 4 wrote most of them; sizes only,
no weights.
"""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def _sizes(
    layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        **more,
    }


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **_sizes(*sizes),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        **more,
    }


def _qwen3(*sizes: int, kv: int, **more: Any) -> dict[str, Any]:
    own = {
        "head_dim": 128,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
    }
    return {"model_type": "qwen3", **_sizes(*sizes), **own, "max_window_layers": sizes[0], **more}


def _deepseek(
    kind: str,
    *sizes: int,
    experts: int,
    width: int,
    top_k: int,
    shared: int,
    first: int,
    **more: Any,
) -> dict[str, Any]:
    own = {
        "n_routed_experts": experts,
        "moe_intermediate_size": width,
        "num_experts_per_tok": top_k,
        "n_shared_experts": shared,
        "first_k_dense_replace": first,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_key_value_heads": sizes[2],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": _YARN,
    }
    return {"model_type": kind, **_sizes(*sizes), **own, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(
        30,
        576,
        9,
        1536,
        49152,
        8192,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rope_theta=100000,
    ),
    "llama2-7b": _llama(32, 4096, 32, 11008, 32000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 28672, 32000, 4096, num_key_value_heads=8),
    "llama3-405b": _llama(
        126, 16384, 128, 53248, 128256, 131072, num_key_value_heads=8, **_LLAMA3_ROPE
    ),
    "mistral-7b": {
        "model_type": "mistral",
        **_sizes(32, 4096, 32, 14336, 32000, 32768),
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-5,
    },
    "mistral-nemo-12b": {
        "model_type": "mistral",
        **_sizes(40, 5120, 32, 14336, 131072, 131072),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        **_sizes(32, 4096, 32, 14336, 32000, 32768),
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "router_aux_loss_coef": 0.02,
        "rms_norm_eps": 1e-5,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        **_sizes(28, 3584, 28, 18944, 152064, 131072),
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
    },
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, 151936, 40960, kv=8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, 151936, 40960, kv=8),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, 151936, 40960, kv=8),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, 151936, 40960, kv=4)
    | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    },
    "deepseek-v2": _deepseek(
        "deepseek_v2",
        60,
        5120,
        128,
        12288,
        102400,
        163840,
        experts=160,
        width=1536,
        top_k=6,
        shared=2,
        first=1,
        q_lora_rank=1536,
        n_group=8,
        topk_group=3,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        norm_topk_prob=False,
        scoring_func="softmax",
        aux_loss_alpha=0.001,
    ),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        27,
        2048,
        16,
        10944,
        102400,
        163840,
        experts=64,
        width=1408,
        top_k=6,
        shared=2,
        first=1,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        61,
        7168,
        128,
        18432,
        129280,
        163840,
        experts=256,
        width=2048,
        top_k=8,
        shared=1,
        first=3,
        q_lora_rank=1536,
        n_group=8,
        topk_group=4,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        aux_loss_alpha=0.0001,
        num_nextn_predict_layers=1,
        quantization_config={"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "phi3-mini-4k": {
        "model_type": "phi3",
        **_sizes(32, 3072, 32, 8192, 32064, 4096),
        "num_key_value_heads": 32,
        "sliding_window": 2047,
        "rope_scaling": None,
        "original_max_position_embeddings": 4096,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2",
        **_sizes(30, 3072, 24, 12288, 49152, 16384),
        "num_key_value_heads": 2,
        "sliding_window": 4096,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "rope_theta": 999999.4420358813,
        "use_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt2-124m": {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gpt2-xl-1.5b": {
        "model_type": "gpt2",
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
        "n_ctx": 1024,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "starcoder": {
        "model_type": "gpt_bigcode",
        "n_layer": 40,
        "n_embd": 6144,
        "n_head": 48,
        "n_inner": 24576,
        "n_positions": 8192,
        "vocab_size": 49152,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "redpajama-incite-3b": {
        "model_type": "gpt_neox",
        **_sizes(32, 2560, 32, 10240, 50432, 2048),
        "rotary_pct": 1.0,
        "use_parallel_residual": False,
        "hidden_act": "gelu",
    },
    "opt-175b": {
        "model_type": "opt",
        "num_hidden_layers": 96,
        "hidden_size": 12288,
        "ffn_dim": 49152,
        "num_attention_heads": 96,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 12288,
    },
    # shapes of no published model, for what the others leave out
    "llama with biases": _llama(2, 512, 8, 1024, 1000, 4096, attention_bias=True, mlp_bias=True),
    "qwen3-moe every second": _qwen3(7, 256, 4, 512, 1000, 4096, kv=2)
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 2,
    },
    "qwen3-moe two dense": _qwen3(7, 256, 4, 512, 1000, 4096, kv=2)
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [0, 1],
    },
}
