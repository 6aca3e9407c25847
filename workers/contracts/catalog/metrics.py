"""The known metric names with their units, and the known event types.

Programs may send other names, which have no unit.
"""

from __future__ import annotations

_MEMORY = (
    "params",
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
    **{f"memory/{part}_bytes": "bytes" for part in _MEMORY},
    "pipeline/bubble_fraction": "fraction",
    "comm/exposed_s": "s",
    "comm/bytes": "bytes",
    **{f"comm/{kind}_bytes": "bytes" for kind in _COLLECTIVES},
    "comm/arrival_skew_s": "s",
    "device/utilization": "fraction",
    "device/power_w": "W",
    "device/temperature_c": "°C",
    "inference/ttft_s": "s",
    "inference/tpot_s": "s",
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
        "rank_exited",
        "node_lost",
        "out_of_memory",
        "straggler",
        "hang",
        "preempted",
        "plan_resolved",
        "prediction_missed",
        "pipeline_timeline",
        "samples_written",
        "memory_profile",
        "profile_saved",
        "slow",
    }
)


def metric_unit(name: str) -> str:
    """Unit of a metric, "" if it has none or is unknown; `loss/{source}` has the unit of `loss`.

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
    if name.startswith(("loss/", "val_loss/")):
        return METRICS["loss"]
    return next((unit for ending, unit in _ENDINGS.items() if name.endswith(ending)), "")
