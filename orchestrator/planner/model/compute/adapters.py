"""Compute time that adapters and 4-bit weights add to a layer, and that of a second module.

Does not depend on memory.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.compute.layer_time import host_device_time
from orchestrator.planner.model.terms import Column, term

# moved per weight to dequantize it with elementary operations: codes, indices, fp32 values, scales
DEQUANTIZED_BYTES = 22.5


@term(
    "s",
    "products of low-rank updates and bottlenecks at gemm_rate, and adapter_traffic, forward",
    "LoRA, arXiv 2106.09685: x is read again, and its output added to the layer's",
)
def adapter_s(
    rank_tokens: Column,
    adapter_split: Column,
    adapter_whole: Column,
    adapter_traffic: Column,
    tp: Column,
    compute_bytes: Column,
    large_gemm_rate: Column,
    narrowness: Column,
    memory_rate: Column,
) -> Column:
    """Seconds of a layer's adapter, forward, (n,)."""
    work = 2 * rank_tokens * (adapter_split / tp + adapter_whole) / large_gemm_rate * narrowness
    moved = rank_tokens * adapter_traffic / tp * compute_bytes / memory_rate
    return np.asarray(work + moved)


@term("s", "weights in 4 bits of a layer x 22.5 bytes / memory_rate; in each pass")
def dequantize_s(
    quantized_attention_split: Column,
    quantized_attention_kv: Column,
    quantized_attention_whole: Column,
    quantized_dense_split: Column,
    quantized_shared_split: Column,
    tp: Column,
    memory_rate: Column,
) -> Column:
    """Seconds to dequantize a layer's weights once, (n,)."""
    split = quantized_attention_split + quantized_attention_kv + quantized_dense_split
    weights = (split + quantized_shared_split) / tp + quantized_attention_whole
    return np.asarray(weights * DEQUANTIZED_BYTES / memory_rate)


@term("s", "second_share x the forward pass of a layer: host_device_time of launch and forward")
def second_layer_s(
    second_share: Column, launch_layer_s: Column, dense_forward_s: Column, launch_overlap: Column
) -> Column:
    """Seconds of the second module per layer of the trained one, (n,)."""
    forward = host_device_time(launch_layer_s, dense_forward_s, launch_overlap)
    return np.asarray(second_share * forward)
