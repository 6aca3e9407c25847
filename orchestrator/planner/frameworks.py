"""What training frameworks differ in: which kernels fuse, which dtypes states are kept in, how much is padded.

A framework is a set of switches; the formulas are the same for all. Knows no speed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from workers.contracts.base import Refused
from workers.contracts.model import ModelSpec
from workers.contracts.plan import ParallelPlan

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Framework:
    """Switches of one framework; a request may set each of them under `framework`.

    `params_dtype`: of the stored weights (None: the compute dtype); where it is wider than the compute dtype, a
    gathered or cast copy is what computes. `grad_dtype` None: the stored weights' dtype. `master_weights`: an fp32
    copy beside 16-bit weights. `distributed_optimizer`: Megatron's, gradients stay whole (zero 1).
    `vocab_multiple`: the vocabulary is padded to this times tp. `attention_flops` is a convention for MFU.
    """

    name: str
    flash_attention: bool = True
    fused_norm: bool = True
    fused_swiglu: bool = True
    fused_cross_entropy: bool = False
    fused_rope: bool = True
    fused_softmax: bool = True
    params_dtype: str | None = None
    grad_dtype: str | None = None
    master_weights: bool = True
    optimizer: str = "adamw"
    distributed_optimizer: bool = False
    vocab_multiple: int = 1
    mask_bytes: float = 1.0
    overlap_grad_reduce: bool = True
    attention_flops: str = "full"

    def columns(self, plan: ParallelPlan, model: ModelSpec) -> dict[str, float]:
        """Its numbers for one plan: switches as 0 or 1, dtypes as bytes per element."""
        compute = _BYTES["bf16" if plan.precision == "fp8" else plan.precision]
        stored_dtype = plan.params_dtype or self.params_dtype
        stored = _BYTES[stored_dtype] if stored_dtype else compute
        grad_dtype = plan.grad_dtype or self.grad_dtype
        mixed = stored < 4
        return {
            "flash": float(self.flash_attention), "fused_norm": float(self.fused_norm),
            "fused_swiglu": float(self.fused_swiglu), "fused_cross_entropy": float(self.fused_cross_entropy),
            "fused_rope": float(self.fused_rope), "fused_softmax": float(self.fused_softmax),
            "compute_bytes": compute, "param_bytes": stored,
            "grad_bytes": _BYTES[grad_dtype] if grad_dtype else stored,
            "master_bytes": 4.0 if mixed and self.master_weights else 0.0,
            "moment_bytes": _moment_bytes(self.optimizer, 4.0 if self.master_weights or not mixed else stored),
            "reduce_bytes": _BYTES[plan.reduce_dtype] if plan.reduce_dtype else compute,
            "distributed_optimizer": float(self.distributed_optimizer),
            "vocab_multiple": float(self.vocab_multiple), "mask_bytes": self.mask_bytes,
            "overlap_grad_reduce": float(self.overlap_grad_reduce),
            "causal_flops": float(self.attention_flops == "causal"),
        }  # fmt: skip


# optimizer state per parameter beside master weights: moments kept, and the bytes of each where they are fixed
_MOMENTS: dict[str, tuple[float, float | None]] = {
    "adamw": (2, None),
    "adam": (2, None),
    "adam8bit": (2, 1.0),
    "adafactor": (0, None),  # rows and columns only
    "muon": (1, None),
    "lion": (1, None),
    "sgd": (0, None),
}


def _moment_bytes(optimizer: str, each: float) -> float:
    number, fixed = _MOMENTS[optimizer]
    return number * (fixed or each)


FRAMEWORKS = {
    each.name: each
    for each in (
        Framework("orrery"),
        Framework("fsdp2", params_dtype="fp32"),
        Framework("megatron", grad_dtype="fp32", vocab_multiple=128, distributed_optimizer=True),
        Framework("megatron-deepspeed", vocab_multiple=128, flash_attention=False),
        Framework("llm-foundry", params_dtype="fp32"),
        Framework("deepspeed"),
    )
}


def framework(given: Mapping[str, Any] | str | None) -> Framework:
    """The named framework with the given switches; unknown keys are ignored. Raises Refused for an unknown name."""
    given = {"name": given} if isinstance(given, str) else dict(given or {})
    name = str(given.pop("name", "orrery"))
    if name not in FRAMEWORKS:
        near = difflib.get_close_matches(name, FRAMEWORKS, n=2, cutoff=0.3) or sorted(FRAMEWORKS)
        raise Refused(f"{name!r} is not a framework the planner knows", ", ".join(near), field="framework.name")
    known = {each.name for each in fields(Framework)} - {"name"}
    return replace(FRAMEWORKS[name], **{key: value for key, value in given.items() if key in known})
