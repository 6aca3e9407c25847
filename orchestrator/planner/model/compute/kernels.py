"""How long a device works on one micro-batch in one layer: products, attention, element-wise
kernels, launches.

A roofline whose efficiencies are parameters: products saturate with tokens and with the sharded
width, what is not a
product runs at memory bandwidth, and the host may be slower than the device. Knows no other device.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.inputs import PRECISION
from orchestrator.planner.model.terms import Column, term


@term(
    "FLOP/s",
    "peak_flops x gemm_efficiency (x fp8_efficiency)",
    "casts and scales keep fp8 further from its peak",
)
def large_gemm_rate(
    peak_flops: Column, gemm_efficiency: Column, fp8_efficiency: Column, precision: Column
) -> Column:
    return np.asarray(
        peak_flops * gemm_efficiency * np.where(precision == PRECISION["fp8"], fp8_efficiency, 1.0)
    )


@term(
    "FLOP/s",
    "large_gemm_rate / (1 + gemm_half_tokens / rank_tokens)",
    "small products leave multiprocessors idle and pay their start-up",
)
def gemm_rate(large_gemm_rate: Column, gemm_half_tokens: Column, rank_tokens: Column) -> Column:
    return np.asarray(large_gemm_rate / (1 + gemm_half_tokens / rank_tokens))


@term("", "1 + gemm_half_width x tp / hidden", "products of narrow shards are slower")
def narrowness(gemm_half_width: Column, tp: Column, hidden: Column) -> Column:
    return np.asarray(1 + gemm_half_width * tp / hidden)


@term("s", "2 x rank_tokens x params on one tensor rank / gemm_rate x narrowness")
def attention_products_s(
    rank_tokens: Column, attention_params: Column, gemm_rate: Column, narrowness: Column
) -> Column:
    return np.asarray(2 * rank_tokens * attention_params / gemm_rate * narrowness)


@term("s", "2 x rank_tokens x params_dense_split / tp / gemm_rate x narrowness")
def dense_products_s(
    rank_tokens: Column,
    params_dense_split: Column,
    tp: Column,
    gemm_rate: Column,
    narrowness: Column,
) -> Column:
    return np.asarray(2 * rank_tokens * params_dense_split / tp / gemm_rate * narrowness)


@term(
    "s",
    "2 x rank_tokens x (top_k experts, shared ones, router) / tp / rate, each expert's tokens "
    "being few",
    "grouped products: rank_tokens x top_k x ep / experts tokens an expert",
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
    routed = top_k * np.maximum(capacity, 1)
    each = rank_tokens * routed * ep / np.maximum(experts, 1)
    slow = 1 + gemm_half_tokens / np.maximum(each, 1)
    work = 2 * rank_tokens * routed * params_expert_split / tp / large_gemm_rate * slow
    return (
        np.asarray(work + 2 * rank_tokens * (params_shared_split / tp + params_router) / gemm_rate)
        * narrowness
    )


@term(
    "keys",
    "mean keys a query meets: seq_len, half of it where a causal kernel skips, less in a window",
)
def keys_met(seq_len: Column, window: Column, flash: Column) -> Column:
    seen = np.where(window > 0, np.minimum(window, seq_len), seq_len)
    return np.asarray(np.where(flash > 0, seen * (1 - seen / (2 * seq_len)), seq_len))


@term(
    "",
    "1 where Megatron's fused softmax cannot run: heads x micro_batch on a rank not a multiple of "
    "4",
    "Megatron-LM megatron/model/fused_softmax.py, is_kernel_available",
)
def softmax_falls_back(
    flash: Column, fused_softmax: Column, heads: Column, tp: Column, micro_batch: Column
) -> Column:
    odd = (heads / tp * micro_batch) % 4 != 0
    return np.asarray((1 - flash) * np.maximum(1 - fused_softmax, odd))


@term(
    "s",
    "4 x rank_tokens x keys_met x attention_width / tp / rate; unfused also the scores' traffic",
    "FlashAttention (arXiv 2205.14135) keeps scores on chip; else they are written and read by "
    "each kernel",
)
def attention_core_s(
    rank_tokens: Column,
    keys_met: Column,
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
    products = (
        4 * rank_tokens * keys_met * attention_width / tp / (wide_peak_flops * attention_efficiency)
    )
    scores = rank_tokens * keys_met * heads / tp
    traffic = (8 + 5 * (dropout > 0) + 12 * softmax_falls_back) * scores * (1 - flash)
    return np.asarray(products + traffic / memory_rate)


@term("B/s", "memory_bandwidth x memory_efficiency")
def memory_rate(memory_bandwidth: Column, memory_efficiency: Column) -> Column:
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
) -> Column:
    whole = (10 + 6 * (1 - one_norm_kernel) + 2 * (dropout > 0) + 2 * biased) * hidden
    whole = whole / (1 + sequence_parallel * (tp - 1))
    split = (
        4 * attention_width + (2 + gated * (1 + 2 * (1 - one_gate_kernel)) + biased) * ffn
    ) / tp
    return np.asarray(rank_tokens * compute_bytes * traffic_factor * (whole + split))


@term("s", "launch_s x (1 + 0.3 where the softmax falls back to several kernels)")
def launch_layer_s(launch_s: Column, softmax_falls_back: Column) -> Column:
    return np.asarray(launch_s * (1 + 0.3 * softmax_falls_back))


@term("s", "elementwise_bytes / memory_rate")
def elementwise_s(elementwise_bytes: Column, memory_rate: Column) -> Column:
    return np.asarray(elementwise_bytes / memory_rate)


@term("s", "attention_products_s + dense_products_s + attention_core_s + elementwise_s")
def dense_forward_s(
    attention_products_s: Column,
    dense_products_s: Column,
    attention_core_s: Column,
    elementwise_s: Column,
) -> Column:
    return np.asarray(attention_products_s + dense_products_s + attention_core_s + elementwise_s)


@term(
    "s",
    "2 x products + 2 (2.5 where fused) x attention_core_s + 1.5 x elementwise_s",
    "two products per weight; a fused attention backward is 5 products against 2 (arXiv "
    "2205.14135)",
)
def dense_backward_s(
    attention_products_s: Column,
    dense_products_s: Column,
    attention_core_s: Column,
    elementwise_s: Column,
    flash: Column,
) -> Column:
    products = 2 * (attention_products_s + dense_products_s)
    return np.asarray(products + (2 + 0.5 * flash) * attention_core_s + 1.5 * elementwise_s)


@term(
    "s",
    "moe_products_s + the traffic of permuting tokens there and back",
    "two gathers of routed tokens, in and out",
)
def moe_mlp_s(
    moe_products_s: Column, routed_bytes: Column, memory_rate: Column, moe_layers: Column
) -> Column:
    return np.asarray((moe_layers > 0) * (moe_products_s + 8 * routed_bytes / memory_rate))


@term(
    "",
    "launches of a routing layer against a dense one",
    "router, permutation, grouped products: about twice",
)
def moe_launches(experts: Column) -> Column:
    return np.asarray(1 + 1.0 * (experts > 0))


@term(
    "s",
    "products of the head, forward and backward, 6 x rank_tokens x hidden x local_vocab / rate",
    "tensor cores want rows of 8 numbers: an odd vocabulary on one rank is slower by "
    "unaligned_head",
)
def head_products_s(
    rank_tokens: Column,
    hidden: Column,
    local_vocab: Column,
    wide_peak_flops: Column,
    head_efficiency: Column,
    vocab: Column,
    tp: Column,
    unaligned_head: Column,
) -> Column:
    odd = (vocab % 8 != 0) & (tp == 1)
    work = 6 * rank_tokens * hidden * local_vocab / (wide_peak_flops * head_efficiency)
    return np.asarray(work * np.where(odd, unaligned_head, 1.0))


@term(
    "s",
    "logits' traffic of the loss, 10 bytes a logit where fused or without whole logits, else 24 "
    "(fp32 copies)",
)
def loss_s(
    rank_tokens: Column,
    local_vocab: Column,
    fused_cross_entropy: Column,
    loss_without_logits: Column,
    head_traffic: Column,
    memory_rate: Column,
) -> Column:
    fused = np.maximum(fused_cross_entropy, loss_without_logits)
    return np.asarray(rank_tokens * local_vocab * (24 - 14 * fused) * head_traffic / memory_rate)


@term("s", "head_products_s + loss_s, both passes")
def head_s(head_products_s: Column, loss_s: Column) -> Column:
    return np.asarray(head_products_s + loss_s)


@term("s", "looking up, dropout, and writing the table's whole gradient, both passes")
def embedding_s(
    state_bytes: Column,
    local_vocab: Column,
    hidden: Column,
    compute_bytes: Column,
    memory_rate: Column,
) -> Column:
    return np.asarray((10 * state_bytes + 3 * local_vocab * hidden * compute_bytes) / memory_rate)
