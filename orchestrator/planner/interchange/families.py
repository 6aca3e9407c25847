"""The Hugging Face families that can be read, and what stands in the way of other well-known ones.

A family can be read only if ModelSpec expresses it exactly. Knows nothing of files and weights.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.planner.interchange import families_gpt as gpt
from orchestrator.planner.interchange import families_llama as llama
from orchestrator.planner.interchange.fields import Fields
from orchestrator.planner.interchange.parts import Shape

Family = Callable[[Fields], Shape]

FAMILIES: dict[str, Family] = {
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

# what stands in the way of well-known families
BEYOND: dict[str, str] = {
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
    "stablelm": "norms with a bias beside linears without",
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
