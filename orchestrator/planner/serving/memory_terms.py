"""Serving terms of memory: weights, KV cache, how many sequences fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.planner.serving.registry import POPE, SERVING, VLLM

term = SERVING.term


@term(
    "B",
    "each · (all parameters - tables) + 2 · tables",
    "weight-only quantization leaves embedding and head in 16 bit",
)
def weights_bytes(params_total: Any, params_table: Any, weight_bytes_each: Any) -> Any:
    """Bytes of all weights."""
    return (
        weight_bytes_each * (params_total - params_table)
        + np.maximum(2.0, weight_bytes_each) * params_table
    )


@term("B", "weights / (tp · pp)", POPE)
def weights_bytes_per_device(weights_bytes: Any, tp: Any, pp: Any) -> Any:
    """Bytes of weights per device."""
    return weights_bytes / (tp * pp)


@term(
    "",
    "MLA: kv_lora + qk_rope; MFA: 2 · head_dim; else 2 · kv_heads · head_dim",
    "2 is key and value; DeepSeek-V2, arXiv 2405.04434, section 2.1",
)
def kv_elements_per_layer(
    is_mla: Any, is_mfa: Any, kv_heads: Any, head_dim: Any, kv_lora: Any, qk_rope: Any
) -> Any:
    """KV cache elements per token and layer."""
    plain = np.where(is_mfa, 2 * head_dim, 2 * kv_heads * head_dim)
    return np.where(is_mla, kv_lora + qk_rope, plain)


@term("B", "layers · elements · bytes each", VLLM)
def kv_bytes_per_token(layers: Any, kv_elements_per_layer: Any, kv_bytes_each: Any) -> Any:
    """KV cache bytes per token."""
    return layers * kv_elements_per_layer * kv_bytes_each


@term(
    "",
    "MLA and MFA: 1; else min(tp, kv_heads)",
    "the latent is on every rank; key-value heads are replicated if tp exceeds them",
)
def kv_shards(is_mla: Any, is_mfa: Any, tp: Any, kv_heads: Any) -> Any:
    """Tensor parallel shards of the KV cache."""
    return np.where((is_mla > 0) | (is_mfa > 0), 1, np.minimum(tp, kv_heads))


@term("tokens", "min(prompt + output, window), in full blocks", VLLM)
def kv_tokens_per_sequence(prompt_len: Any, output_len: Any, window: Any, block_size: Any) -> Any:
    """Tokens per sequence in the KV cache."""
    tokens = prompt_len + output_len
    cached = np.where(window > 0, np.minimum(tokens, window), tokens)
    return np.ceil(cached / block_size) * block_size


@term("B", "tokens · bytes per token", VLLM)
def kv_bytes_per_sequence(kv_tokens_per_sequence: Any, kv_bytes_per_token: Any) -> Any:
    """KV cache bytes per sequence."""
    return kv_tokens_per_sequence * kv_bytes_per_token


@term("B", "bytes per sequence / (shards · pp)", VLLM)
def kv_bytes_per_sequence_device(kv_bytes_per_sequence: Any, kv_shards: Any, pp: Any) -> Any:
    """KV cache bytes per sequence and device."""
    return kv_bytes_per_sequence / (kv_shards * pp)


@term(
    "B",
    "prompt · hidden · 8 · bytes each, and fp32 logits of the batch",
    "one prefill's working set",
)
def activations_bytes(
    prompt_len: Any, hidden: Any, activation_bytes_each: Any, batch: Any, vocab: Any, tp: Any
) -> Any:
    """Working set of one prefill, and logits."""
    return prompt_len * hidden * 8 * activation_bytes_each + batch * vocab * 4 / tp


@term("B", "capacity · utilization - weights - activations - reserved", VLLM)
def kv_room_bytes(
    capacity_bytes: Any,
    memory_utilization: Any,
    weights_bytes_per_device: Any,
    activations_bytes: Any,
    reserved_bytes: Any,
) -> Any:
    """Bytes available for the KV cache per device."""
    room = (
        capacity_bytes * memory_utilization
        - weights_bytes_per_device
        - activations_bytes
        - reserved_bytes
    )
    return np.maximum(0.0, room)


@term("sequences", "⌊room / bytes per sequence and device⌋ · replicas", VLLM)
def max_concurrency(kv_room_bytes: Any, kv_bytes_per_sequence_device: Any, replicas: Any) -> Any:
    """Sequences that fit."""
    return np.floor(kv_room_bytes / kv_bytes_per_sequence_device) * replicas


@term("B", "weights + activations + reserved + batch · bytes per sequence", "")
def total_bytes(
    weights_bytes_per_device: Any,
    activations_bytes: Any,
    reserved_bytes: Any,
    batch: Any,
    kv_bytes_per_sequence_device: Any,
) -> Any:
    """Bytes per device at the batch."""
    return (
        weights_bytes_per_device
        + activations_bytes
        + reserved_bytes
        + batch * kv_bytes_per_sequence_device
    )


@term("", "1 if total ≤ capacity · utilization", "")
def fits(total_bytes: Any, capacity_bytes: Any, memory_utilization: Any) -> Any:
    """Whether the batch fits."""
    return np.asarray(total_bytes <= capacity_bytes * memory_utilization, float)
