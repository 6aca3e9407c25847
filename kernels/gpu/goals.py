"""The goals on one H200, each with its deciding metric. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Metric = Literal["ratio", "gb_per_s", "ms", "extra_gib"]


MOST_SPREAD = 0.02


@dataclass(frozen=True)
class Goal:
    """Target of a benchmark's rows: at most the target for `ms` and `extra_gib`, at least for the
    others.

    ratio: the fastest peer's time over ours; gb_per_s: minimum bytes over our time; extra_gib:
    memory in addition to inputs and results. `dispatched`: decided by the call with its default
    backend.
    """

    key: str
    operation: str
    peer: str
    message: str
    metric: Metric
    target: float
    dispatched: bool = False

    def met(self, value: float, spread: float = 0.0) -> bool:
        """Whether the value meets the target. `spread` of the timing rounds is tolerated if
        dispatch may choose the peer itself.
        """
        if self.metric in ("ms", "extra_gib"):
            return value <= self.target
        return value >= self.target - (min(spread, MOST_SPREAD) if self.dispatched else 0.0)


_ALL = [
    Goal(
        "attention-dispatch",
        "dense attention, head dim 128, as called",
        "best available",
        "≥ 1.0×",
        "ratio",
        1.0,
        True,
    ),
    Goal(
        "attention-128-forward",
        "dense attention, head dim 128, forward, own kernel",
        "cuDNN",
        "≥ 0.8×",
        "ratio",
        0.8,
    ),
    Goal(
        "attention-128-backward",
        "dense attention, head dim 128, backward, own kernel",
        "cuDNN",
        "≥ 0.65×",
        "ratio",
        0.65,
    ),
    Goal(
        "attention-64-forward", "attention, head dim 64, forward", "cuDNN", "≥ 1.0×", "ratio", 1.0
    ),
    Goal(
        "attention-varlen",
        "attention over packed documents",
        "FlexAttention, torch varlen",
        "≥ 1.3×",
        "ratio",
        1.3,
    ),
    Goal(
        "attention-window",
        "attention with a window",
        "FlexAttention, torch varlen",
        "≥ 1.3×",
        "ratio",
        1.3,
    ),
    Goal("attention-softcap", "attention with a softcap", "FlexAttention", "≥ 1.3×", "ratio", 1.3),
    Goal(
        "paged-decode",
        "paged GQA decode, batch ≥ 16",
        "FlashInfer class, 3.8 TB/s",
        "≥ 3.8 TB/s",
        "gb_per_s",
        3800,
    ),
    Goal("mla-decode", "MLA decode", "FlashMLA, 3.0 TB/s on H800", "≥ 3.2 TB/s", "gb_per_s", 3200),
    Goal(
        "rms-norm-forward",
        "rms_norm forward",
        "Liger 2.6-2.8 TB/s on H100",
        "≥ 4.0 TB/s",
        "gb_per_s",
        4000,
    ),
    Goal(
        "rms-norm-backward",
        "rms_norm backward",
        "Liger 0.67-0.88 TB/s on H100",
        "≥ 3.2 TB/s",
        "gb_per_s",
        3200,
    ),
    Goal("swiglu", "swiglu", "Liger", "≥ 1.0×", "ratio", 1.0),
    Goal("rope", "apply_rope", "Liger", "≥ 1.0×", "ratio", 1.0),
    Goal("swiglu-quant", "swiglu with quantization", "separate calls", "≥ 1.4×", "ratio", 1.4),
    Goal("rope-cache", "apply_rope with cache write", "separate calls", "≥ 1.4×", "ratio", 1.4),
    Goal(
        "linear-cross-entropy",
        "linear cross-entropy, 8192 × 4096 × 131072",
        "Liger, CCE",
        "≤ 41 ms",
        "ms",
        41,
    ),
    Goal(
        "linear-cross-entropy-memory",
        "the same, memory in addition to inputs and gradients",
        "Liger, CCE",
        "≤ 0.6 GiB",
        "extra_gib",
        0.6,
    ),
    Goal(
        "adamw",
        "AdamW with unscale, found-inf, clip",
        "torch fused, separate passes",
        "≥ 1.5×",
        "ratio",
        1.5,
    ),
    Goal("fp8-small", "fp8 matmul, M ≤ 64", "cuBLASLt blockwise", "≥ 1.5×", "ratio", 1.5),
    Goal(
        "fp8-large",
        "fp8 matmul, M ≥ 1024, as called",
        "cuBLASLt blockwise",
        "≥ 1.0×",
        "ratio",
        1.0,
        True,
    ),
    Goal("int4-1", "int4 matmul, M = 1", "bf16 cuBLAS", "≥ 3.0×", "ratio", 3.0),
    Goal("int4-16", "int4 matmul, M = 16", "bf16 cuBLAS", "≥ 2.0×", "ratio", 2.0),
]

GOALS: dict[str, Goal] = {goal.key: goal for goal in _ALL}
