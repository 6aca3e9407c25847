"""Memory and time of rollouts: weight sync, generation, scoring, and PPO's value model.

Each sampling device holds a full copy of the model and answers its share of the prompts; on
training devices the KV cache exists during generation only. Answers are counted at their full
length. Does not depend on rewards by rules, judges or functions.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term
from orchestrator.planner.serving.memory_terms import kv_elements_per_layer
from orchestrator.planner.serving.registry import POPE
from workers.contracts.catalog.rollout_limits import BLOCK_TOKENS, MAX_SEQUENCES


@term("devices", "rollout.devices if rollouts are separate, else those of the plan")
def sampling_devices(rollout_devices: Column, devices: Column) -> Column:
    """Devices that sample answers, (n,)."""
    return np.asarray(np.where(rollout_devices > 0, rollout_devices, devices))


@term("sequences", f"min(ceil(prompts / sampling devices) x group, max({MAX_SEQUENCES}, group))")
def rollout_sequences(
    rollout_prompts: Column, rollout_group: Column, sampling_devices: Column
) -> Column:
    """Answers that a device samples at the same time, (n,)."""
    answers = np.ceil(rollout_prompts / sampling_devices) * rollout_group
    return np.asarray(np.minimum(answers, np.maximum(MAX_SEQUENCES, rollout_group)))


@term(
    "",
    "ceil(ceil(prompts / sampling devices) x group / sequences)",
    "answers beyond the limit wait",
)
def rollout_rounds(
    rollout_prompts: Column,
    rollout_group: Column,
    rollout_sequences: Column,
    sampling_devices: Column,
) -> Column:
    """How many times a device samples this many answers, (n,)."""
    answers = np.ceil(rollout_prompts / sampling_devices) * rollout_group
    return np.asarray(np.ceil(answers / np.maximum(rollout_sequences, 1)))


@term("B", "layers x elements x compute_bytes: keys and values of one token")
def rollout_token_bytes(
    layers: Column,
    is_mla: Column,
    is_mfa: Column,
    kv_heads: Column,
    head_dim: Column,
    kv_lora: Column,
    qk_rope: Column,
    compute_bytes: Column,
) -> Column:
    """Bytes of the KV cache per token; all heads are on each device."""
    elements = kv_elements_per_layer(is_mla, is_mfa, kv_heads, head_dim, kv_lora, qk_rope)
    return np.asarray(layers * elements * compute_bytes)


@term("B", f"sequences x tokens in blocks of {BLOCK_TOKENS} x rollout_token_bytes")
def rollout_cache_bytes(
    rollout_sequences: Column, rollout_token_bytes: Column, seq_len: Column, max_seq_len: Column
) -> Column:
    """The KV cache of a generation phase on a device, (n,)."""
    tokens = np.ceil(np.minimum(seq_len + 1, max_seq_len) / BLOCK_TOKENS) * BLOCK_TOKENS
    return np.asarray(rollout_sequences * tokens * rollout_token_bytes)


@term(
    "B",
    "(1 + reward models) x parameters x compute_bytes, if answers are sampled on these devices",
    "the sampler's copy, and reward models of the policy's size",
)
def sampler_bytes(
    rollout_prompts: Column,
    rollout_devices: Column,
    reward_models: Column,
    params_total: Column,
    compute_bytes: Column,
) -> Column:
    """Weights on each training device besides the trained ones, (n,)."""
    here = (rollout_prompts > 0) & (rollout_devices == 0)
    return np.asarray(here * (1 + reward_models) * params_total * compute_bytes)


@term(
    "B",
    "sampler_bytes + what the KV cache needs beyond activations and logits",
    "the cache is freed before the updates, which need its memory for activations",
)
def rollout_bytes(
    sampler_bytes: Column,
    rollout_cache_bytes: Column,
    rollout_devices: Column,
    activations_bytes: Column,
    logits_bytes: Column,
) -> Column:
    """Memory that rollouts add to the peak, (S, n)."""
    cache = rollout_cache_bytes * (rollout_devices == 0)
    beyond = np.maximum(0.0, cache - activations_bytes - logits_bytes)
    return np.asarray(sampler_bytes + beyond)


@term(
    "s",
    "parameters x (read param_bytes + write compute_bytes) / memory; shards of a stage gather "
    "param_bytes, and stages send compute_bytes, over the links",
)
def weight_sync_s(
    rollout_prompts: Column,
    params_total: Column,
    compute_bytes: Column,
    param_bytes: Column,
    memory_bandwidth: Column,
    memory_efficiency: Column,
    params_sharded: Column,
    tp: Column,
    pp: Column,
    devices: Column,
    devices_per_node: Column,
    intra_bandwidth: Column,
    inter_bandwidth: Column,
    intra_efficiency: Column,
    inter_efficiency: Column,
) -> Column:
    """Seconds to copy the trained weights to the sampler, per iteration, (n,)."""
    copies = params_total * (param_bytes + compute_bytes) / (memory_bandwidth * memory_efficiency)
    links = np.where(
        devices > devices_per_node,
        inter_bandwidth * inter_efficiency,
        intra_bandwidth * intra_efficiency,
    )
    # a stage's ranks gather its weights, then each stage sends them to the ranks of the others
    shards = np.where(params_sharded == 1, devices / pp, tp)
    received = param_bytes / pp * (1 - 1 / shards) + compute_bytes * (1 - 1 / pp)
    return np.asarray((rollout_prompts > 0) * (copies + params_total * received / links))


@term("s", "2 x parameters x prompt tokens / (peak x gemm_efficiency); once per group", POPE)
def prefill_s(
    rollout_prompts: Column,
    rollout_new_tokens: Column,
    seq_len: Column,
    params_active: Column,
    params_lookup: Column,
    peak_flops: Column,
    gemm_efficiency: Column,
    sampling_devices: Column,
) -> Column:
    """Seconds to compute the prompts of an iteration, (n,)."""
    tokens = np.ceil(rollout_prompts / sampling_devices) * (seq_len - rollout_new_tokens)
    flops = 2 * (params_active - params_lookup) * tokens
    return np.asarray(flops / (peak_flops * gemm_efficiency))


@term(
    "s",
    "rounds x new tokens x (max(products, weights + KV cache read) + layers x launch_s)",
    POPE,
)
def decode_s(
    rollout_sequences: Column,
    rollout_rounds: Column,
    rollout_new_tokens: Column,
    rollout_token_bytes: Column,
    seq_len: Column,
    layers: Column,
    params_total: Column,
    params_active: Column,
    params_lookup: Column,
    compute_bytes: Column,
    peak_flops: Column,
    gemm_efficiency: Column,
    memory_bandwidth: Column,
    memory_efficiency: Column,
    launch_s: Column,
) -> Column:
    """Seconds to sample the answers of an iteration token by token, (n,)."""
    mean_tokens = seq_len - rollout_new_tokens / 2
    products = 2 * (params_active - params_lookup) * rollout_sequences
    read = (params_total - params_lookup) * compute_bytes
    read = read + rollout_sequences * mean_tokens * rollout_token_bytes
    token_s = np.maximum(
        products / (peak_flops * gemm_efficiency), read / (memory_bandwidth * memory_efficiency)
    )
    steps = rollout_rounds * rollout_new_tokens * (rollout_sequences > 0)
    return np.asarray(steps * (token_s + layers * launch_s))


@term("s", "(prefill_s + decode_s) / updates of an iteration")
def generation_s(prefill_s: Column, decode_s: Column, rollout_updates: Column) -> Column:
    """Seconds of sampling per update, (n,)."""
    return np.asarray((prefill_s + decode_s) / rollout_updates)


@term(
    "s",
    "(compute_s + bubble_s) / 3 x (policy is scored + value_compute_share) x minibatches / updates",
    "forward passes of policy and value model over all answers before the first update",
)
def scoring_s(
    compute_s: Column,
    bubble_s: Column,
    rollout_scores_policy: Column,
    value_compute_share: Column,
    rollout_minibatches: Column,
    rollout_updates: Column,
) -> Column:
    """Seconds per update of log-probabilities and values before the updates, (n,)."""
    passes = (compute_s + bubble_s) / 3 * (rollout_scores_policy + value_compute_share)
    return np.asarray(passes * rollout_minibatches / rollout_updates)


@term(
    "s",
    "(compute_s + exposed_comm_s + bubble_s) x value_compute_share",
    "the update of PPO's value model, which has the policy's layers and no large head",
)
def value_s(
    compute_s: Column, exposed_comm_s: Column, bubble_s: Column, value_compute_share: Column
) -> Column:
    """Seconds per update of the value model's passes, (n,)."""
    return np.asarray((compute_s + exposed_comm_s + bubble_s) * value_compute_share)


