"""Default parameters by device generation and framework that differ from the general defaults.

Fitted once to published runs (named in docs/planner-accuracy.md) and rounded; a calibration
replaces them. A pair without published runs has the effects that `priors` combines; on Volta and
CPUs, the values of the generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.planner.model.columns.codes import PRECISION, RECOMPUTE, SCHEDULE
from orchestrator.planner.model.coverage import RANGES, Coverage
from orchestrator.planner.model.generations import generation
from orchestrator.planner.model.memory.profiles import MEMORY_PROFILES
from orchestrator.planner.model.priors import PUBLISHED
from workers.contracts.catalog.devices import Device

_GENERATIONS: dict[str, dict[str, float]] = {
    "volta": {
        "gemm_efficiency": 0.75,
        "gemm_half_tokens": 400,
        "gemm_half_width": 300,  # no published run of Volta shows the 60 of Ampere's roofline
        "attention_efficiency": 0.35,
        "intra_efficiency": 0.6,
    },
    "ampere": {
        "gemm_efficiency": 0.84,
        "gemm_half_tokens": 500,
        "gemm_half_width": 220,
        "attention_efficiency": 0.40,
        "memory_efficiency": 0.80,
        "head_efficiency": 0.60,
    },
    "hopper": {
        "gemm_efficiency": 0.76,
        "gemm_half_tokens": 900,
        "gemm_half_width": 450,
        "attention_efficiency": 0.35,
        "memory_efficiency": 0.75,
        "head_efficiency": 0.55,
    },
    "blackwell": {
        "gemm_efficiency": 0.55,
        "gemm_half_tokens": 500,
        "gemm_half_width": 350,
        "attention_efficiency": 0.38,
        "memory_efficiency": 0.75,
        "head_efficiency": 0.50,
        "launch_s": 6e-4,
    },
    # fp32 products of oneDNN on one Zen 5 core, relative to 512 x 512 x 512: 0.95 in a block, 0.87
    # in a head of 32,000
    "cpu": {
        "gemm_efficiency": 0.90,
        "gemm_half_tokens": 20,
        "gemm_half_width": 20,
        "attention_efficiency": 0.30,
        "head_efficiency": 0.78,
        "launch_s": 7e-4,
        "launch_overlap": 0.9,
        "intra_latency_s": 1e-4,
        "microbatch_s": 2e-3,
        "dp_overlap": 0.05,  # gloo's threads run on the cores that compute
    },
}
_PAIRS: dict[tuple[str, str], dict[str, float]] = {
    # 1,440 + 109 runs of arXiv 2312.12391 and 26 of BLOOM's (bigscience-workshop): 2022 kernels,
    # slow hosts
    ("megatron-deepspeed", "ampere"): {
        "attention_efficiency": 0.436,
        "gemm_efficiency": 0.92,
        "gemm_half_tokens": 115,
        "gemm_half_width": 59,
        "head_efficiency": 0.51,
        "head_traffic": 1.05,
        "inter_efficiency": 0.59,
        "inter_latency_s": 2.4e-5,
        "intra_efficiency": 1.0,
        "intra_latency_s": 7.5e-5,
        "jitter": 0.031,
        "launch_overlap": 0.18,
        "launch_s": 1e-3,
        "memory_efficiency": 1.0,
        "microbatch_s": 7e-4,
        "optimizer_efficiency": 1.0,
        "p2p_exposed": 0.58,
        "step_overhead_s": 3.6e-3,
        "tp_exposed": 0.4,
        "traffic_factor": 0.54,
        "unaligned_head": 1.47,
    },
    # arXiv 2205.05198, table 5, and 2104.04473, table 1
    ("megatron", "ampere"): {
        "attention_efficiency": 0.62,
        "gemm_efficiency": 0.994,
        "gemm_half_tokens": 300,
        "gemm_half_width": 223,
        "head_efficiency": 0.963,
        "head_traffic": 0.97,
        "inter_efficiency": 0.643,
        "inter_latency_s": 3.2e-5,
        "intra_latency_s": 1.5e-5,
        "launch_overlap": 0.17,
        "launch_s": 4.5e-4,
        "memory_efficiency": 1.0,
        "microbatch_s": 8e-4,
        "optimizer_efficiency": 0.79,
        "p2p_exposed": 1.71,
        "step_overhead_s": 4.6e-3,
        "tp_exposed": 0.906,
        "traffic_factor": 0.754,
    },
    # Megatron-LM 0.14 as measured by SimuMax
    ("megatron", "blackwell"): {
        "attention_efficiency": 0.378,
        "gemm_efficiency": 0.495,
        "gemm_half_tokens": 354,
        "gemm_half_width": 271,
        "head_efficiency": 0.50,
        "intra_latency_s": 1.9e-5,
        "launch_s": 8e-4,
        "step_overhead_s": 5.4e-3,
        "tp_exposed": 0.66,
    },
    # mosaicml/llm-foundry, scripts/train/benchmarking
    ("llm-foundry", "ampere"): {
        "attention_efficiency": 0.312,
        "gemm_efficiency": 0.842,
        "gemm_half_tokens": 980,
        "gemm_half_width": 218,
        "head_efficiency": 0.377,
        "head_traffic": 0.91,
        "jitter": 8.6e-3,
        "launch_overlap": 0.40,
        "launch_s": 1.07e-3,
        "memory_efficiency": 0.787,
        "optimizer_efficiency": 0.72,
        "step_overhead_s": 0.0218,
        "traffic_factor": 0.934,
    },
    ("llm-foundry", "hopper"): {
        "attention_efficiency": 0.18,
        "fp8_efficiency": 0.753,
        "gemm_efficiency": 0.752,
        "gemm_half_tokens": 1190,
        "gemm_half_width": 488,
        "head_efficiency": 0.525,
        "head_traffic": 1.04,
        "inter_efficiency": 0.816,
        "intra_efficiency": 0.73,
        "jitter": 9.4e-3,
        "launch_overlap": 0.55,
        "launch_s": 1.47e-3,
        "memory_efficiency": 0.734,
        "optimizer_efficiency": 0.61,
        "step_overhead_s": 9.7e-3,
    },
    # 13 runs of torchtitan's benchmark pages on H100 at 500 W; what they leave open (asynchronous
    # tensor parallelism, fp8 scales) is between its settings
    ("fsdp2", "hopper"): {
        "attention_efficiency": 0.195,
        "fp8_efficiency": 0.90,
        "gemm_efficiency": 0.69,
        "gemm_half_tokens": 3100,
        "gemm_half_width": 153,
        "head_efficiency": 0.44,
        "head_traffic": 2.1,
        "inter_efficiency": 0.75,
        "intra_efficiency": 0.85,
        "jitter": 6.3e-3,
        "launch_overlap": 0.34,
        "launch_s": 9e-4,
        "memory_efficiency": 0.73,
        "overlap_slowdown": 0.08,
        "tp_exposed": 0.5,
        "traffic_factor": 2.06,
    },
}


@dataclass(frozen=True)
class Published:
    """The runs that a pair's values are based on: their log error and what they cover."""

    spread: float
    coverage: Coverage


