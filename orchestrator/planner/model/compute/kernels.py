"""Compute time of one layer and micro-batch: products, attention, element-wise kernels, launches.

A roofline with efficiencies as parameters: products saturate with tokens and with the sharded
width, other kernels run at memory bandwidth, and the host may be slower than the device. Does not
depend on communication.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import PRECISION
from orchestrator.planner.model.terms import Column, term


@term(
    "FLOP/s",
    "peak_flops x gemm_efficiency (x fp8_efficiency)",
    "casts and scales keep fp8 further from its peak",
)
def large_gemm_rate(
    peak_flops: Column, gemm_efficiency: Column, fp8_efficiency: Column, precision: Column
) -> Column:
    """Achieved rate of large matrix products."""
    return np.asarray(
        peak_flops * gemm_efficiency * np.where(precision == PRECISION["fp8"], fp8_efficiency, 1.0)
    )


@term(
    "FLOP/s",
    "large_gemm_rate / (1 + gemm_half_tokens / rank_tokens)",
    "small products leave multiprocessors idle and pay their start-up",
)
def gemm_rate(large_gemm_rate: Column, gemm_half_tokens: Column, rank_tokens: Column) -> Column:
    """Achieved rate of matrix products at the tokens of a micro-batch."""
    return np.asarray(large_gemm_rate / (1 + gemm_half_tokens / rank_tokens))


@term("", "1 + gemm_half_width x tp / hidden", "products of narrow shards are slower")
def narrowness(gemm_half_width: Column, tp: Column, hidden: Column) -> Column:
    """Slowdown of products with narrow shards."""
    return np.asarray(1 + gemm_half_width * tp / hidden)


@term("s", "2 x rank_tokens x params on one tensor rank / gemm_rate x narrowness")
def attention_products_s(
    rank_tokens: Column, attention_params: Column, gemm_rate: Column, narrowness: Column
) -> Column:
    """Seconds of attention's projections, forward."""
    return np.asarray(2 * rank_tokens * attention_params / gemm_rate * narrowness)


@term("s", "2 x rank_tokens x params_dense_split / tp / gemm_rate x narrowness")
def dense_products_s(
    rank_tokens: Column,
    params_dense_split: Column,
    tp: Column,
    gemm_rate: Column,
    narrowness: Column,
) -> Column:
    """Seconds of a dense MLP's products, forward."""
    return np.asarray(2 * rank_tokens * params_dense_split / tp / gemm_rate * narrowness)


@term(
    "s",
    "2 x rank_tokens x (top_k experts, shared ones, router) / tp / rate, with few "
    "tokens per expert",
    "grouped products: rank_tokens x top_k x ep / experts tokens per expert",
)
def moe_products_s(
    rank_tokens: Column,
    params_expert_split: Column,
    params_shared_split: Column,
    params_router: Column,
    top_k: Column,
    capacity: Column,
    experts: Column,
    ep: Column,
    tp: Column,
    gemm_rate: Column,
    narrowness: Column,
    large_gemm_rate: Column,
    gemm_half_tokens: Column,
) -> Column:
    """Seconds of the products of experts, shared experts and router, forward."""
    routed = top_k * np.maximum(capacity, 1)
    expert_tokens = rank_tokens * routed * ep / np.maximum(experts, 1)
    slow = 1 + gemm_half_tokens / np.maximum(expert_tokens, 1)
    work = 2 * rank_tokens * routed * params_expert_split / tp / large_gemm_rate * slow
    return (
        np.asarray(work + 2 * rank_tokens * (params_shared_split / tp + params_router) / gemm_rate)
        * narrowness
    )


@term(
    "keys",
    "mean keys per query: seq_len, half with a causal kernel, less in a window",
)
def keys_per_query(seq_len: Column, window: Column, flash: Column) -> Column:
    """Mean number of keys per query."""
    seen = np.where(window > 0, np.minimum(window, seq_len), seq_len)
    return np.asarray(np.where(flash > 0, seen * (1 - seen / (2 * seq_len)), seq_len))


