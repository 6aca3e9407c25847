"""Serving terms of time: prefill and decode rooflines, throughput, speculative decoding.

Does not model queues: latencies are those of an engine without waiting requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.planner.serving.registry import LEVIATHAN, POPE, SERVING

term = SERVING.term


# --- prefill ---


@term(
    "FLOP", "2 · active · prompt + 2 · L · a·d · prompt² (causal; a window bounds the keys)", POPE
)
def prefill_flops(
    params_active: Any,
    params_embedding: Any,
    prompt_len: Any,
    layers: Any,
    attention_width: Any,
    window: Any,
) -> Any:
    """FLOPs of one prefill."""
    keys = np.where(window > 0, np.minimum(prompt_len, 2 * window), prompt_len)
    return (
        2 * (params_active - params_embedding) * prompt_len
        + 2 * layers * attention_width * prompt_len * keys
    )


@term("s", "FLOPs / (efficiency · peak · tp)", POPE)
def prefill_compute_s(prefill_flops: Any, gemm_efficiency: Any, peak_flops: Any, tp: Any) -> Any:
    """Compute seconds of one prefill."""
    return prefill_flops / (gemm_efficiency * peak_flops * tp)


@term("s", "weights / (efficiency · bandwidth · tp)", POPE)
def prefill_weights_s(
    weights_bytes: Any, bandwidth_efficiency: Any, memory_bandwidth: Any, tp: Any
) -> Any:
    """Seconds to read the weights in a prefill."""
    return weights_bytes / (bandwidth_efficiency * memory_bandwidth * tp)


@term(
    "s",
    "2 L all-reduces of prompt · hidden, and a hop per pipeline stage",
    "ring: 2(t - 1)/t of the bytes",
)
def prefill_comm_s(
    layers: Any,
    prompt_len: Any,
    hidden: Any,
    activation_bytes_each: Any,
    tp: Any,
    pp: Any,
    tp_bandwidth: Any,
    pp_bandwidth: Any,
    collective_latency_s: Any,
) -> Any:
    """Communication seconds of one prefill."""
    size = prompt_len * hidden * activation_bytes_each
    return _reduced_and_sent_s(
        size, layers, tp, pp, tp_bandwidth, pp_bandwidth, collective_latency_s
    )


@term("s", "max(compute, reading weights) + communication + launches", POPE)
def ttft_s(
    prefill_compute_s: Any,
    prefill_weights_s: Any,
    prefill_comm_s: Any,
    layers: Any,
    launch_s_per_layer: Any,
) -> Any:
    """Time to first token."""
    return (
        np.maximum(prefill_compute_s, prefill_weights_s)
        + prefill_comm_s
        + layers * launch_s_per_layer
    )


# --- decode ---


@term("sequences", "ceil(batch / replicas)", "")
def replica_batch(batch: Any, replicas: Any) -> Any:
    """Sequences per replica."""
    return np.ceil(batch / replicas)


@term("", "E · (1 - (1 - k/E)^batch)", "expected distinct experts under even routing")
def experts_touched(experts: Any, top_k: Any, replica_batch: Any) -> Any:
    """Expected distinct experts per layer and decode step."""
    count = np.maximum(experts, 1)
    return np.where(
        experts > 0, count * (1 - (1 - np.minimum(1, top_k / count)) ** replica_batch), 0.0
    )


@term("B", "weights that one step reads: all but the token table and unused experts", "")
def decode_weights_bytes(
    weights_bytes: Any,
    params_embedding: Any,
    params_head: Any,
    weight_bytes_each: Any,
    experts: Any,
    experts_touched: Any,
    moe_layers: Any,
    params_expert: Any,
) -> Any:
    """Weight bytes read per decode step."""
    table = np.where(params_head > 0, params_embedding, 0) * np.maximum(2.0, weight_bytes_each)
    idle = moe_layers * (experts - experts_touched) * params_expert * weight_bytes_each
    return weights_bytes - table - idle


@term("B", "replica batch · KV of a sequence in the middle of its output", "")
def decode_kv_bytes(
    replica_batch: Any, prompt_len: Any, output_len: Any, window: Any, kv_bytes_per_token: Any
) -> Any:
    """KV cache bytes read per decode step."""
    tokens = prompt_len + output_len / 2
    return (
        replica_batch
        * np.where(window > 0, np.minimum(tokens, window), tokens)
        * kv_bytes_per_token
    )


@term("s", "(weights / tp + KV / shards) / (efficiency · bandwidth)", POPE)
def decode_memory_s(
    decode_weights_bytes: Any,
    decode_kv_bytes: Any,
    tp: Any,
    kv_shards: Any,
    bandwidth_efficiency: Any,
    memory_bandwidth: Any,
) -> Any:
    """Seconds of memory traffic per decode step."""
    return (decode_weights_bytes / tp + decode_kv_bytes / kv_shards) / (
        bandwidth_efficiency * memory_bandwidth
    )


@term("s", "(2 · active + 4 · L · a·d · context) · batch / (efficiency · peak · tp)", POPE)
def decode_compute_s(
    params_active: Any,
    params_embedding: Any,
    params_head: Any,
    layers: Any,
    attention_width: Any,
    prompt_len: Any,
    output_len: Any,
    replica_batch: Any,
    gemm_efficiency: Any,
    peak_flops: Any,
    tp: Any,
) -> Any:
    """Compute seconds per decode step."""
    used = params_active - np.where(params_head > 0, params_embedding, 0)
    flops = (
        2 * used + 4 * layers * attention_width * (prompt_len + output_len / 2)
    ) * replica_batch
    return flops / (gemm_efficiency * peak_flops * tp)


@term("s", "2 L small all-reduces, latency bound, and a hop per pipeline stage", "")
def decode_comm_s(
    layers: Any,
    replica_batch: Any,
    hidden: Any,
    activation_bytes_each: Any,
    tp: Any,
    pp: Any,
    tp_bandwidth: Any,
    pp_bandwidth: Any,
    collective_latency_s: Any,
) -> Any:
    """Communication seconds per decode step."""
    size = replica_batch * hidden * activation_bytes_each
    return _reduced_and_sent_s(
        size, layers, tp, pp, tp_bandwidth, pp_bandwidth, collective_latency_s
    )


@term("s", "max(memory, compute) + communication + launches", POPE)
def tpot_s(
    decode_memory_s: Any,
    decode_compute_s: Any,
    decode_comm_s: Any,
    layers: Any,
    launch_s_per_layer: Any,
) -> Any:
    """Time per output token."""
    return (
        np.maximum(decode_memory_s, decode_compute_s) + decode_comm_s + layers * launch_s_per_layer
    )


@term(
    "sequences",
    "batch with equal times of reading weights and multiplying: peak / bandwidth · bytes / 2",
    "H100 bf16: 989e12 / 3.35e12 = 295",
)
def crossover_batch(peak_flops: Any, memory_bandwidth: Any, weight_bytes_each: Any) -> Any:
    """Batch at which decode turns from memory to compute bound."""
    return peak_flops / memory_bandwidth * weight_bytes_each / 2


# --- throughput and speculative decoding ---


@term(
    "tokens/s",
    "batch · output / (output · TPOT + replica batch · TTFT)",
    "prefills of a full batch delay decodes",
)
def tokens_per_s(batch: Any, output_len: Any, tpot_s: Any, ttft_s: Any, replica_batch: Any) -> Any:
    """Output tokens per second of all replicas."""
    return batch * output_len / (output_len * tpot_s + replica_batch * ttft_s)


@term(
    "",
    "replica batch · TTFT / (output · TPOT + replica batch · TTFT)",
    "prefills of a full batch delay decodes",
)
def prompt_share(output_len: Any, tpot_s: Any, ttft_s: Any, replica_batch: Any) -> Any:
    """Share of the time in which prompts are processed and no sequence gets a token."""
    prompts_s = replica_batch * ttft_s
    return prompts_s / (output_len * tpot_s + prompts_s)


@term("tokens/s", "tokens/s / (tp · pp · replicas)", "")
def tokens_per_s_per_device(tokens_per_s: Any, tp: Any, pp: Any, replicas: Any) -> Any:
    """Output tokens per second and device."""
    return tokens_per_s / (tp * pp * replicas)


@term("USD", "devices · price / (tokens/s · 3600) · 10^6", "")
def usd_per_million_tokens(
    tokens_per_s: Any, tp: Any, pp: Any, replicas: Any, usd_per_hour: Any
) -> Any:
    """Cost per 10^6 output tokens."""
    return tp * pp * replicas * usd_per_hour / (tokens_per_s * 3600) * 1e6


@term("tokens", "(1 - α^(γ+1)) / (1 - α)", f"{LEVIATHAN}, eq. 1")
def accepted_per_step(acceptance: Any, draft_tokens: Any) -> Any:
    """Expected tokens per speculative step."""
    tokens = draft_tokens + 1.0
    below = np.minimum(acceptance, 1 - 1e-9)
    return np.where(acceptance >= 1, tokens, (1 - below**tokens) / (1 - below))


@term("", "accepted / (γ · c + 1)", f"{LEVIATHAN}, theorem 3.8; while decoding is memory bound")
def speculative_speedup(accepted_per_step: Any, draft_tokens: Any, draft_cost: Any) -> Any:
    """Speed-up of speculative decoding."""
    return accepted_per_step / (draft_tokens * draft_cost + 1)


@term("s", "TPOT / speed-up", LEVIATHAN)
def speculative_tpot_s(tpot_s: Any, speculative_speedup: Any) -> Any:
    """Time per output token with speculative decoding."""
    return tpot_s / speculative_speedup


def _reduced_and_sent_s(
    size: Any, layers: Any, tp: Any, pp: Any, tp_bandwidth: Any, pp_bandwidth: Any, latency_s: Any
) -> Any:
    """Two ring all-reduces of `size` bytes per layer, and a hop per stage boundary."""
    reduces = 2 * layers * (2 * (tp - 1) / tp * size / tp_bandwidth + latency_s) * (tp > 1)
    return reduces + (pp - 1) * (size / pp_bandwidth + latency_s)
