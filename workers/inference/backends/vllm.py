"""vLLM's command line from a serve run, and its metrics by Orrery's names.

Flags and Prometheus names: docs.vllm.ai, server arguments and production metrics. Starts nothing.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from workers.contracts.specs.model import ModelSource
from workers.inference.spec_loading import InferenceRun
from workers.models.errors import WeightsError
from workers.models.weights.locations import locate_weights
from workers.runtime.exit_codes import UserError

MODULE = "vllm.entrypoints.openai.api_server"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LINE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})?\s+(\S+)")
_NOW = {
    "inference/running": ("num_requests_running",),
    "inference/waiting": ("num_requests_waiting",),
}
_TOTALS = {
    "inference/new_tokens": ("generation_tokens_total",),
    "inference/prompt_tokens": ("prompt_tokens_total",),
    "inference/preemptions": ("num_preemptions_total",),
    "inference/shared_tokens": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
}
_MEANS = {  # histograms: sum and count; newest name first
    "inference/ttft_s": ("time_to_first_token_seconds",),
    "inference/tpot_s": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
}


def check(run: InferenceRun) -> Path:
    """The folder of the weights.

    Raises UserError for options that vLLM does not support, or if it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        message = "vllm is not installed on this node"
        raise UserError(
            f"serve.backend: {message}; install it in the environment of the workers, or try "
            "backend "
            "orrery"
        )
    for name in ("quantize", "draft"):
        if getattr(run.serve, name) is not None:
            raise UserError(
                f"serve.{name}: not supported with backend vllm; leave it out, or try backend "
                "orrery"
            )
    if run.plan.world_size > 1:
        raise UserError("plan: backend vllm runs one server on one device. Use dp, tp and pp 1.")
    if not isinstance(run.spec.model, ModelSource):
        raise UserError('model: vllm needs existing weights. Use {"path": "DIR"}.')
    try:
        return locate_weights(run.spec.model)
    except WeightsError as error:
        raise UserError(f"model: {error}") from None


def command(run: InferenceRun, weights: Path, *, port: int, name: str) -> list[str]:
    """The server's command line; it listens on loopback only, the rank forwards requests."""
    body = run.serve
    arguments = [
        sys.executable,
        "-m",
        MODULE,
        "--model",
        str(weights),
        "--served-model-name",
        name,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        _DTYPES[run.plan.precision],
        "--max-num-seqs",
        str(body.max_seqs),
        "--max-num-batched-tokens",
        str(body.max_batch_tokens),
        "--enable-prefix-caching",
    ]
    if body.kv_blocks is not None:
        arguments += ["--num-gpu-blocks-override", str(body.kv_blocks)]
    return arguments


def read_metrics(text: str) -> dict[str, float]:
    """Sums over labels of a Prometheus page by name without `vllm:`, and `blocks` of the cache."""
    metrics: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if matched := _LINE.match(line):
            name, labels, value = matched.groups()
            metrics[name[5:]] += float(value)
            if name == "vllm:cache_config_info" and (
                blocks := re.search(r'num_gpu_blocks="(\d+)"', labels or "")
            ):
                metrics["blocks"] = float(blocks[1])
    return dict(metrics)


def point_values(
    now: Mapping[str, float], before: Mapping[str, float], *, seconds: float
) -> dict[str, float]:
    """A point's values; means and rates are over the time since `before`."""
    values = {ours: now[name] for ours, names in _NOW.items() for name in names if name in now}
    for ours, names in _TOTALS.items():
        if name := next((candidate for candidate in names if candidate in now), None):
            values[ours] = now[name]
    if (
        used := now.get("kv_cache_usage_perc", now.get("gpu_cache_usage_perc"))
    ) is not None and "blocks" in now:
        values["inference/kv_blocks_used"] = round(used * now["blocks"])

    def since(name: str) -> float:
        return now.get(name, 0.0) - before.get(name, 0.0)

    values["inference/tokens_per_s"] = since("generation_tokens_total") / seconds
    for ours, names in _MEANS.items():
        name = next((n for n in names if f"{n}_count" in now), names[0])
        if count := since(f"{name}_count"):
            values[ours] = since(f"{name}_sum") / count
    computed = since("prompt_tokens_total") + since("generation_tokens_total")
    if computed:
        values["inference/prefill_share"] = since("prompt_tokens_total") / computed
    if queries := since("prefix_cache_queries_total"):
        values["inference/prefix_hit_rate"] = since("prefix_cache_hits_total") / queries
    return values