@term(
    "",
    "1 if Megatron's fused softmax cannot run: heads x micro_batch on a rank not a multiple of 4",
    "Megatron-LM megatron/model/fused_softmax.py, is_kernel_available",
)
def softmax_falls_back(
    flash: Column, fused_softmax: Column, heads: Column, tp: Column, micro_batch: Column
) -> Column:
    """1 if the softmax runs as several kernels."""
    odd = (heads / tp * micro_batch) % 4 != 0
    return np.asarray((1 - flash) * np.maximum(1 - fused_softmax, odd))


@term(
    "s",
    "4 x rank_tokens x keys_per_query x attention_width / tp / rate; unfused plus the scores' "
    "traffic",
    "FlashAttention (arXiv 2205.14135) keeps scores on chip; else each kernel reads and writes "
    "them",
)
def attention_core_s(
    rank_tokens: Column,
    keys_per_query: Column,
    attention_width: Column,
    tp: Column,
    flash: Column,
    heads: Column,
    wide_peak_flops: Column,
    attention_efficiency: Column,
    softmax_falls_back: Column,
    dropout: Column,
    memory_rate: Column,
) -> Column:
    """Seconds of scores, softmax and weighted values, forward."""
    products = (
        4
        * rank_tokens
        * keys_per_query
        * attention_width
        / tp
        / (wide_peak_flops * attention_efficiency)
    )
    scores = rank_tokens * keys_per_query * heads / tp
    traffic = (8 + 5 * (dropout > 0) + 12 * softmax_falls_back) * scores * (1 - flash)
    return np.asarray(products + traffic / memory_rate)


@term("B/s", "memory_bandwidth x memory_efficiency")
def memory_rate(memory_bandwidth: Column, memory_efficiency: Column) -> Column:
    """Achieved memory bandwidth."""
    return np.asarray(memory_bandwidth * memory_efficiency)


@term(
    "B",
    "reads and writes of a layer's element-wise kernels, forward",
    "two norms, residual adds, dropouts; projections' layout changes; activation of the MLP",
)
def elementwise_bytes(
    rank_tokens: Column,
    hidden: Column,
    compute_bytes: Column,
    one_norm_kernel: Column,
    dropout: Column,
    biased: Column,
    sequence_parallel: Column,
    tp: Column,
    attention_width: Column,
    ffn: Column,
    gated: Column,
    one_gate_kernel: Column,
    traffic_factor: Column,
    compiled: Column,
    compiled_traffic: Column,
) -> Column:
    """Bytes moved by a layer's element-wise kernels, forward."""
    replicated = (10 + 6 * (1 - one_norm_kernel) + 2 * (dropout > 0) + 2 * biased) * hidden
    replicated = replicated / (1 + sequence_parallel * (tp - 1))
    split = (
        4 * attention_width + (2 + gated * (1 + 2 * (1 - one_gate_kernel)) + biased) * ffn
    ) / tp
    factor = traffic_factor * np.where(compiled > 0, compiled_traffic, 1.0)
    return np.asarray(rank_tokens * compute_bytes * factor * (replicated + split))


@term("s", "launch_s x (1 + 0.3 if the softmax falls back to several kernels)")
def launch_layer_s(launch_s: Column, softmax_falls_back: Column) -> Column:
    """Host seconds to launch a layer's forward pass."""
    return np.asarray(launch_s * (1 + 0.3 * softmax_falls_back))


@term("s", "elementwise_bytes / memory_rate")
def elementwise_s(elementwise_bytes: Column, memory_rate: Column) -> Column:
    """Seconds of a layer's element-wise kernels, forward."""
    return np.asarray(elementwise_bytes / memory_rate)


@term(
    "s",
    "attention_products_s + dense_products_s + attention_core_s + elementwise_s + adapter_s + "
    "dequantize_s",
)
def dense_forward_s(
    attention_products_s: Column,
    dense_products_s: Column,
    attention_core_s: Column,
    elementwise_s: Column,
    adapter_s: Column,
    dequantize_s: Column,
) -> Column:
    """Device seconds of a dense layer, forward."""
    products = attention_products_s + dense_products_s + (adapter_s + dequantize_s)
    return np.asarray(products + attention_core_s + elementwise_s)


