"""The known metric names with their units, and the known event types.

Programs may send other names, which have no unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.contracts.catalog.ratio_bins import RATIO_BINS

_MEMORY = (
    "params",
    "reference",
    "grads",
    "optimizer",
    "activations",
    "kv_cache",
    "buffers",
    "other",
    "allocated",
    "reserved",
    "capacity",
)
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

METRICS: dict[str, str] = {
    "loss": "nats/token",
    "val_loss": "nats/token",
    "val_perplexity": "",
    "grad_norm": "",
    "lr": "",
    "tokens_per_s": "tokens/s",
    "tflops_per_device": "TFLOP/s",
    "mfu": "fraction",
    "hfu": "fraction",
    "step_time_s": "s",
    "data_time_s": "s",
    **{f"time/{part}_s": "s" for part in ("data", "forward", "backward", "optimizer", "other")},
    "loss_scale": "",
    "trained_tokens": "tokens",
    "response_tokens": "tokens",
    "on_policy": "",
    "generation_s": "s",
    "generation_wait_s": "s",
    "dpo/margin": "",
    "dpo/accuracy": "fraction",
    "dpo/reward_chosen": "",
    "dpo/reward_rejected": "",
    "dpo/logp_chosen": "nats",
    "dpo/logp_rejected": "nats",
    "reward/accuracy": "fraction",
    "reward/margin": "",
    "reward/chosen": "",
    "reward/rejected": "",
    "kl": "nats/token",
    "dpo/kl": "nats",
    "reward/ece": "fraction",
    **{
        f"reward/bin_{number}/{name}": unit
        for number in range(10)  # of confidences from 0.5 to 1
        for name, unit in (("pairs", "pairs"), ("accuracy", "fraction"), ("confidence", "fraction"))
    },
    "reward/mean": "",
    "reward/std": "",
    "reward/failed": "answers",
    "groups/equal": "fraction",
    "groups/std": "",
    "groups/best": "",
    "kl_coef": "",
    "entropy": "nats/token",
    "clip_fraction": "fraction",
    "response_tokens/longest": "tokens",
    "response_tokens/cut_fraction": "fraction",
    "mismatch/kl": "nats/token",
    "mismatch/ratio": "",
    "mismatch/outside": "fraction",
    "staleness": "updates",
    "staleness/longest": "updates",
    "staleness/versions": "versions",
    "staleness/interrupted": "fraction",
    **dict.fromkeys(RATIO_BINS, "fraction"),
    "value_loss": "",
    "value/error": "",
    "value/clip_fraction": "fraction",
    "value/explained_variance": "",
    "value/mean": "",
    "value/return": "",
    "value/grad_norm": "",
    "value/loss_scale": "",
    "value/skipped_updates": "updates",
    "sync_s": "s",
    "scoring_s": "s",
    "update_s": "s",
    "time/generation_s": "s",
    "skipped_updates": "updates",
    **{f"memory/{part}_bytes": "bytes" for part in _MEMORY},
    "pipeline/bubble_fraction": "fraction",
    "comm/exposed_s": "s",
    "comm/bytes": "bytes",
    **{f"comm/{kind}_bytes": "bytes" for kind in _COLLECTIVES},
    "comm/arrival_skew_s": "s",
    "device/utilization": "fraction",
    "device/power_w": "W",
    "device/temperature_c": "°C",
    "system/cpu_utilization": "fraction",
    "system/memory_bytes": "bytes",
    "system/process_memory_bytes": "bytes",
    "system/network_received_bytes_per_s": "bytes/s",
    "system/network_sent_bytes_per_s": "bytes/s",
    "inference/ttft_s": "s",
    "inference/tpot_s": "s",
    "inference/score_s": "s",
    "inference/scores_per_s": "scores/s",
    "inference/host_s": "s",
    "inference/tokens_per_s": "tokens/s",
    "inference/running": "requests",
    "inference/waiting": "requests",
    "inference/kv_blocks_used": "blocks",
    "inference/accepted_per_step": "tokens",
    "inference/acceptance": "fraction",
    "inference/preemptions": "requests",
    "inference/swaps": "blocks",
    "inference/prompt_tokens": "tokens",
    "inference/shared_tokens": "tokens",
    "inference/new_tokens": "tokens",
    "inference/prefix_hit_rate": "fraction",
    "inference/prefill_share": "fraction",
    "inference/answered": "answers",
    "produce/accepted": "lines",
    "produce/rejected": "lines",
    "produce/candidates": "answers",
    "produce/prompt_tokens": "tokens",
    "produce/completion_tokens": "tokens",
    "produce/tokens_per_s": "tokens/s",
    "produce/lines_per_s": "lines/s",
    "produce/cost_usd": "USD",
}

# units by suffix, for names that are not in the table
_ENDINGS = {
    "_tokens_per_s": "tokens/s",
    "_per_s": "1/s",
    "_s": "s",
    "_ms": "ms",
    "_bytes": "bytes",
    "_fraction": "fraction",
    "_w": "W",
    "_c": "°C",
}

EVENT_TYPES = frozenset(
    {
        "state_changed",
        "loss_scale_changed",
        "overflow_skipped_step",
        "non_finite",
        "checkpoint_saved",
        "checkpoint_restored",
        "rollouts_missing",
        "rollouts_restored",
        "rollouts_sampled",
        "learning_warning",
        "value_weights_loaded",
        "rank_exited",
        "node_lost",
        "node_cordoned",
        "preflight",
        "out_of_memory",
        "straggler",
        "hang",
        "preempted",
        "resize_requested",
        "resized",
        "plan_resolved",
        "prediction_missed",
        "pipeline_timeline",
        "samples_written",
        "training_rows",
        "memory_profile",
        "profile_saved",
        "slow",
        "disk_full",
        "checkpoint_stored",
        "artifact_stored",
        "checkpoint_fetched",
        "data_fetched",
        "environment_prepared",
        "copy_dropped",
        "store_problem",
        "telemetry_dropped",
    }
)


# of preference losses by `train.dpo.loss`; a pair's log-likelihood is in nats
_LIKELIHOOD_LOSSES = ("dpo", "cdpo", "simpo", "orpo")


def loss_unit(spec: Mapping[str, Any]) -> str:
    """Unit of `loss` of a run by its spec: nats per token, or of pairs and answers.

    Losses that are not log-likelihoods (hinge, ipo, kto) have no unit.
    """
    train = spec.get("train")
    train = train if isinstance(train, Mapping) else {}
    if train.get("objective") == "reward":
        return "nats/pair"
    if train.get("objective") == "dpo":
        options = train.get("dpo")
        loss = options.get("loss", "dpo") if isinstance(options, Mapping) else "dpo"
        return "nats/pair" if loss in _LIKELIHOOD_LOSSES else ""
    return METRICS["loss"]


def run_metric_unit(name: str, spec: Mapping[str, Any]) -> str:
    """Unit of a metric of a run: as `metric_unit`, and of losses by the run's objective."""
    if name in ("loss", "val_loss") or name.startswith(("loss/", "val_loss/")):
        return loss_unit(spec)
    return metric_unit(name)


def metric_unit(name: str) -> str:
    """Unit of a metric, "" if it has none or is unknown; `loss/{source}` has the unit of `loss`,
    `val_{name}` that of the metric `name`.

    `produce/filtered/{filter}` counts the candidates that a filter rejected.
    `grad_underflow/{layer}` is the share of a layer's gradient that fp16 rounded to zero.
    `grad_norm/{layer}` and `weight_norm/{layer}` are norms of `embedding`, `layer_00` to the last
    and `head`; their squares add up to the square of the global norm.
    """
    if name in METRICS:
        return METRICS[name]
    if name.startswith("grad_underflow/"):
        return "fraction"
    if name.startswith(("grad_norm/", "weight_norm/")):
        return ""
    if name.startswith("val_") and name.removeprefix("val_") in METRICS:
        return METRICS[name.removeprefix("val_")]
    if name.startswith("produce/filtered/"):
        return METRICS["produce/candidates"]
    if name.startswith(("loss/", "val_loss/")):
        return METRICS["loss"]
    return next((unit for ending, unit in _ENDINGS.items() if name.endswith(ending)), "")