_BF16, _FP8 = PRECISION["bf16"], PRECISION["fp8"]
_NONE, _SELECTIVE, _FULL = RECOMPUTE["none"], RECOMPUTE["selective"], RECOMPUTE["full"]
_1F1B, _INTERLEAVED = SCHEDULE["1f1b"], SCHEDULE["interleaved_1f1b"]


def _published(
    spread: float,
    *,
    recompute: tuple[int, ...],
    flash: bool,
    schedule: tuple[int, ...] = (_1F1B,),
    precision: tuple[int, ...] = (_BF16,),
    **ranges: tuple[float, float],
) -> Published:
    """Ranges default to those of one device: (1, 1)."""
    named = {name: list(ranges.get(name, (1.0, 1.0))) for name in RANGES}
    kinds = {
        "attention": [int(flash)],
        "experts": [0],
        "recompute": [*recompute],
        "offload": [0],
        "schedule": [*schedule],
        "precision": [*precision],
    }
    return Published(spread, Coverage(named, kinds))


_BASES: dict[tuple[str, str], Published] = {
    ("megatron-deepspeed", "ampere"): _published(
        0.08,
        recompute=(_FULL,),
        flash=False,
        hidden=(1024, 14336),
        layers=(12, 106),
        seq_len=(1024, 2048),
        rank_tokens=(1024, 131072),
        devices=(2, 512),
        tp=(1, 16),
        pp=(1, 48),
        dp=(1, 64),
        zero=(0, 1),
    ),
    ("megatron", "ampere"): _published(
        0.08,
        recompute=(_SELECTIVE, _FULL),
        flash=False,
        schedule=(_1F1B, _INTERLEAVED),
        hidden=(3072, 20480),
        layers=(30, 105),
        seq_len=(2048, 2048),
        rank_tokens=(2048, 2048),
        devices=(64, 2520),
        tp=(2, 8),
        pp=(1, 35),
        dp=(1, 32),
        zero=(0, 0),
    ),
    ("megatron", "blackwell"): _published(
        0.05,
        recompute=(_NONE,),
        flash=True,
        hidden=(8192, 16384),
        layers=(4, 12),
        seq_len=(4096, 131072),
        rank_tokens=(4096, 32768),
        devices=(8, 8),
        tp=(1, 8),
        pp=(1, 2),
        dp=(1, 4),
        cp=(1, 4),
        zero=(1, 1),
    ),
    ("llm-foundry", "ampere"): _published(
        0.036,
        recompute=(_NONE, _FULL),
        flash=True,
        hidden=(768, 8192),
        layers=(12, 80),
        seq_len=(512, 32768),
        rank_tokens=(4096, 65536),
        devices=(8, 128),
        dp=(8, 128),
        zero=(3, 3),
    ),
    ("llm-foundry", "hopper"): _published(
        0.034,
        recompute=(_NONE, _FULL),
        flash=True,
        precision=(_BF16, _FP8),
        hidden=(1536, 8192),
        layers=(24, 80),
        seq_len=(512, 65536),
        rank_tokens=(4096, 98304),
        devices=(8, 512),
        dp=(8, 512),
        zero=(2, 3),
    ),
    ("fsdp2", "hopper"): _published(
        0.09,
        recompute=(_SELECTIVE, _FULL),
        flash=True,
        precision=(_BF16, _FP8),
        schedule=(_1F1B, _INTERLEAVED),
        hidden=(4096, 16384),
        layers=(32, 126),
        seq_len=(8192, 262144),
        rank_tokens=(8192, 131072),
        devices=(8, 512),
        tp=(1, 8),
        pp=(1, 8),
        cp=(1, 8),
        dp=(1, 128),
        zero=(3, 3),
    ),
}


def profile(framework: str, device: Device) -> dict[str, float]:
    """Values that differ from the parameters' own defaults; the narrower entry wins.

    A pair without runs gets what the published runs of its device generation and its
    framework have in common with others (`priors`).
    """
    kind = generation(device)
    if (framework, kind) not in _PAIRS and kind not in ("cpu", "volta"):
        return PUBLISHED.values(framework, device) | MEMORY_PROFILES.get(framework, {})
    return (
        _GENERATIONS.get(kind, {})
        | MEMORY_PROFILES.get(framework, {})
        | _PAIRS.get((framework, kind), {})
    )


def published(framework: str, device: Device) -> Published | None:
    """The published runs that the pair's values are based on, or None."""
    return _BASES.get((framework, generation(device)))
