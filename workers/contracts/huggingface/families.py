"""The Hugging Face families that can be read, and why other well-known ones cannot.

A family can be read only if ModelSpec expresses it exactly.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.contracts.huggingface import families_gpt as gpt
from workers.contracts.huggingface import families_llama as llama
from workers.contracts.huggingface.blocks import Shape
from workers.contracts.huggingface.fields import ConfigFields

FAMILIES: dict[str, Callable[[ConfigFields], Shape]] = {
    "llama": llama.llama,
    "mistral": llama.mistral,
    "mixtral": llama.mixtral,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "qwen3_moe": llama.qwen3_moe,
    "deepseek_v2": llama.deepseek_v2,
    "deepseek_v3": llama.deepseek_v3,
    "kimi_k2": llama.deepseek_v3,
    "phi3": llama.phi3,
    "starcoder2": gpt.starcoder2,
    "gpt2": gpt.gpt2,
    "gpt_bigcode": gpt.gpt_bigcode,
    "gpt_neox": gpt.gpt_neox,
    "opt": gpt.opt,
}

# families whose tensors `workers.models.hf` can load and save
WEIGHT_FAMILIES = frozenset(
    {
        "gpt2",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
    }
)

# what ModelSpec cannot express in other well-known families
UNSUPPORTED: dict[str, str] = {
    "bloom": "ALiBi positions and a norm over the embeddings",
    "falcon": "attention and MLP in parallel",
    "gptj": "attention and MLP in parallel",
    "phi": "attention and MLP in parallel behind one norm",
    "cohere": "attention and MLP in parallel",
    "mpt": "ALiBi positions",
    "gemma": "embeddings scaled by the root of hidden",
    "gemma2": "norms after attention and MLP, and alternating windows",
    "gemma3_text": "norms after attention and MLP, and alternating windows",
    "olmo": "norms without weights",
    "olmo2": "norms after attention and MLP",
    "olmoe": "a query-key norm over all heads at once",
    "stablelm": "norms with a bias next to linear layers without",
    "granite": "multipliers on embeddings, residuals and logits",
    "qwen2_moe": "a gate on the shared expert (shared_expert_gate)",
    "qwen3_next": "linear attention in most layers",
    "gpt_oss": "attention sinks, biases on experts and alternating windows",
    "llama4_text": "positions in only some layers and chunked attention",
    "smollm3": "positions in only some layers",
    "nemotron": "squared ReLU",
    "mamba": "state-space layers instead of attention",
    "mamba2": "state-space layers instead of attention",
    "jamba": "state-space layers instead of attention",
}