@term(
    "s",
    "block_backward x products + 2 (2.5 if fused) x attention_core_s + 1.5 x elementwise_s + 2 x "
    "adapter_s + dequantize_s",
    "two products per trained weight, one per frozen weight; a fused attention backward is 5 "
    "products, the forward 2 (arXiv 2205.14135)",
)
def dense_backward_s(
    attention_products_s: Column,
    dense_products_s: Column,
    attention_core_s: Column,
    elementwise_s: Column,
    flash: Column,
    block_backward: Column,
    adapter_s: Column,
    dequantize_s: Column,
) -> Column:
    """Device seconds of a dense layer, backward."""
    products = block_backward * (attention_products_s + dense_products_s)
    products = products + (2 * adapter_s + dequantize_s)
    return np.asarray(products + (2 + 0.5 * flash) * attention_core_s + 1.5 * elementwise_s)


@term(
    "s",
    "moe_products_s + the traffic of permuting tokens in both directions",
    "two gathers of routed tokens, in and out",
)
def moe_mlp_s(
    moe_products_s: Column, routed_bytes: Column, memory_rate: Column, moe_layers: Column
) -> Column:
    """Device seconds of an MoE layer's MLP, forward."""
    return np.asarray((moe_layers > 0) * (moe_products_s + 8 * routed_bytes / memory_rate))


@term(
    "",
    "launches of an MoE layer relative to a dense one",
    "router, permutation, grouped products: about twice",
)
def moe_launches(experts: Column) -> Column:
    """Launches of an MoE layer relative to a dense one."""
    return np.asarray(1 + 1.0 * (experts > 0))


@term("tokens", "rank_tokens x head_share")
def head_tokens(rank_tokens: Column, head_share: Column) -> Column:
    """Tokens of a micro-batch whose logits are computed, on one device."""
    return np.asarray(rank_tokens * head_share)


@term(
    "s",
    "products of the head: 2 (1 + head_backward) x head_tokens x hidden x head_rows / rate",
    "tensor cores need rows of 8 numbers: an odd vocabulary on one rank is slower by "
    "unaligned_head",
)
def head_products_s(
    head_tokens: Column,
    hidden: Column,
    head_rows: Column,
    wide_peak_flops: Column,
    head_efficiency: Column,
    vocab: Column,
    tp: Column,
    unaligned_head: Column,
    head_backward: Column,
) -> Column:
    """Seconds of the head's products, both passes."""
    odd = (vocab % 8 != 0) & (tp == 1)
    work = (
        2
        * (1 + head_backward)
        * head_tokens
        * hidden
        * head_rows
        / (wide_peak_flops * head_efficiency)
    )
    return np.asarray(work * np.where(odd, unaligned_head, 1.0))


@term(
    "s",
    "logits' traffic of the loss: head_tokens x head_rows x bytes x head_traffic / memory_rate; "
    "10 bytes per logit if fused or without stored logits, else 24 (fp32 copies)",
)
def loss_s(
    head_tokens: Column,
    head_rows: Column,
    fused_cross_entropy: Column,
    loss_without_logits: Column,
    head_traffic: Column,
    memory_rate: Column,
) -> Column:
    """Seconds of the loss, both passes."""
    fused = np.maximum(fused_cross_entropy, loss_without_logits)
    return np.asarray(head_tokens * head_rows * (24 - 14 * fused) * head_traffic / memory_rate)


@term("s", "head_products_s + loss_s, both passes")
def head_s(head_products_s: Column, loss_s: Column) -> Column:
    """Seconds of head and loss, both passes."""
    return np.asarray(head_products_s + loss_s)


@term("s", "lookup, dropout, and writing the full gradient of the table, both passes")
def embedding_s(
    state_bytes: Column,
    local_vocab: Column,
    hidden: Column,
    compute_bytes: Column,
    memory_rate: Column,
) -> Column:
    """Seconds of the embedding, both passes."""
    return np.asarray((10 * state_bytes + 3 * local_vocab * hidden * compute_bytes) / memory_rate)
