"""The named models: published sizes of well-known decoders, and small ones of each architecture.

Shapes only; weights come from a ModelSource. Sources: the models' config.json or paper.
"""

from __future__ import annotations

import difflib
from typing import Any

from workers.contracts.base import Refused
from workers.contracts.specs.model import ModelSource, ModelSpec

_LLAMA: dict[str, Any] = {
    "gated_mlp": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
}
_GPT: dict[str, Any] = {
    "gated_mlp": False,
    "activation": "gelu_tanh",
    "norm": "layernorm",
    "position": "learned",
    "tie_embeddings": True,
    "bias": "all",
}
_LLAMA3_ROPE = {"theta": 500000.0}
_DEEPSEEK_ROPE = {
    "theta": 10000.0,
    "interleaved": True,
    "scaling": {
        "name": "yarn",
        "factor": 40.0,
        "original_max_seq_len": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_QWEN3: dict[str, Any] = {
    **_LLAMA,
    "vocab": 151936,
    "max_seq_len": 40960,
    "head_dim": 128,
    "rope": {"theta": 1000000.0},
    "norm_eps": 1e-6,
    "qk_norm": True,
}


def _llama(
    name: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: Any
) -> ModelSpec:
    return ModelSpec.from_dict(
        {
            **_LLAMA,
            "name": name,
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "ffn": ffn,
            "vocab": vocab,
            **more,
        }
    )


def _gpt(
    name: str, layers: int, hidden: int, heads: int, max_seq_len: int, **more: Any
) -> ModelSpec:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 50257}
    return ModelSpec.from_dict({**_GPT, "name": name, "max_seq_len": max_seq_len, **sizes, **more})


def _deepseek(
    name: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: Any
) -> ModelSpec:
    mla = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    shape = {
        "attention": "mla",
        "mla": mla,
        "norm_eps": 1e-6,
        "rope": _DEEPSEEK_ROPE,
        "max_seq_len": 163840,
    }
    return _llama(name, layers, hidden, heads, ffn, vocab, **{**shape, **more})


def _qwen3(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any
) -> ModelSpec:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return ModelSpec.from_dict({**_QWEN3, "name": name, **sizes, **more})


_MLA_SMALL = {
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def _small(name: str, layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> ModelSpec:
    """A model over bytes that trains on two cores in a minute."""
    shape = {"max_seq_len": 512, "tie_embeddings": True}
    return _llama(name, layers, hidden, heads, ffn, 256, **shape, **more)


_ALL = (
    # own shapes: byte vocabulary, small enough for one slow core
    _small("llama-tiny", 5, 128, 4, 344, kv_heads=2),
    # the same architecture with one key and value head (arXiv 1911.02150)
    _small("mqa-3m", 6, 224, 7, 600, kv_heads=1),
    # multi-head latent attention as in DeepSeek-V3 (arXiv 2405.04434)
    _small("mla-3m", 6, 224, 7, 600, attention="mla", mla=_MLA_SMALL),
    # multi-matrix factorization attention (arXiv 2412.19255)
    _small(
        "mfa-4m",
        6,
        224,
        10,
        600,
        attention="mfa",
        mfa={"qk_rank": 128, "head_dim": 64, "heads": 10},
    ),
    # routed experts as in Mixtral, 2.4M parameters active per token
    _small(
        "moe-8m",
        6,
        192,
        6,
        512,
        kv_heads=2,
        moe={"experts": 8, "top_k": 2, "expert_ffn": 256, "aux_loss": 0.01},
    ),
    # as in DeepSeek-V3: MLA, a shared expert, sigmoid scores, balance by bias; 2.8M active
    _small(
        "mla-moe-6m",
        6,
        192,
        6,
        512,
        attention="mla",
        mla=_MLA_SMALL,
        moe={
            "experts": 8,
            "top_k": 2,
            "expert_ffn": 192,
            "shared_experts": 1,
            "first_dense_layers": 1,
            "scoring": "sigmoid",
            "aux_loss": 0.0001,
            "bias_update": 0.001,
        },
    ),
    # llama2.c stories15M shapes with its 32,000-token vocabulary
    _llama("llama-15m", 6, 288, 6, 768, 32000, max_seq_len=1024, tie_embeddings=True),
    _llama(
        "smollm2-135m",
        30,
        576,
        9,
        1536,
        49152,
        kv_heads=3,
        max_seq_len=8192,
        tie_embeddings=True,
        rope={"theta": 100000.0},
    ),
    _gpt("gpt2-124m", 12, 768, 12, 1024),
    _gpt("gpt2-xl-1.5b", 48, 1600, 25, 1024),
    # arXiv 2005.14165, table 2.1; every layer dense attention
    _gpt("gpt3-175b", 96, 12288, 96, 2048, activation="gelu"),
    _llama("llama2-7b", 32, 4096, 32, 11008, 32000, max_seq_len=4096),
    _llama("llama2-13b", 40, 5120, 40, 13824, 32000, max_seq_len=4096),
    _llama("llama2-70b", 80, 8192, 64, 28672, 32000, kv_heads=8, max_seq_len=4096),
    _llama(
        "llama3-8b", 32, 4096, 32, 14336, 128256, kv_heads=8, max_seq_len=8192, rope=_LLAMA3_ROPE
    ),
    _llama(
        "llama3-70b", 80, 8192, 64, 28672, 128256, kv_heads=8, max_seq_len=8192, rope=_LLAMA3_ROPE
    ),
    _llama(
        "llama3-405b",
        126,
        16384,
        128,
        53248,
        128256,
        kv_heads=8,
        max_seq_len=8192,
        rope=_LLAMA3_ROPE,
    ),
    _llama(
        "mixtral-8x7b",
        32,
        4096,
        32,
        14336,
        32000,
        kv_heads=8,
        max_seq_len=32768,
        rope={"theta": 1000000.0},
        moe={"experts": 8, "top_k": 2, "expert_ffn": 14336, "aux_loss": 0.02},
    ),
    _deepseek(
        "deepseek-v2",
        60,
        5120,
        128,
        12288,
        102400,
        moe={
            "experts": 160,
            "top_k": 6,
            "expert_ffn": 1536,
            "shared_experts": 2,
            "first_dense_layers": 1,
            "groups": 8,
            "groups_per_token": 3,
            "renormalise": False,
            "routed_scale": 16.0,
            "aux_loss": 0.001,
        },
    ),
    _deepseek(
        "deepseek-v3",
        61,
        7168,
        128,
        18432,
        129280,
        moe={
            "experts": 256,
            "top_k": 8,
            "expert_ffn": 2048,
            "shared_experts": 1,
            "first_dense_layers": 3,
            "groups": 8,
            "groups_per_token": 4,
            "scoring": "sigmoid",
            "routed_scale": 2.5,
            "aux_loss": 0.0001,
            "bias_update": 0.001,
        },
    ),
    _qwen3("qwen3-0.6b", 28, 1024, 16, 8, 3072, tie_embeddings=True),
    _qwen3("qwen3-8b", 36, 4096, 32, 8, 12288),
    _qwen3("qwen3-32b", 64, 5120, 64, 8, 25600),
    _qwen3(
        "qwen3-30b-a3b",
        48,
        2048,
        32,
        4,
        6144,
        moe={"experts": 128, "top_k": 8, "expert_ffn": 768, "aux_loss": 0.001},
    ),
)

PRESETS: dict[str, ModelSpec] = {spec.name: spec for spec in _ALL}


def preset(name: str) -> ModelSpec:
    """The preset of that name. Raises Refused naming the nearest presets."""
    try:
        return PRESETS[name]
    except KeyError:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.3) or sorted(PRESETS)
        raise Refused(f"{name!r} is not a model preset", f"Use {' or '.join(near)}.") from None


def check_preset(name: str) -> str:
    """The name itself. Raises Refused if it is not a preset."""
    return preset(name).name


def resolve_model(model: str | ModelSpec | ModelSource) -> ModelSpec | None:
    """The shape of a spec's `model`; None for a ModelSource, whose shape is stored with weights."""
    if isinstance(model, ModelSource):
        return None
    return preset(model) if isinstance(model, str) else model