@term(
    "s",
    "generation_s; with staleness.max above 0 what exceeds the updates and scoring next to it",
)
def exposed_generation_s(
    generation_s: Column,
    rollout_overlaps: Column,
    compute_s: Column,
    exposed_comm_s: Column,
    bubble_s: Column,
    optimizer_s: Column,
    value_s: Column,
    scoring_s: Column,
) -> Column:
    """Seconds per update that training waits for answers, (n,)."""
    busy = compute_s + exposed_comm_s + bubble_s + optimizer_s + value_s + scoring_s
    beyond = np.maximum(0.0, generation_s - busy)
    return np.asarray(np.where(rollout_overlaps == 1, beyond, generation_s))


@term("s", "exposed_generation_s + scoring_s + value_s + weight_sync_s / updates of an iteration")
def rollout_s(
    exposed_generation_s: Column,
    scoring_s: Column,
    value_s: Column,
    weight_sync_s: Column,
    rollout_updates: Column,
) -> Column:
    """Seconds per update that are spent on rollouts and PPO's value model, (n,)."""
    waits = exposed_generation_s + weight_sync_s / rollout_updates
    return np.asarray(waits + scoring_s + value_s)


@term("", "min(1, generation_s / step_time_s)")
def generation_share(generation_s: Column, step_time_s: Column) -> Column:
    """Share of sampling in the time of an update, (n,)."""
    return np.asarray(np.minimum(1.0, generation_s / step_time_s))
